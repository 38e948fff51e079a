"""The plain versions beside the engines: each against one process and against the engine it leads to."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import (
    RankFailed,
    collectives,
    context_parallel,
    data_parallel,
    expert_parallel,
    project,
    tensor_parallel,
    zero,
)
from pardemo import pipeline_parallel as pipeline
from pardemo.collectives import plain as plain_collectives
from pardemo.context_parallel import plain as plain_context_parallel
from pardemo.data_parallel import plain as plain_data_parallel
from pardemo.expert_parallel import plain as plain_expert_parallel
from pardemo.pipeline_parallel import plain as plain_pipeline
from pardemo.small_models import classifier as small
from pardemo.small_models import gpt
from pardemo.tensor_parallel import plain as plain_tensor_parallel
from pardemo.zero import plain as plain_zero

#: Most are compared in fp64; fp32 sums in another order differ by some 1e-7 of a tensor's norm.
CLOSE = 1e-6
ROOMS = (
    *("collectives", "context_parallel", "data_parallel", "expert_parallel", "pipeline_parallel", "tensor_parallel"),
    "zero",
)
SIZES = [2, 3, 4]


def worst(pairs):
    return max(gpt.relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("room", ROOMS)
def test_a_plain_version_can_be_read_in_one_go(room):
    text = (project.PACKAGE / room / "plain.py").read_text()
    assert text.count("\n") <= 200
    assert "import pardemo" not in text
    assert "from pardemo" not in text, "torch alone"
    docstring = text.split('"""')[1]
    assert "chapter" in docstring
    assert "Leads to" in docstring or "leads to" in docstring


def test_there_is_one_beside_each_engine():
    assert {path.parent.name for path in project.PACKAGE.rglob("plain.py")} == set(ROOMS)


# --- collectives -----------------------------------------------------------------------------------------------------


def rings(shape):
    rank, n = dist.get_rank(), dist.get_world_size()
    inputs = [gpt.numbers(*shape, seed=r, dtype=torch.float64) for r in range(n)]
    total, mine = sum(inputs), inputs[rank]
    pairs = [
        (plain_collectives.all_reduce(mine.clone()), total),
        (plain_collectives.all_reduce(mine.clone()), collectives.ring_all_reduce(mine.clone())),
        (plain_collectives.parameter_server_all_reduce(mine.clone()), total),
        (plain_collectives.all_gather(mine), torch.cat([t.flatten() for t in inputs])),
        (plain_collectives.all_gather(mine), collectives.ring_all_gather(mine)),
    ]
    if total.numel() % n == 0:
        pairs.append((plain_collectives.reduce_scatter(mine), total.flatten().chunk(n)[rank]))
        pairs.append((plain_collectives.reduce_scatter(mine), collectives.ring_reduce_scatter(mine)))
    assert torch.equal(mine, inputs[rank]), "an input was changed"
    return worst(pairs)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("shape", [(12, 5), (7,), (2,)])
def test_collectives(world_of, n, shape):
    assert max(world_of(n).run(rings, shape)) < CLOSE


# --- data parallelism ------------------------------------------------------------------------------------------------


