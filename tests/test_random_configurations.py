"""Techniques over ranks in configurations drawn at random, each against one process.

``PARDEMO_CONFIGURATIONS=200 pytest tests/test_random_configurations.py`` draws as many on each number of ranks.
"""

import os
from random import Random

import pytest
import torch
from test_context_parallel import off, on_ranks, plain
from test_expert_parallel import HIDDEN, TOLERANCE, expert, whole_layer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pardemo.context_parallel import cut, ring_attention, ulysses_attention
from pardemo.expert_parallel import ExpertParallel, Router, auxiliary_loss
from pardemo.low_precision import FORMATS, quantised_all_gather, quantised_reduce_scatter, rounded
from pardemo.optimizers import ShardedMuon
from pardemo.small_models import gpt

#: On each number of ranks; what seed gives which configuration does not change.
MANY = int(os.environ.get("PARDEMO_CONFIGURATIONS", "25"))


def of_attention(chance, ranks):
    """A configuration that can be run: its words, and the whole sequence's tensors."""
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
    how = {"causal": chance.random() < 0.6}
    documents = None
    if kind == "ring":
        how["order"] = order
        if chance.random() < 0.4:
            documents = (
                torch.tensor([[chance.randint(0, 2) for _ in range(tokens)] for _ in range(batch)]).sort().values
            )
    return kind, how, whole, documents


@pytest.mark.ranks(2, 3, 4)
def test_attention(rank, world_size):
    for number in range(MANY):
        kind, how, whole, documents = of_attention(Random(f"{world_size} {number}"), world_size)
        expected = plain(*whole, causal=how["causal"], documents=documents)
        if documents is not None:
            how["documents"] = cut(documents, order=how["order"])
        found = on_ranks(ring_attention if kind == "ring" else ulysses_attention, whole, **how)
        assert off(found, expected) < TOLERANCE, (number, kind, how["causal"], [tuple(each.shape) for each in whole])


@pytest.mark.ranks(2, 3, 4)
def test_experts(rank, world_size):
    for number in range(MANY):
        chance = Random(f"experts {world_size} {number}")
        each = chance.randint(1, 4)
        count = each * world_size
        chosen = chance.randint(1, min(count, 4))
        how = {"scores": chance.choice(["softmax", "sigmoid"]), "normalised": chance.random() < 0.5}
        tokens = [chance.choice([0, 1, 5, 17]) for _ in range(world_size)]
        tokens[chance.randrange(world_size)] += 3
        seed = chance.randint(0, 999)

        def build(count=count, chosen=chosen, how=how):
            return nn.ModuleList([Router(HIDDEN, count, chosen, **how), nn.ModuleList(expert() for _ in range(count))])

        router, experts = gpt.seeded(build, seed)
        experts = list(experts)
        layer = ExpertParallel(router, experts)
        everyone = gpt.numbers(sum(tokens), HIDDEN, seed=seed)
        mine = everyone.split(tokens)[rank].clone().requires_grad_()
        out = layer(mine)
        (out.square().sum() + auxiliary_loss(layer.routing)).backward()
        full = everyone.clone().requires_grad_()
        expected, _ = whole_layer(router, experts, None, full)
        parts = full.split(tokens)
        (expected.square().sum() + sum(auxiliary_loss(router(part)) for part in parts)).backward()
        words = (number, count, chosen, tokens, how)
        if len(mine):
            assert gpt.relative_error(out, expected.split(tokens)[rank]) < TOLERANCE, words
            assert gpt.relative_error(mine.grad, full.grad.split(tokens)[rank]) < TOLERANCE, words
        for own, other in zip(layer.experts, experts[rank * each : (rank + 1) * each], strict=True):
            for one, its in zip(own.parameters(), other.parameters(), strict=True):
                right = torch.zeros_like(its) if its.grad is None else its.grad
                assert (one.grad - right).norm() <= TOLERANCE * right.norm() + 1e-7, words


@pytest.mark.ranks(2, 3, 4)
def test_muon(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    for number in range(MANY):
        chance = Random(f"muon {world_size} {number}")
        shapes = [(chance.randint(1, 40), chance.randint(1, 40)) for _ in range(chance.randint(1, 6))]
        how = {"lr": chance.choice([1e-3, 0.02]), "weight_decay": chance.choice([0.0, 0.1]),
               "momentum": chance.choice([0.0, 0.95]), "nesterov": chance.random() < 0.5}  # fmt: skip
        seed = chance.randint(0, 999)

        def drawn(shift, shapes=shapes, seed=seed):
            return [gpt.numbers(*shape, seed=seed + shift + place) for place, shape in enumerate(shapes)]

        def cut_up(one):
            return distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)

        alone = [nn.Parameter(one) for one in drawn(0)]
        ours = [nn.Parameter(cut_up(one)) for one in drawn(0)]
        optimizers = torch.optim.Muon(alone, **how), ShardedMuon(ours, **how)
        for step in range(2):
            for one, other, gradient in zip(alone, ours, drawn(100 * (step + 1)), strict=True):
                one.grad, other.grad = gradient, cut_up(gradient)
            for optimizer in optimizers:
                optimizer.step()
        assert all(torch.equal(other.full_tensor(), one) for one, other in zip(alone, ours, strict=True)), (number, how)


@pytest.mark.ranks(2, 3, 4)
def test_codes(rank, world_size):
    for number in range(MANY):
        chance = Random(f"codes {world_size} {number}")
        name, dtype = chance.choice(list(FORMATS)), chance.choice([torch.float32, torch.bfloat16])
        shape = [chance.randint(1, 9), *[chance.randint(1, 50) for _ in range(chance.randint(0, 2))]]
        scale, seed = 10.0 ** chance.randint(-6, 6), chance.randint(0, 999)
        shards = [(scale * gpt.numbers(*shape, seed=seed + of)).to(dtype) for of in range(world_size)]
        gathered = quantised_all_gather(shards[rank], format=name)
        assert torch.equal(gathered, torch.stack([rounded(one, name) for one in shards])), (number, name, shape)
        shape[0] *= world_size
        whole = [(scale * gpt.numbers(*shape, seed=seed + of)).to(dtype) for of in range(world_size)]
        found = quantised_reduce_scatter(whole[rank], format=name)
        parts = [rounded(one.chunk(world_size)[rank].float(), name) for one in whole]
        assert gpt.relative_error(found.float(), sum(parts)) < (1e-6 if dtype == torch.float32 else 2**-8), (
            number,
            name,
        )
