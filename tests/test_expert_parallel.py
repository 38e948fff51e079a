"""Experts on ranks against the full layer in one process, on the tokens of all ranks, in the same test."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo import WireMeter
from pardemo.data_parallel import BucketedDataParallel
from pardemo.expert_parallel import (
    ExpertParallel,
    Router,
    auxiliary_loss,
    imbalance,
    load_of_all,
    z_loss,
)
from pardemo.groups import Groups, ParallelDims
from pardemo.small_models import gpt
from pardemo.zero.gradient_norm import clip_grad_norm_

HIDDEN, EXPERTS, TOKENS = 16, 8, 24
TOLERANCE = 1e-5


def expert():
    return nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))


def parts(chosen=2, seed=1, count=EXPERTS, dtype=torch.float32, **more):
    """A router, experts and a shared one, the same on every rank."""

    def build():
        return nn.ModuleList(
            [Router(HIDDEN, count, chosen, **more), nn.ModuleList(expert() for _ in range(count)), expert()]
        )

    router, experts, shared = gpt.seeded(build, seed).to(dtype)
    return router, list(experts), shared


def whole_layer(router, experts, shared, tokens, capacities=None):
    """Every token through every expert, one process: [T, h]. ``capacities``: an expert's rows of a rank, and ranks."""
    routing = router(tokens)
    weights = torch.zeros_like(routing.scores).scatter(-1, routing.experts, routing.weights)
    if capacities is not None:
        room, ranks = capacities
        kept = torch.ones_like(weights)
        for mine, seats in zip(weights.detach().chunk(ranks), kept.chunk(ranks), strict=True):
            for column, seat in zip(mine.T, seats.T, strict=True):
                seat[column.argsort(descending=True)[room:]] = 0
        weights = weights * kept
    out = sum(weights[:, e : e + 1].to(tokens.dtype) * one(tokens) for e, one in enumerate(experts))
    return out + shared(tokens) if shared is not None else out, routing


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize(
    "how", [{}, {"scores": "sigmoid"}, {"norm_topk_prob": False}, {"num_groups": 4, "topk_groups": 2}]
)
def test_it_is_the_full_layer(rank, world_size, chosen, how):
    """Output and the gradients of tokens, router, shared expert and experts, as data parallelism would average them."""
    router, experts, shared = parts(chosen, **how)
    everyone = gpt.numbers(world_size * TOKENS, HIDDEN, seed=5)
    layer = ExpertParallel(router, experts, shared=shared)
    mine = everyone.chunk(world_size)[rank].clone().requires_grad_()
    out = layer(mine)
    (out.square().mean() + 0.1 * auxiliary_loss(layer.routing) + 0.01 * z_loss(layer.routing)).backward()
    layer.average_gradients()

    full = everyone.clone().requires_grad_()
    expected, _ = whole_layer(router, experts, shared, full)
    losses = []
    for place in range(world_size):
        here = router(full.chunk(world_size)[place])
        part = expected.chunk(world_size)[place]
        losses.append(part.square().mean() + 0.1 * auxiliary_loss(here) + 0.01 * z_loss(here))
    (sum(losses) / world_size).backward()
    assert gpt.relative_error(out, expected.chunk(world_size)[rank]) < TOLERANCE
    assert gpt.relative_error(mine.grad / world_size, full.grad.chunk(world_size)[rank]) < TOLERANCE
    each = EXPERTS // world_size
    pairs = [(layer.router, router), (layer.shared, shared)]
    pairs += zip(layer.experts, experts[rank * each : (rank + 1) * each], strict=True)
    for ours, theirs in pairs:
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            of_other = torch.zeros_like(other) if other.grad is None else other.grad
            assert (one.grad - of_other).norm() <= TOLERANCE * of_other.norm() + 1e-8


