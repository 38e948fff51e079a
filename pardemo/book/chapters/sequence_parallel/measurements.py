"""A sequence-parallel layer, the package's and the libraries', compared with the plain one."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from pardemo.meters import MemoryMeter, WireMeter
from pardemo.peers.cut_layers import cut_layer, to_local
from pardemo.small_models import gpt
from pardemo.world.rank import device


class LayerComparison(NamedTuple):
    """One rank's sequence-parallel layer compared with the plain one.

    Attributes:
        error: the largest relative error of its output and of all gradients against the plain layer's.
        sent_bytes: forward and backward.
        kept_bytes: of activations that the layer keeps for the backward pass.
    """

    error: float
    sent_bytes: int
    kept_bytes: int


def in_sequence(library: str, batch: int, sequence: int, hidden: int, heads: int) -> LayerComparison:
    """A block (of Megatron-core: its MLP) under sequence parallelism: each rank has its own tokens. Collective.

    Megatron-core leaves the all-reduce of replicated parameters' gradients, here a bias's, to its training loop; this
    function does it.
    """
    block = gpt.seeded(lambda: gpt.Block(hidden, heads)).to(device())
    x = gpt.numbers(batch, sequence, hidden, seed=1).to(device()).requires_grad_()
    seed = gpt.numbers(batch, sequence, hidden, seed=2).to(device()) / sequence
    plain = block.mlp if library == "Megatron-core" else block
    expected = plain(x)
    expected.backward(seed)
    with cut_layer(library, plain, sequence_parallel=True) as (layer, turn, weights_error):
        if library != "DTensor":  # connections, and buffers that stay, belong to no step; it has none of its own
            layer(turn(_own(x)).requires_grad_()).backward(turn(_own(seed)))
            layer.zero_grad()
        mine = turn(_own(x)).requires_grad_()
        with WireMeter() as wire:
            with MemoryMeter(layer) as memory:
                out = layer(mine)
            out.backward(turn(_own(seed)))
        for parameter in layer.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        pairs = (out, _own(expected)), (mine.grad, _own(x.grad))
        error = max(weights_error(), *(gpt.relative_error(turn(to_local(result)), right) for result, right in pairs))
    return LayerComparison(error, wire.sent_bytes, memory.live["activations"])


def selective_percent(sequence: int, hidden: int, heads: int) -> float:
    """By how many per cent a block's step has more operations if attention's core is computed again.

    Counted on the meta device, which computes nothing, so that the block may be as large as a real one.
    """
    with torch.device("meta"):
        block, x = gpt.Block(hidden, heads), torch.empty(1, sequence, hidden, requires_grad=True)

    def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v

    def operations(again: bool) -> int:
        with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
            thirds = block.attention.qkv(block.norm_1(x)).chunk(3, -1)
            heads_of = [third.unflatten(-1, (heads, -1)).transpose(1, 2) for third in thirds]
            y = checkpoint(core, *heads_of, use_reentrant=False) if again else core(*heads_of)
            y = x + block.attention.out(y.transpose(1, 2).flatten(2))
            (y + block.mlp(block.norm_2(y))).sum().backward()
        return counter.get_total_flops()

    return 100 * (operations(True) / operations(False) - 1)


def _own(full: torch.Tensor) -> torch.Tensor:
    """This rank's tokens of [batch, sequence, hidden]."""
    return full.detach().chunk(dist.get_world_size(), 1)[dist.get_rank()].contiguous()
