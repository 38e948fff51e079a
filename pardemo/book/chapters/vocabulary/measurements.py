"""A loss over a cut vocabulary, the package's and the libraries', compared with the plain one."""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo.meters import MemoryMeter, WireMeter
from pardemo.peers.cut_layers import to_local
from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from pardemo.world.rank import device


class LossComparison(NamedTuple):
    """One rank's loss compared with the plain one.

    Attributes:
        error: the largest relative error of the loss and of the gradients against the plain layers'.
        sent_bytes: by the loss alone, forward.
        kept_bytes: of activations that the loss alone keeps for the backward pass.
        changed: the share of this rank's logits that the loss overwrote.
    """

    error: float
    sent_bytes: int
    kept_bytes: int
    changed: float = 0.0


def loss(library: str, tokens: int, vocabulary: int, hidden: int) -> LossComparison:
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
        before = to_local(logits).detach().clone()
        with WireMeter() as wire, MemoryMeter() as memory:
            mean_loss = loss_of(logits, labels)
        changed = float((to_local(logits).detach() != before).float().mean())
        mean_loss.backward()
        gradients = [_rows_here(layer.weight.grad) for layer in (embedding, head)]
    errors = [gpt.relative_error(*pair) for pair in zip(gradients, truth, strict=True)]
    error = max(gpt.relative_error(to_local(mean_loss), expected), *errors)
    return LossComparison(error, wire.sent_bytes, memory.live["activations"], changed)


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
                for mine, full in ((embedding, layers[0]), (head, layers[1])):
                    mine.weight.copy_(full.weight.chunk(dist.get_world_size())[dist.get_rank()])
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


def _head(hidden: int, vocabulary: int) -> nn.Linear:
    return nn.Linear(hidden, vocabulary, bias=False)


def _rows_here(gradient: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a gradient; of a DTensor too, whatever its placement (then collective)."""
    if not hasattr(gradient, "full_tensor"):
        return gradient
    return gradient.full_tensor().chunk(dist.get_world_size())[dist.get_rank()]
