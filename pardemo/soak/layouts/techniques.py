"""Attention over a cut sequence, experts, Muon and low precision in random configurations, each against one process.

Each of :data:`TECHNIQUES` runs on every rank, draws its configuration from the number of ranks and of the case, and
raises AssertionError, with the configuration, where the ranks' result is not what one process gets.
"""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn import functional as F

from pardemo.context_parallel import cut, join, ring_attention, ulysses_attention
from pardemo.expert_parallel import ExpertParallel, Router, auxiliary_loss
from pardemo.low_precision import FORMATS, quantised_all_gather, quantised_reduce_scatter, rounded
from pardemo.optimizers import ShardedMuon
from pardemo.small_models import gpt

TOLERANCE = 1e-5  # relative, in fp32
HIDDEN = 16
RANKS = (2, 3, 4)


def check(name: str, number: int, seed: int) -> None:
    """Runs on every rank: case ``number`` of a technique."""
    TECHNIQUES[name](Random(f"{seed} {name} {dist.get_world_size()} {number}"), dist.get_rank(), dist.get_world_size())


def _expect(right: bool, *about: object) -> None:
    if not right:
        raise AssertionError(f"not what one process gets: {', '.join(map(str, about))}")


def _attention(chance: Random, rank: int, ranks: int) -> None:
    kind = chance.choice(["ring", "ulysses"])
    order = chance.choice(["zigzag", "plain"]) if kind == "ring" else "plain"
    groups = chance.choice([1, 2, 3])
    heads = groups * chance.choice([1, 2, 4]) * (ranks if kind == "ulysses" else 1)
    tokens = ranks * (2 if order == "zigzag" else 1) * chance.randint(1, 7)
    batch, width = chance.randint(1, 3), chance.choice([2, 8, 16])
    values = width if chance.random() < 0.7 else chance.choice([4, 12])
    shapes = ((batch, heads, tokens, width), (batch, groups, tokens, width), (batch, groups, tokens, values),
              (batch, heads, tokens, values))  # fmt: skip
    seed = chance.randint(0, 999)
    whole = [gpt.numbers(*shape, seed=seed + place) for place, shape in enumerate(shapes)]
    how: dict[str, Any] = {"causal": chance.random() < 0.6}
    documents = None
    if kind == "ring":
        how["order"] = order
        if chance.random() < 0.4:
            drawn = torch.tensor([[chance.randint(0, 2) for _ in range(tokens)] for _ in range(batch)])
            documents = drawn.sort().values
    queries, keys, of_keys, gradient = whole
    expected = plain_attention(queries, keys, of_keys, gradient, how["causal"], documents)
    if documents is not None:
        how["documents"] = cut(documents, order=order)
    mine = [cut(each, dim=2, order=order) for each in whole]
    q, k, v = (each.requires_grad_() for each in mine[:3])
    out = (ring_attention if kind == "ring" else ulysses_attention)(q, k, v, **how)
    parts = [out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3])]
    joined = [join(each, dim=2, order=order) for each in parts]
    error = attention_error(joined, expected)
    _expect(error < TOLERANCE, kind, order, how["causal"], [tuple(each.shape) for each in whole], error)


def plain_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    causal: bool = True,
    documents: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Output, and gradients of q, k, v, of one process in fp64; all [b, h, s, d], ``gradient`` of the output.

    ``documents``: of each token its document [b, s]; tokens see those of their own alone.
    """
    q, k, v = (each.double().requires_grad_() for each in (q, k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    seen = (seen.tril() if causal else seen).expand(q.shape[0], 1, -1, -1)
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    wide_k, wide_v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    out = F.scaled_dot_product_attention(q, wide_k, wide_v, attn_mask=seen)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient.double())]


def attention_error(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative error of output and gradients.

    Where every token sees itself alone, the gradients of queries and keys are zero, and what the reference has of them
    is fp64's rounding: what ranks have is then held against the largest tensor.
    """
    largest = max(float(theirs.norm()) for theirs in expected)
    errors = []
    for ours, theirs in zip(found, expected, strict=True):
        if float(theirs.norm()) > 1e-12 * largest:
            errors.append(gpt.relative_error(ours.double(), theirs))
        else:
            size = float(ours.double().norm())
            errors.append(size / largest if math.isfinite(size) else math.inf)
    return max(errors)


def _expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))


