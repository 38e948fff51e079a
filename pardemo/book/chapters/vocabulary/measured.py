"""A loss over a cut vocabulary and a sequence-parallel layer, ours and the libraries', compared with plain ones."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo.meters import MemoryMeter, WireMeter
from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from pardemo.world.rank import device


class Comparison(NamedTuple):
    """One rank's loss or layer compared with the plain one.

    Attributes:
        error: the largest relative error of results and gradients against the plain layer's.
        sent_bytes: by the loss alone, forward; or by a layer, forward and backward.
        kept_bytes: of activations that the loss alone, or the layer, keeps for the backward pass.
        changed: the share of this rank's logits that a loss overwrote.
    """

    error: float
    sent_bytes: int
    kept_bytes: int
    changed: float = 0.0


def loss(library: str, tokens: int, vocabulary: int, hidden: int) -> Comparison:
    """The loss, and its gradients, with an embedding and a head whose vocabulary is cut. Collective.

    Args:
        library: "pardemo", "Megatron-core" or "DTensor".
    """
    layers = gpt.seeded(lambda: nn.ModuleList([nn.Embedding(vocabulary, hidden), _head(hidden, vocabulary)]))
    layers = layers.to(device())
    text = gpt.text(8, tokens // 8 + 1, vocabulary).to(device())
    inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    expected = F.cross_entropy(layers[1](layers[0](inputs)).flatten(0, 1), labels.flatten())
    expected.backward()
    truth = [layer.weight.grad.chunk(dist.get_world_size())[dist.get_rank()] for layer in layers]

    with _parts(library, layers) as (embedding, head, loss_of):
        logits = head(embedding(inputs))
        before = _local(logits).detach().clone()
        with WireMeter() as wire, MemoryMeter() as memory:
            mean_loss = loss_of(logits, labels)
        changed = float((_local(logits).detach() != before).float().mean())
        mean_loss.backward()
        gradients = [_rows_here(layer.weight.grad) for layer in (embedding, head)]
    errors = [gpt.relative_error(*pair) for pair in zip(gradients, truth, strict=True)]
    error = max(gpt.relative_error(_local(mean_loss), expected), *errors)
    return Comparison(error, wire.sent_bytes, memory.live["activations"], changed)


@contextlib.contextmanager
def _parts(library: str, layers: nn.ModuleList) -> Iterator[tuple[nn.Module, nn.Module, Callable]]:
    """This rank's embedding, head, and the function from logits and labels to the mean loss."""
    if library == "pardemo":
        yield VocabParallelEmbedding(layers[0]), ColumnParallelLinear(layers[1]), vocab_parallel_cross_entropy
    elif library == "DTensor":
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as of_torch

        from pardemo.peers.pytorch import dtensor

        plan = {
            "0": of_torch.RowwiseParallel(input_layouts=Replicate()),
            "1": of_torch.ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        cut = of_torch.parallelize_module(
            nn.Sequential(*copy.deepcopy(layers)), dtensor.mesh(dist.get_world_size()), plan
        )
        with of_torch.loss_parallel():
            yield cut[0], cut[1], lambda logits, labels: F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    else:
        from megatron.core import tensor_parallel as theirs

        from pardemo.peers import megatron

        words, hidden = layers[0].weight.shape
        with megatron.megatron(tp=dist.get_world_size()):
            settings = megatron.config(hidden, dist.get_world_size())
            shared = {"init_method": settings.init_method, "config": settings}
            embedding = theirs.VocabParallelEmbedding(words, hidden, **shared)
            head = theirs.ColumnParallelLinear(hidden, words, bias=False, gather_output=False, **shared)
            with torch.no_grad():
                for mine, whole in ((embedding, layers[0]), (head, layers[1])):
                    mine.weight.copy_(whole.weight.chunk(dist.get_world_size())[dist.get_rank()])
            yield (
                embedding,
                _First(head),
                lambda logits, labels: theirs.vocab_parallel_cross_entropy(logits, labels).mean(),
            )


class _First(nn.Module):
    """The output of a Megatron-core layer, without the bias that it returns beside it."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0]


def in_sequence(library: str, batch: int, sequence: int, hidden: int, heads: int) -> Comparison:
    """A block (of Megatron-core: its MLP) under sequence parallelism: each rank has its own tokens. Collective.

    Megatron-core leaves the all-reduce of replicated parameters' gradients, here a bias's, to its training loop; this
    function does it.
    """
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor

    block = gpt.seeded(lambda: gpt.Block(hidden, heads)).to(device())
    x = gpt.numbers(batch, sequence, hidden, seed=1).to(device()).requires_grad_()
    seed = gpt.numbers(batch, sequence, hidden, seed=2).to(device()) / sequence
    plain = block.mlp if library == "Megatron-core" else block
    expected = plain(x)
    expected.backward(seed)
    cut_layer = {"pardemo": gpt.parallel_block, "Megatron-core": gpt.parallel_mlp}.get(library)
    truth = dict(cut_layer(gpt.gradients_as_weights(plain)).named_parameters()) if cut_layer else gpt.gradients(block)

    with megatron.megatron(tp=dist.get_world_size()) if library == "Megatron-core" else contextlib.nullcontext():
        if library == "pardemo":
            layer, gradients_of = gpt.parallel_block(block, sequence_parallel=True), gpt.gradients
        elif library == "DTensor":
            layer = dtensor.block(block, dtensor.mesh(dist.get_world_size()), sequence_parallel=True)
            gradients_of = dtensor.gradients
        else:
            layer, gradients_of = megatron.MLP(block.mlp, sequence_parallel=True), megatron.gradients
        tokens = 0 if library == "Megatron-core" else 1  # the dimension that it has them in
        if library != "DTensor":  # connections, and buffers that stay, belong to no step; it has none of its own
            mine = _own(x, tokens).requires_grad_()
            layer(mine).backward(_own(seed, tokens))
            layer.zero_grad()
        mine = _own(x, tokens).requires_grad_()
        with WireMeter() as wire:
            with MemoryMeter(layer) as memory:
                out = layer(mine)
            out.backward(_own(seed, tokens))
        for parameter in layer.parameters():
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad)
        weights = gpt.largest_error(gradients_of(layer), truth)
    pairs = (out, _own(expected, tokens)), (mine.grad, _own(x.grad, tokens))
    error = max(weights, *(gpt.relative_error(_local(result), right) for result, right in pairs))
    return Comparison(error, wire.sent_bytes, memory.live["activations"])


def _own(whole: torch.Tensor, tokens: int) -> torch.Tensor:
    """This rank's tokens of [batch, sequence, hidden], with the tokens in dimension 0 or 1."""
    turned = whole.detach() if tokens == 1 else whole.detach().transpose(0, 1)
    return turned.chunk(dist.get_world_size(), tokens)[dist.get_rank()].contiguous()


def _head(hidden: int, vocabulary: int) -> nn.Linear:
    return nn.Linear(hidden, vocabulary, bias=False)


def _rows_here(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a gradient; of a DTensor too, whatever its placement (then collective)."""
    if not hasattr(gradient, "full_tensor"):
        return gradient
    return gradient.full_tensor().chunk(dist.get_world_size())[dist.get_rank()]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
