"""One step under ZeRO, moment by moment: what is gathered, computed, reduced and freed."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

from pardemo.book.chapters.zero_memory.drawings import SINCE
from pardemo.draw.canvas import Canvas
from pardemo.draw.palette import DONE, KEPT, ink_on
from pardemo.draw.parts import legend, parts, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import memory

LAYERS = (1, 2, 3)
_TALK = DONE["communication"]
_MARKED = 3  # with more ranks a part is too low for a letter
_NAMES = {"all-gather": "parameters", "reduce-scatter": "gradients"}


@dataclass
class Moment:
    """What each rank holds after an event of the step.

    Attributes:
        does: "forward", "backward", "all-gather", "reduce-scatter", "free", "update" or "" at the beginning.
        layers: the layers that it happens to.
        caption: the event in words, below the frame.
        held: (rank, layer, kind) -> the parts that are there, of N.
        summed: layers of whose gradients each rank has the sum over all ranks, for its own part.
        sent: numbers of 2 bytes that each rank has sent, in units of all parameters, without the (N − 1)/N.
    """

    ranks: int
    does: str = ""
    layers: tuple[int, ...] = ()
    caption: str = ""
    held: dict[tuple[int, int, str], set[int]] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    sent: float = 0.0

    def keep(self, kind: str, layer: int, all_parts: bool | None) -> None:
        """``all_parts`` True: every rank holds all parts; False: its own part alone; None: nothing."""
        for rank in range(self.ranks):
            held_parts = set(range(self.ranks)) if all_parts else {rank} if all_parts is False else set()
            self.held[rank, layer, kind] = held_parts

    @property
    def bytes_each(self) -> float:
        """Bytes on a rank for each parameter of the model."""
        bytes_of = dict(zip(SINCE, memory.ADAM, strict=True))
        nbytes = sum(bytes_of[kind] * len(held_parts) for (rank, _, kind), held_parts in self.held.items() if rank == 0)
        return nbytes / (self.ranks * len(LAYERS))


def zero_step(stage: int, ranks: int = 2) -> Player:
    """A forward, a backward and an update of three equal layers under ZeRO.

    Args:
        stage: 1, 2 or 3, for ZeRO-1, ZeRO-2 and ZeRO-3.
        ranks: N, from 2 to 4.

    Raises:
        ValueError: another number of ZeRO, or of ranks.
    """
    course = moments(stage, ranks)
    frames = [(_frame(moment, ranks), moment.caption) for moment in course]
    wanted = "all-gather" if stage == 3 else "reduce-scatter"  # on paper one frame has to tell the idea
    start = next(number for number, moment in enumerate(course) if moment.does == wanted)
    return Player(frames, f"a step of three layers under ZeRO-{stage} on {ranks} ranks", start)


def moments(stage: int, ranks: int) -> list[Moment]:
    """The step as a list of what happens; raises as :func:`zero_step` does."""
    if stage not in (1, 2, 3):
        raise ValueError(f"there are ZeRO-1, ZeRO-2 and ZeRO-3, and no ZeRO-{stage!r}")
    if not 2 <= ranks <= 4:
        raise ValueError(f"a step of 2 to 4 ranks can be drawn, not of {ranks}")
    caption = f"Between two steps each rank keeps {_CUT[stage]}. Ψ is the number of all parameters."
    course = [Moment(ranks, caption=caption)]
    for kind, since in SINCE.items():
        for layer in LAYERS:
            course[0].keep(kind, layer, None if kind == "gradients" else stage < since)
    for does, layers, caption, changes in _STAGES[stage]():
        moment = deepcopy(course[-1])
        moment.does, moment.layers, moment.caption = does, layers, caption
        for kind, layer, all_parts in changes:
            moment.keep(kind, layer, all_parts)
        moment.sent += len(layers) / len(LAYERS) * (does in _NAMES)
        if does == "reduce-scatter":
            moment.summed |= set(layers)
        elif does == "update":
            moment.summed.clear()
        course.append(moment)
    course[-1].caption += f" In all, each rank has sent {_psi(course[-1].sent)} numbers."
    return course


def _psi(sent: float) -> str:
    """``1⅓ Ψ(N − 1)/N``: what has been sent comes in thirds, a layer's each."""
    whole, thirds = divmod(round(sent * len(LAYERS)), len(LAYERS))
    count = (str(whole) if whole else "") + ("", "⅓", "⅔")[thirds]
    return unbroken(f"{'' if count == '1' else count + ' '}Ψ(N − 1)/N")


#: (what happens, to which layers, in words, [(kind, layer, all parts)])
Event = tuple[str, tuple[int, ...], str, list[tuple[str, int, bool | None]]]
_CUT = {
    1: "all parameters, but only its own part of the optimizer states",
    2: "all parameters, but only its own part of the optimizer states",
    3: "only its own part of everything",
}


def _forward() -> Iterator[Event]:
    for layer in LAYERS:
        yield "forward", (layer,), f"Layer {layer} goes forward. Every rank has all its parameters.", []