@pytest.mark.ranks(4)
def test_experts_in_two_replicas_train_as_one_process(rank):
    """ep 2 × dp 2: an expert is averaged over its replicas, a dense layer over all ranks that have it."""
    router, experts, _ = parts(2)
    dense = gpt.seeded(lambda: nn.Linear(HIDDEN, HIDDEN))
    whole = nn.ModuleList([copy.deepcopy(dense), router, nn.ModuleList(experts)])
    everyone = gpt.numbers(4 * TOKENS, HIDDEN, seed=5)
    with Groups(ParallelDims(ep=2, dp=2), "ep-dp") as groups:
        layer = ExpertParallel(router, experts, groups.ep)
        replica, model = BucketedDataParallel(layer, groups.dp), BucketedDataParallel(dense, groups["ep-dp"])
        optimizers = [torch.optim.SGD(one.parameters(), 0.5) for one in (layer, dense, whole)]
        for _ in range(3):
            for _ in range(2):  # gradients add up, and are averaged once
                replica(model(everyone.chunk(4)[rank])).square().mean().backward()
                whole_layer(router, experts, None, whole[0](everyone))[0].square().mean().backward()
            layer.average_gradients()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        mine = experts[4 * dist.get_rank(groups.ep) :][:4]
    for ours, theirs in ((dense, whole[0]), (layer.router, router), *zip(layer.experts, mine, strict=True)):
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert gpt.relative_error(one, other) < TOLERANCE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_], ids=["ours", "torch's"])
def test_experts_are_clipped_by_the_whole_models_norm_on_every_rank(rank, world_size, clip):
    router, experts, shared = parts(2)
    everyone = gpt.numbers(world_size * TOKENS, HIDDEN, seed=5)
    layer = copy.deepcopy(ExpertParallel(router, experts, shared=shared))  # a copy talks to the same ranks
    layer(everyone.chunk(world_size)[rank]).square().mean().backward()
    layer.average_gradients()
    whole_layer(router, experts, shared, everyone)[0].square().mean().backward()
    whole = nn.ModuleList([router, *experts, shared])
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 1e-3).item()
    found = float(clip(layer if clip is clip_grad_norm_ else layer.parameters(), 1e-3))
    assert found == pytest.approx(expected, rel=1e-5)
    assert gpt.relative_error(layer.router.gate.weight.grad, router.gate.weight.grad) < TOLERANCE


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("capacity", [0.25, 1.0, 100.0])
def test_what_finds_no_room_is_left_out(rank, world_size, capacity):
    router, experts, _ = parts(2)
    everyone = gpt.numbers(world_size * TOKENS, HIDDEN, seed=5)
    layer = ExpertParallel(router, experts, capacity=capacity)
    out = layer(everyone.chunk(world_size)[rank])
    room = math.ceil(capacity * TOKENS * 2 / EXPERTS)
    expected, routing = whole_layer(router, experts, None, everyone, (room, world_size))
    assert gpt.relative_error(out, expected.chunk(world_size)[rank]) < TOLERANCE
    load = torch.bincount(routing.experts.chunk(world_size)[rank].reshape(-1), minlength=EXPERTS)
    assert layer.plan.dropped == int((load - room).clamp_min(0).sum())
    assert (layer.plan.dropped > 0) == (capacity < 100)


@pytest.mark.ranks(2, 4)
def test_a_rank_sends_its_rows_there_and_back(rank, world_size):
    router, experts, _ = parts(2)
    layer = ExpertParallel(router, experts)
    mine = gpt.numbers(4096, HIDDEN, seed=rank).requires_grad_()
    with WireMeter() as forth:
        out = layer(mine)
    with WireMeter() as back:
        out.sum().backward()
    row = 4 * HIDDEN
    there = sum(rows for place, rows in enumerate(layer.plan.sends) if place != rank)
    home = sum(rows for place, rows in enumerate(layer.plan.receives) if place != rank)
    assert forth.sent_bytes == pytest.approx((there + home) * row, rel=0.02)
    assert back.sent_bytes == pytest.approx((there + home) * row, rel=0.02)


