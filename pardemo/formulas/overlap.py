"""Computes the seconds of computation and communication that overlap, and the exposed communication.

One rule is behind all of it: a message hides behind computation that does not need it. Computations follow one upon the
other, and so do the messages of one link. Seconds everywhere.

Sources: Jangda et al. 2022 (arXiv 2105.05720), Wang et al. 2023 (collectives cut into pieces beside the products that
need them, ASPLOS 23); Johnson 1954 (two machines, one after the other); DeepSeek-V3 (arXiv 2412.19437 §3.2.1).
"""

from collections.abc import Sequence
from typing import NamedTuple

from pardemo.formulas import check_seconds


def computed_then_sent_s(computes: Sequence[float], sends: Sequence[float]) -> float:
    """Until the last message has arrived: each piece is computed, and its message waits for the one before it.

    Raises:
        ValueError: not as many messages as pieces, or a negative time.
    """
    if len(computes) != len(sends):
        raise ValueError(f"each piece has a message of its own: {len(computes)} pieces, {len(sends)} messages")
    check_seconds(*computes, *sends)
    ready = free = 0.0
    for compute, send in zip(computes, sends, strict=True):
        ready += compute
        free = max(ready, free) + send
    return free


def pieces_s(computing: float, sending: float, start: float, pieces: int) -> float:
    """Computation whose result is sent in ``pieces`` equal parts, each as soon as it is computed.

    Args:
        sending: of all bytes. start: that each message costs beside its bytes.

    Raises:
        ValueError: a number of pieces below 1, or a negative time.
    """
    if pieces < 1:
        raise ValueError(f"a result is sent in one piece or more, not {pieces}")
    check_seconds(computing, sending, start)
    return computed_then_sent_s([computing / pieces] * pieces, [sending / pieces + start] * pieces)


def best_pieces(computing: float, sending: float, start: float, most: int = 64) -> int:
    """The number of equal pieces, up to ``most``, with which :func:`pieces_s` is shortest; the smallest of several."""
    return min(range(1, most + 1), key=lambda pieces: (pieces_s(computing, sending, start, pieces), pieces))


def ring_s(product: float, hop: float, ranks: int) -> float:
    """A product of ``ranks`` chunks, one of which is at home, while the others come round a ring hop by hop.

    The same for a product whose parts of a sum go round and end at home.

    Args:
        product: of one chunk. hop: of one chunk to the next rank.

    Raises:
        ValueError: a number of ranks below 1, or a negative time.
    """
    if ranks < 1:
        raise ValueError(f"a ring has one rank or more, not {ranks}")
    check_seconds(product, hop)
    return product + (ranks - 1) * max(product, hop)


def prefetched_s(gathers: Sequence[float], computes: Sequence[float], depth: int) -> float:
    """Layers whose weights are gathered up to ``depth`` layers ahead of the layer that computes.

    A layer's gather begins when the gather before it has ended and the layer ``depth + 1`` before it has computed.

    Raises:
        ValueError: not as many gathers as layers, a negative depth or time.
    """
    if len(gathers) != len(computes):
        raise ValueError(f"each layer is gathered once: {len(computes)} layers, {len(gathers)} gathers")
    if depth < 0:
        raise ValueError(f"a layer is gathered 0 layers ahead or more, not {depth}")
    check_seconds(*gathers, *computes)
    arrived, done = 0.0, [0.0] * len(computes)
    for layer, (gather, compute) in enumerate(zip(gathers, computes, strict=True)):
        room = done[layer - depth - 1] if layer > depth else 0.0
        arrived = max(arrived, room) + gather
        done[layer] = max(arrived, done[layer - 1] if layer else 0.0) + compute
    return done[-1] if done else 0.0


def most_gathered(nbytes: Sequence[float], depth: int) -> float:
    """Bytes of the layers that :func:`prefetched_s` has gathered at its fullest: ``depth + 1`` neighbours."""
    if depth < 0:
        raise ValueError(f"a layer is gathered 0 layers ahead or more, not {depth}")
    return max((sum(nbytes[layer : layer + depth + 1]) for layer in range(len(nbytes))), default=0.0)


class ExpertLayers(NamedTuple):
    """Seconds of layers with experts: in one piece, and in two halves that take turns."""

    whole: float
    halves: float


def expert_layers_s(attention: float, experts: float, exchange: float, layers: int) -> ExpertLayers:
    """Layers of attention, an exchange of tokens, experts, and an exchange back.

    In halves, each exchange of one half has the other half's attention or experts beside it.

    Args:
        attention, experts, exchange: of one half of the tokens.

    Raises:
        ValueError: a number of layers below 0, or a negative time.
    """
    if layers < 0:
        raise ValueError(f"a model has 0 layers or more, not {layers}")
    check_seconds(attention, experts, exchange)
    now, free, back = 0.0, 0.0, [0.0, 0.0]
    for _ in range(layers):
        there = [0.0, 0.0]
        for half in (0, 1):
            now = max(now, back[half]) + attention
            there[half] = free = max(now, free) + exchange
        for half in (0, 1):
            now = max(now, there[half]) + experts
            back[half] = free = max(now, free) + exchange
    return ExpertLayers(2 * layers * (attention + experts + 2 * exchange), max(now, *back))


def hidden_share(whole: float, computing: float, sending: float) -> float:
    """The share of ``sending`` seconds that did not make ``whole`` longer than ``computing``; 1 where none did.

    Raises:
        ValueError: nothing is sent, or a negative time.
    """
    check_seconds(whole, computing, sending)
    if sending == 0:
        raise ValueError("of messages that take no time nothing can be hidden")
    return 1 - (whole - computing) / sending


def price_of_hiding(sending: float, share: float) -> float:
    """Seconds by which hidden messages lengthen the computation, while they take a ``share`` of the GPU's cores.

    Raises:
        ValueError: a share below 0 or not below 1, or a negative time.
    """
    check_seconds(sending)
    if not 0 <= share < 1:
        raise ValueError(f"messages take a share of the cores from 0 to below 1, not {share}")
    return sending * share