def _stage_1() -> Iterator[Event]:
    yield from _forward()
    for layer in reversed(LAYERS):
        caption = f"Layer {layer} goes backward, and its gradients stay on every rank."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
    caption = (
        "A reduce-scatter gives each rank the sum over all ranks for its own part, Σ. Its whole gradients stay as well."
    )
    yield "reduce-scatter", LAYERS, caption, []
    yield from _update_and_gather()


def _stage_2() -> Iterator[Event]:
    yield from _forward()
    for layer in reversed(LAYERS):
        caption = f"Layer {layer} goes backward. For a moment its gradients are there in full."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
        caption = f"A reduce-scatter: each rank keeps the sum for its own part of layer {layer}, and frees the rest."
        yield "reduce-scatter", (layer,), caption, [("gradients", layer, False)]
    yield from _update_and_gather()


def _update_and_gather() -> Iterator[Event]:
    caption = "Each rank updates its own part of the parameters. The other parts are out of date now."
    yield "update", LAYERS, caption, [("gradients", layer, None) for layer in LAYERS]
    yield "all-gather", LAYERS, "An all-gather brings the new parameters to every rank.", []


def _stage_3() -> Iterator[Event]:
    for layer in LAYERS:
        before = [("parameters", layer - 1, False)] if layer > 1 else []
        caption = f"Layer {layer - 1} is done; each rank frees it, except its own part. " * (layer > 1)
        caption += f"An all-gather brings layer {layer}'s parameters to every rank."
        yield "all-gather", (layer,), caption, [*before, ("parameters", layer, True)]
        yield "forward", (layer,), f"Layer {layer} goes forward.", []
    yield (
        "free",
        LAYERS[-1:],
        "The forward pass is over, and no layer is there in full.",
        [("parameters", LAYERS[-1], False)],
    )
    for layer in reversed(LAYERS):
        caption = f"The backward pass needs layer {layer}'s parameters again: another all-gather."
        yield "all-gather", (layer,), caption, [("parameters", layer, True)]
        caption = f"Layer {layer} goes backward. For a moment its gradients are there in full."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
        caption = (
            f"A reduce-scatter: each rank keeps the sum for its own part of layer {layer}, and frees the rest of it."
        )
        yield "reduce-scatter", (layer,), caption, [("gradients", layer, False), ("parameters", layer, False)]
    caption = "Each rank updates its own part. No all-gather follows: the next forward pass will gather."
    yield "update", LAYERS, caption, [("gradients", layer, None) for layer in LAYERS]


_STAGES = {1: _stage_1, 2: _stage_2, 3: _stage_3}


def _frame(moment: Moment, ranks: int) -> Canvas:
    canvas = Canvas(640, 424)
    gap = 46
    each = (504 - gap * (ranks - 1)) / ranks
    unit = each / memory.ADAM.total
    for rank in range(ranks):
        canvas.text(124 + rank * (each + gap) + each / 2, 20, f"rank {rank}", bold=True)
    for layer in LAYERS:
        y = 44 + 78 * (layer - 1)
        active = layer in moment.layers
        fill = DONE.get(moment.does, "none") if active else "none"
        canvas.box(12, y + 10, 92, 40, fill, f"layer {layer}")
        for rank in range(ranks):
            x = 124 + rank * (each + gap)
            for kind, nbytes in zip(SINCE, memory.ADAM, strict=True):
                parts(canvas, x, y, nbytes * unit, 60, ranks, moment.held[rank, layer, kind], KEPT[kind])
                x += nbytes * unit
            if layer in moment.summed and ranks <= _MARKED:
                _mark_sum(canvas, 124 + rank * (each + gap) + 3 * unit, y, rank, ranks)
            if active and moment.does in _NAMES and rank < ranks - 1:
                canvas.arrow([(x + 5, y + 30), (x + gap - 5, y + 30)], _TALK, both=True)
    heading = f"{moment.does}: {_NAMES[moment.does]}" if moment.does in _NAMES else moment.does
    canvas.text(124, 296, heading or "before the step", anchor="start", bold=True)
    canvas.text(12, 332, f"each rank holds {moment.bytes_each:.3g} bytes for each parameter", size=18, anchor="start")
    sent = f"and has sent {_psi(moment.sent)} numbers" if moment.sent else "and has sent nothing yet"
    canvas.text(12, 362, sent, size=18, anchor="start")
    legend(canvas, 12, 402, {name: KEPT[name] for name in SINCE})
    if moment.summed and ranks <= _MARKED:
        canvas.text(628, 362, "Σ summed over ranks", size=18, anchor="end")
    return canvas


def _mark_sum(canvas: Canvas, x: float, y: float, rank: int, ranks: int) -> None:
    """A Σ on a rank's own part of a layer's gradients, ``x`` their middle: what it holds there is the ranks' sum."""
    canvas.text(x, y + 60 / ranks * (rank + 0.5), "Σ", size=18, fill=ink_on(KEPT["gradients"]), bold=True)