def trained_by(step_of, steps=3):
    """Parameters after some steps of ``step_of(step, inputs, classes)`` on this rank's part of each batch."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        inputs, classes = small.batch(48, seed=step)
        mine = small.shard(48, rank, n)
        step_of(inputs[mine].double(), classes[mine])


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_process(optimizer_of, dtype, steps=3):
    model = small.model(width=32, layers=2).to(dtype)
    optimizer = optimizer_of(model.parameters())
    for step in range(steps):
        inputs, classes = small.batch(48, seed=step)
        F.cross_entropy(model(inputs.to(dtype)), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


def data_parallel_runs(bucket_bytes):
    optimizer_of = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    ends = []
    for wrap in (plain_data_parallel.PlainDataParallel, data_parallel.BucketedDataParallel):
        net = wrap(small.model(width=32, layers=2, seed=dist.get_rank()).double(), bucket_bytes=bucket_bytes)
        optimizer = optimizer_of(net.parameters())

        def step(inputs, classes, net=net, optimizer=optimizer):
            F.cross_entropy(net(inputs), classes).backward()
            if isinstance(net, plain_data_parallel.PlainDataParallel):
                net.finish()
            optimizer.step()
            optimizer.zero_grad()

        trained_by(step)
        ends.append(flat(net))
    return ends


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 20])
def test_data_parallelism(world_of, n, bucket_bytes):
    expected = one_process(partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float64)
    # all ranks begin with rank 0's model, which is the one of seed 0
    for plain, engine in world_of(n).run(data_parallel_runs, bucket_bytes):
        assert gpt.relative_error(plain, expected) < CLOSE
        assert gpt.relative_error(plain, engine) < CLOSE


def two_backward_passes(finished):
    """Gradients add up over passes, each of which is averaged."""
    inputs, classes = small.batch(8)
    mine = slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
    net = plain_data_parallel.PlainDataParallel(small.model(width=32, layers=2).double())
    whole = small.model(width=32, layers=2).double()
    for _ in range(2):
        F.cross_entropy(net(inputs[mine].double()), classes[mine]).backward()
        F.cross_entropy(whole(inputs.double()), classes).backward()
        if finished:
            net.finish()
    return worst((p.grad, q.grad) for p, q in zip(net.parameters(), whole.parameters(), strict=True))


def test_data_parallelism_over_two_passes(world_of):
    assert max(world_of(2).run(two_backward_passes, True)) < CLOSE
    with pytest.raises(RankFailed, match=r"finish\(\)"):
        world_of(2).run(two_backward_passes, False)


# --- ZeRO ------------------------------------------------------------------------------------------------------------


def zero_runs(stage, micro_batches):
    ends = []
    kinds = [getattr(plain_zero, f"PlainZero{stage}"), getattr(zero, f"Zero{stage}")]
    for kind in kinds:
        model = small.model(width=32, layers=2, seed=dist.get_rank())
        engine = kind(model, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
        rank, n = dist.get_rank(), dist.get_world_size()
        for step in range(3):
            inputs, classes = (t[small.shard(48, rank, n)] for t in small.batch(48, seed=step))
            for some, labels in zip(inputs.chunk(micro_batches), classes.chunk(micro_batches), strict=True):
                (F.cross_entropy(engine(some), labels) / micro_batches).backward()
            engine.step()
        if stage == 3 and kind is kinds[0]:
            assert {unit.flat.untyped_storage().nbytes() for unit in engine.units} == {0}, "only shards are left"
            for unit in engine.units:
                unit.gather()
        with engine.whole() if kind is kinds[1] else contextlib.nullcontext():
            ends.append(flat(model))
        if kind is kinds[1]:
            engine.close()
    return ends


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_zero(world_of, n, stage, micro_batches):
    expected = one_process(partial(torch.optim.SGD, lr=0.1, momentum=0.9), torch.float32)
    for plain, engine in world_of(n).run(zero_runs, stage, micro_batches):
        assert gpt.relative_error(plain, expected) < CLOSE
        assert gpt.relative_error(plain, engine) < CLOSE


def zero_in_bf16(stage):
    """Parameters in bf16, shards in fp32: the sum of small steps is not rounded away."""
    model = small.model(width=32, layers=2, seed=dist.get_rank()).bfloat16()
    engine = getattr(plain_zero, f"PlainZero{stage}")(model, partial(torch.optim.SGD, lr=1e-5))
    before = torch.cat([unit.shard.detach() for unit in engine.units])
    for _ in range(3):
        inputs, classes = small.batch(8, seed=dist.get_rank())
        F.cross_entropy(engine(inputs.bfloat16()), classes).backward()
        engine.step()
    after = torch.cat([unit.shard.detach() for unit in engine.units])
    return not torch.equal(before, after), torch.equal(before.bfloat16(), after.bfloat16())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_what_bf16_cannot(world_of, stage):
    for moved, same_in_bf16 in world_of(2).run(zero_in_bf16, stage):
        assert moved
        assert same_in_bf16


# --- tensor parallelism ----------------------------------------------------------------------------------------------


def blocks():
    n, full = dist.get_world_size(), gpt.seeded(lambda: gpt.Block(24, 12)).double()
    cut = plain_tensor_parallel
    plain = cut.Block(
        copy.deepcopy(full.norm_1),
        cut.Attention(full.attention.qkv, full.attention.out, 12),
        copy.deepcopy(full.norm_2),
        cut.MLP(full.mlp.first, full.mlp.second),
    )
    engine = gpt.parallel_block(full)
    x, gradient = (gpt.numbers(2, 6, 24, seed=s, dtype=torch.float64) for s in (1, 2))
    inputs = [x.clone().requires_grad_() for _ in range(3)]
    outputs = [net(given) for net, given in zip((plain, engine, full), inputs, strict=True)]
    for y in outputs:
        y.backward(gradient)
    pairs = [(outputs[0], outputs[2]), (inputs[0].grad, inputs[2].grad), (outputs[0], outputs[1])]
    theirs = dict(engine.named_parameters())
    for name, p in plain.named_parameters():
        pairs.append((p.grad, theirs[name].grad))
    rank = dist.get_rank()
    pairs.append((plain.mlp.first.weight.grad, full.mlp.first.weight.grad.chunk(n)[rank]))
    pairs.append((plain.mlp.second.weight.grad, full.mlp.second.weight.grad.chunk(n, 1)[rank]))
    pairs.append((plain.mlp.second.bias.grad, full.mlp.second.bias.grad))
    pairs.append((plain.norm_1.weight.grad, full.norm_1.weight.grad))
    return worst(pairs)


@pytest.mark.parametrize("n", SIZES)
def test_a_block_cut_by_columns_rows_and_heads(world_of, n):
    assert max(world_of(n).run(blocks)) < CLOSE


def vocabularies():
    rank, n, vocabulary = dist.get_rank(), dist.get_world_size(), 24
    table = gpt.seeded(lambda: nn.Embedding(vocabulary, 8))
    tokens, targets = gpt.text(2, 6, vocabulary), gpt.text(2, 6, vocabulary, seed=1)

    def run(embed, loss_of):
        rows = embed(tokens)
        logits = (3 * gpt.numbers(2, 6, vocabulary)).requires_grad_()
        loss = loss_of(logits) + rows.square().mean()
        loss.backward()
        return rows, loss, logits.grad

    mine = plain_tensor_parallel.Embedding(table)
    theirs = tensor_parallel.VocabParallelEmbedding(table)
    ours = run(mine, lambda z: plain_tensor_parallel.cross_entropy(z.chunk(n, -1)[rank], targets))
    engine = run(theirs, lambda z: tensor_parallel.vocab_parallel_cross_entropy(z.chunk(n, -1)[rank], targets))
    whole_one = run(table, lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten()))
    own = slice(rank * vocabulary // n, (rank + 1) * vocabulary // n)
    pairs = [*zip(ours, engine, strict=True), (ours[0], whole_one[0]), (ours[1], whole_one[1])]
    pairs += [(ours[2][..., own], whole_one[2][..., own]), (mine.weight.grad, table.weight.grad[own])]
    return worst([*pairs, (mine.weight.grad, theirs.weight.grad)])


@pytest.mark.parametrize("n", SIZES)
def test_a_vocabulary_that_is_cut(world_of, n):
    assert max(world_of(n).run(vocabularies)) < CLOSE


# --- pipeline parallelism --------------------------------------------------------------------------------------------

ORDERS = {"gpipe": pipeline.gpipe, "one_f_one_b": pipeline.one_f_one_b}


def layers():
    return [gpt.seeded(lambda: gpt.MLP(8), seed).double() for seed in range(2 * dist.get_world_size())]


def pipelines(order, m):
    rank, n = dist.get_rank(), dist.get_world_size()
    inputs, targets = (gpt.numbers(m * 2, 8, seed=s, dtype=torch.float64) for s in (1, 2))
    whole_model = nn.Sequential(*layers())
    expected = F.mse_loss(whole_model(inputs), targets)
    expected.backward()
    stage = nn.Sequential(*layers()[2 * rank : 2 * rank + 2])
    plain = plain_pipeline.PlainPipeline(stage, F.mse_loss, m)
    loss = getattr(plain, order)(inputs, targets)
    plain.close()
    chunk = nn.Sequential(*layers()[2 * rank : 2 * rank + 2])
    pipeline.Pipeline([chunk], pipeline.Schedule(ORDERS[order], n, m), F.mse_loss).step(inputs, targets)
    mine = whole_model[2 * rank : 2 * rank + 2].parameters()
    pairs = [(p.grad, q.grad) for p, q in zip(stage.parameters(), mine, strict=True)]
    pairs += [(p.grad, q.grad) for p, q in zip(stage.parameters(), chunk.parameters(), strict=True)]
    pairs += [(loss, expected)] if loss is not None else []
    return worst(pairs), plain.most_held


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("m", [1, 2, 6])
@pytest.mark.parametrize("order", ORDERS)
def test_pipelines(world_of, n, m, order):
    results = world_of(n).run(pipelines, order, m)
    assert max(error for error, _ in results) < CLOSE
    assert [held for _, held in results] == [m if order == "gpipe" else min(n - rank, m) for rank in range(n)]


# --- expert parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
def test_experts(rank, world_size):
    """Tokens, router and experts of the plain version, of the engine, and of one process with all experts."""
    count, k = 2 * world_size, 2
    build = lambda: nn.ModuleList([expert_parallel.Router(8, count, k), *(gpt.MLP(8) for _ in range(count))])  # noqa: E731
    router, *experts = gpt.seeded(build).double()
    everyone = gpt.numbers(6 * world_size, 8, seed=1, dtype=torch.float64)
    gradient = gpt.numbers(6 * world_size, 8, seed=2, dtype=torch.float64)
    plain = plain_expert_parallel.PlainExperts(router.gate, experts, k)
    engine = expert_parallel.ExpertParallel(router, experts)
    whole = everyone.clone().requires_grad_()
    routing = router(whole)
    weights = torch.zeros_like(routing.scores).scatter(1, routing.experts, routing.weights)
    expected = sum(weight[:, None] * expert(whole) for weight, expert in zip(weights.T, experts, strict=True))
    expected.backward(gradient)
    inputs = [everyone.chunk(world_size)[rank].clone().requires_grad_() for _ in range(2)]
    outputs = [layer(x) for layer, x in zip((plain, engine), inputs, strict=True)]
    for y in outputs:
        y.backward(gradient.chunk(world_size)[rank])
    plain.sum_router_gradient()
    pairs = [(outputs[0], expected.chunk(world_size)[rank]), (outputs[0], outputs[1])]
    pairs += [(inputs[0].grad, whole.grad.chunk(world_size)[rank]), (plain.gate.weight.grad, router.gate.weight.grad)]
    for others in (engine.experts, nn.ModuleList(experts[2 * rank : 2 * rank + 2])):
        pairs += [(p.grad, q.grad) for p, q in zip(plain.experts.parameters(), others.parameters(), strict=True)]
    assert worst(pairs) < CLOSE


# --- context parallelism ---------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("name", ["ring_attention", "ulysses_attention"])
def test_attention_over_a_sequence_that_is_cut(rank, world_size, name):
    shape = 2, 2 * world_size, 4 * world_size, 8
    *whole, gradient = (gpt.numbers(*shape, seed=s, dtype=torch.float64) for s in range(4))
    inputs = [one.clone().requires_grad_() for one in whole]
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    right = expected, *torch.autograd.grad(expected, inputs, gradient)
    found, order = [], {"order": "plain"} if name == "ring_attention" else {}
    for attention in (getattr(plain_context_parallel, name), partial(getattr(context_parallel, name), **order)):
        mine = [one.chunk(world_size, 2)[rank].clone().requires_grad_() for one in whole]
        out = attention(*mine)
        found.append((out, *torch.autograd.grad(out, mine, gradient.chunk(world_size, 2)[rank])))
    own = [one.chunk(world_size, 2)[rank] for one in right]
    assert worst([*zip(found[0], own, strict=True), *zip(found[0], found[1], strict=True)]) < CLOSE