def _experts(chance: Random, rank: int, ranks: int) -> None:
    each = chance.randint(1, 4)
    count = each * ranks
    chosen = chance.randint(1, min(count, 4))
    how: dict[str, Any] = {"scores": chance.choice(["softmax", "sigmoid"]), "norm_topk_prob": chance.random() < 0.5}
    tokens = [chance.choice([0, 1, 5, 17]) for _ in range(ranks)]
    tokens[chance.randrange(ranks)] += 3
    seed = chance.randint(0, 999)

    def build() -> nn.Module:
        return nn.ModuleList([Router(HIDDEN, count, chosen, **how), nn.ModuleList(_expert() for _ in range(count))])

    router, modules = gpt.seeded(build, seed).children()
    assert isinstance(router, Router)
    experts = list(modules.children())
    layer = ExpertParallel(router, experts)
    everyone = gpt.numbers(sum(tokens), HIDDEN, seed=seed)
    mine = everyone.split(tokens)[rank].clone().requires_grad_()
    out = layer(mine)
    assert layer.routing is not None
    (out.square().sum() + auxiliary_loss(layer.routing)).backward()
    full = everyone.clone().requires_grad_()
    expected = _every_expert(router, experts, full)
    auxiliary = torch.stack([auxiliary_loss(router(part)) for part in full.split(tokens)]).sum()
    (expected.square().sum() + auxiliary).backward()
    about = (count, chosen, tokens, how)
    assert full.grad is not None
    if len(mine):
        _expect(gpt.relative_error(out, expected.split(tokens)[rank]) < TOLERANCE, "output", *about)
        _expect(gpt.relative_error(mine.grad, full.grad.split(tokens)[rank]) < TOLERANCE, "tokens", *about)
    for own, other in zip(layer.experts, experts[rank * each : (rank + 1) * each], strict=True):
        for ours, theirs in zip(own.parameters(), other.parameters(), strict=True):
            right = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            assert ours.grad is not None, about
            _expect(bool((ours.grad - right).norm() <= TOLERANCE * right.norm() + 1e-7), "an expert", *about)


def _every_expert(router: nn.Module, experts: list[nn.Module], tokens: torch.Tensor) -> torch.Tensor:
    """Every token through every expert, in one process: [T, h]."""
    routing = router(tokens)
    weights = torch.zeros_like(routing.scores).scatter(-1, routing.experts, routing.weights)
    outs = [weights[:, e : e + 1].to(tokens.dtype) * expert(tokens) for e, expert in enumerate(experts)]
    return torch.stack(outs).sum(0)


def _muon(chance: Random, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    shapes = [(chance.randint(1, 40), chance.randint(1, 40)) for _ in range(chance.randint(1, 6))]
    how: dict[str, Any] = {
        "lr": chance.choice([1e-3, 0.02]), "weight_decay": chance.choice([0.0, 0.1]),
        "momentum": chance.choice([0.0, 0.95]), "nesterov": chance.random() < 0.5,
    }  # fmt: skip
    seed = chance.randint(0, 999)

    def drawn(shift: int) -> list[torch.Tensor]:
        return [gpt.numbers(*shape, seed=seed + shift + place) for place, shape in enumerate(shapes)]

    def shards(whole: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

    alone = [nn.Parameter(each) for each in drawn(0)]
    ours: list[Any] = [nn.Parameter(shards(each)) for each in drawn(0)]
    optimizers = torch.optim.Muon(alone, **how), ShardedMuon(ours, **how)
    for step in range(2):
        for one, other, gradient in zip(alone, ours, drawn(100 * (step + 1)), strict=True):
            one.grad, other.grad = gradient, shards(gradient)
        for optimizer in optimizers:
            optimizer.step()
    same = all(torch.equal(other.full_tensor(), one) for one, other in zip(alone, ours, strict=True))
    _expect(same, shapes, how)


def _codes(chance: Random, rank: int, ranks: int) -> None:
    name, dtype = chance.choice(list(FORMATS)), chance.choice([torch.float32, torch.bfloat16])
    shape = [chance.randint(1, 9), *[chance.randint(1, 50) for _ in range(chance.randint(0, 2))]]
    scale, seed = 10.0 ** chance.randint(-6, 6), chance.randint(0, 999)
    shards = [(scale * gpt.numbers(*shape, seed=seed + of)).to(dtype) for of in range(ranks)]
    gathered = quantised_all_gather(shards[rank], format=name)
    _expect(torch.equal(gathered, torch.stack([rounded(each, name) for each in shards])), "all-gather", name, shape)
    shape[0] *= ranks
    whole = [(scale * gpt.numbers(*shape, seed=seed + of)).to(dtype) for of in range(ranks)]
    scattered = quantised_reduce_scatter(whole[rank], format=name)
    expected = torch.stack([rounded(each.chunk(ranks)[rank].float(), name) for each in whole]).sum(0)
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    _expect(gpt.relative_error(scattered.float(), expected) < bound, "reduce-scatter", name, dtype, shape)


TECHNIQUES: dict[str, Callable[[Random, int, int], None]] = {
    "attention": _attention, "experts": _experts, "muon": _muon, "codes": _codes,
}  # fmt: skip