@pytest.mark.ranks(2, 4)
def test_all_tokens_to_one_expert_and_ranks_without_any(rank, world_size):
    router, experts, shared = parts(1)
    with torch.no_grad():
        router.bias[3] = 10.0  # for choosing alone
    everyone = gpt.numbers(world_size * TOKENS, HIDDEN, seed=5)
    layer = ExpertParallel(router, experts, shared=shared)
    mine = (everyone.chunk(world_size)[rank] if rank else everyone[:0]).clone().requires_grad_()
    out = layer(mine)
    (out.sum() + auxiliary_loss(layer.routing) + z_loss(layer.routing)).backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    expected, _ = whole_layer(router, experts, shared, everyone)
    if rank:
        assert gpt.relative_error(out, expected.chunk(world_size)[rank]) < TOLERANCE
    assert out.shape == mine.shape == mine.grad.shape
    here = 3 // (EXPERTS // world_size)
    assert sum(layer.plan.counts) == (TOKENS * (world_size - 1) if rank == here else 0)
    assert load_of_all(layer.routing.load).tolist() == [TOKENS * (world_size - 1) * (e == 3) for e in range(EXPERTS)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_other_dtypes(rank, world_size, dtype, near):
    router, experts, shared = parts(2, dtype=dtype)
    everyone = gpt.numbers(world_size * TOKENS, HIDDEN, seed=5).to(dtype)
    layer = ExpertParallel(router, experts, shared=shared)
    out = layer(everyone.chunk(world_size)[rank])
    expected, _ = whole_layer(*(copy.deepcopy(each).double() if isinstance(each, nn.Module) else
                                [copy.deepcopy(one).double() for one in each] for each in (router, experts, shared)),
                              everyone.double())  # fmt: skip
    assert out.dtype == dtype
    assert gpt.relative_error(out.double(), expected.chunk(world_size)[rank]) < near


@pytest.mark.ranks(2)
def test_what_cannot_be_is_one_line(rank, world_size):
    router, experts, _ = parts()
    for message, call in (
        ("a number of experts of 7 does not divide by the 2 ranks of the group",
         lambda: ExpertParallel(Router(HIDDEN, 7, 2), experts[:7])),
        ("the router has 8 experts, and there are 7", lambda: ExpertParallel(router, experts[:7])),
        ("capacity is a multiple of the even share, above 0, not 0",
         lambda: ExpertParallel(router, experts, capacity=0)),
        ("top_k is from 1 to 8 experts, not 9", lambda: Router(HIDDEN, 8, 9)),
        ("scores must be one of softmax, sigmoid", lambda: Router(HIDDEN, 8, 2, scores="tanh")),
        ("8 experts, 3 groups and 1 of them do not fit", lambda: Router(HIDDEN, 8, 2, num_groups=3)),
        ("1 groups of 2 experts have no 4", lambda: Router(HIDDEN, 8, 4, num_groups=4)),
        ("same full layer on all ranks.* expert 0", lambda: ExpertParallel(router, parts(seed=2 + rank)[1])),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


def test_what_keeps_the_shares_even():
    router, *_ = parts(2)
    tokens = gpt.numbers(4096, HIDDEN, seed=7) + 0.5  # with a direction that all share
    routing = router(tokens)
    before = imbalance(routing.load)
    assert before > 1.3
    for _ in range(400):
        router.update_bias(router(tokens).load)
    assert imbalance(router(tokens).load) < 1.1
    assert torch.equal(router(tokens).logits, routing.logits), "the bias is for choosing alone"
    in_bf16 = copy.deepcopy(router).bfloat16()
    in_bf16.bias.fill_(0.5)
    in_bf16.update_bias(torch.tensor([9, 1, 1, 1, 1, 1, 1, 1]))
    assert in_bf16.bias[0].item() == pytest.approx(0.499), "in bf16 it would have stayed 0.5"
    router.bias.zero_()
    optimizer = torch.optim.SGD(router.parameters(), 0.5)
    for _ in range(200):
        optimizer.zero_grad()
        auxiliary_loss(router(tokens)).backward()
        optimizer.step()
    assert imbalance(router(tokens).load) < before
    even = auxiliary_loss(router(tokens), torch.ones(EXPERTS))
    assert even.item() == pytest.approx(1.0, abs=1e-6)
    assert imbalance(torch.tensor([4, 0, 0, 0])) == 4
    assert imbalance(torch.zeros(4)) == 1


def test_a_token_stays_on_few_hosts():
    router, *_ = parts(4, num_groups=4, topk_groups=2)
    hosts = router(gpt.numbers(512, HIDDEN, seed=7)).experts // 2
    assert max(len(set(row)) for row in hosts.tolist()) == 2


def plain_choice(scores, bias, chosen, experts_per_host, most_hosts):
    """The experts of one token, by the text of DeepSeek-V3's report (2.1.2): lists of numbers, and sorted()."""
    biased = [score + one for score, one in zip(scores, bias, strict=True)]
    places = range(0, len(biased), experts_per_host)
    hosts = [sorted(biased[first : first + experts_per_host], reverse=True) for first in places]
    best = sorted(range(len(hosts)), key=lambda host: -sum(hosts[host][:2]))[:most_hosts]
    there = [expert for expert in range(len(biased)) if expert // experts_per_host in best]
    return sorted(there, key=lambda expert: -biased[expert])[:chosen]


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_hosts_of_a_token_are_those_with_its_best_two_experts(kind):
    """Not those with its best one, nor with the largest sum: that differs for some of these tokens."""
    router = Router(12, 12, 3, scores=kind, num_groups=3, topk_groups=1)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(12))  # a token is its logits
        router.bias.copy_(0.1 * gpt.numbers(12, seed=3))
    tokens = gpt.numbers(200, 12, seed=4)
    routing = router(tokens)
    scores = tokens.softmax(-1) if kind == "softmax" else tokens.sigmoid()
    expected = [plain_choice(row, router.bias.tolist(), 3, 4, 1) for row in scores.tolist()]
    assert routing.experts.tolist() == expected
    weights = [[row[expert] / sum(row[e] for e in experts) for expert in experts]
               for row, experts in zip(scores.tolist(), expected, strict=True)]  # fmt: skip
    torch.testing.assert_close(routing.weights, torch.tensor(weights))
    by_host = (scores + router.bias).unflatten(-1, (3, 4))
    ours = routing.experts[:, 0] // 4
    assert not torch.equal(by_host.amax(-1).argmax(-1), ours)
    assert not torch.equal(by_host.sum(-1).argmax(-1), ours)
