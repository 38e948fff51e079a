"""The plain versions beside the engines: each against one process, as the engine it leads to is in its own tests."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import expert_parallel, project
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
PACKAGES = (
    *("collectives", "context_parallel", "data_parallel", "expert_parallel", "pipeline_parallel", "tensor_parallel"),
    "zero",
)
SIZES = [2, 3, 4]


def worst(pairs):
    return max(gpt.relative_error(a, b) for a, b in pairs)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_plain_version_can_be_read_in_one_go(package):
    text = (project.PACKAGE / package / "plain.py").read_text()
    assert text.count("\n") <= 200
    assert "import pardemo" not in text
    assert "from pardemo" not in text, "torch alone"
    docstring = text.split('"""')[1]
    assert "chapter" in docstring
    assert "Leads to" in docstring or "leads to" in docstring


def test_there_is_one_beside_each_engine():
    assert {path.parent.name for path in project.PACKAGE.rglob("plain.py")} == set(PACKAGES)


# --- collectives -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("shape", [(12, 5), (7,), (2,)])
def test_collectives(rank, world_size, shape):
    inputs = [gpt.numbers(*shape, seed=r, dtype=torch.float64) for r in range(world_size)]
    total, mine = sum(inputs), inputs[rank]
    pairs = [
        (plain_collectives.all_reduce(mine.clone()), total),
        (plain_collectives.parameter_server_all_reduce(mine.clone()), total),
        (plain_collectives.all_gather(mine), torch.cat([t.flatten() for t in inputs])),
    ]
    if total.numel() % world_size == 0:
        pairs.append((plain_collectives.reduce_scatter(mine), total.flatten().chunk(world_size)[rank]))
    assert torch.equal(mine, inputs[rank]), "an input was changed"
    assert worst(pairs) < CLOSE


# --- data parallelism ------------------------------------------------------------------------------------------------


def parts(steps=3):
    """This rank's part of each batch."""
    mine = small.shard(48, dist.get_rank(), dist.get_world_size())
    for step in range(steps):
        inputs, classes = small.batch(48, seed=step)
        yield inputs[mine], classes[mine]


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def one_process(dtype, steps=3):
    model = small.model(width=32, layers=2).to(dtype)
    optimizer = SGD(model.parameters())
    for step in range(steps):
        inputs, classes = small.batch(48, seed=step)
        F.cross_entropy(model(inputs.to(dtype)), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, 4000, 1 << 20])
def test_data_parallelism(rank, bucket_bytes):
    """All ranks begin with rank 0's model, which is the one of seed 0."""
    model = small.model(width=32, layers=2, seed=rank).double()
    net = plain_data_parallel.PlainDataParallel(model, bucket_bytes=bucket_bytes)
    optimizer = SGD(net.parameters())
    for inputs, classes in parts():
        F.cross_entropy(net(inputs.double()), classes).backward()
        net.finish()
        optimizer.step()
        optimizer.zero_grad()
    assert gpt.relative_error(flat(net), one_process(torch.float64)) < CLOSE


@pytest.mark.ranks(2)
def test_data_parallelism_over_two_passes(rank):
    """Gradients add up over passes, each of which is averaged."""
    inputs, classes = small.batch(8)
    mine = slice(4 * rank, 4 * rank + 4)
    net = plain_data_parallel.PlainDataParallel(small.model(width=32, layers=2).double())
    whole = small.model(width=32, layers=2).double()
    for _ in range(2):
        F.cross_entropy(net(inputs[mine].double()), classes[mine]).backward()
        F.cross_entropy(whole(inputs.double()), classes).backward()
        net.finish()
    assert worst((p.grad, q.grad) for p, q in zip(net.parameters(), whole.parameters(), strict=True)) < CLOSE
    net(inputs[mine].double()).sum().backward()
    with pytest.raises(RuntimeError, match=r"finish\(\)"):
        net(inputs[mine].double()).sum().backward()
    net.finish()


# --- ZeRO ------------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_zero(rank, stage, micro_batches):
    model = small.model(width=32, layers=2, seed=rank)
    engine = getattr(plain_zero, f"PlainZero{stage}")(model, SGD)
    for inputs, classes in parts():
        for some, labels in zip(inputs.chunk(micro_batches), classes.chunk(micro_batches), strict=True):
            (F.cross_entropy(engine(some), labels) / micro_batches).backward()
        engine.step()
    if stage == 3:
        assert {unit.flat.untyped_storage().nbytes() for unit in engine.units} == {0}, "only shards are left"
        for unit in engine.units:
            unit.gather()
    assert gpt.relative_error(flat(model), one_process(torch.float32)) < CLOSE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_keeps_what_bf16_cannot(rank, stage):
    """Parameters in bf16, shards in fp32: the sum of small steps is not rounded away."""
    model = small.model(width=32, layers=2, seed=rank).bfloat16()
    engine = getattr(plain_zero, f"PlainZero{stage}")(model, partial(torch.optim.SGD, lr=1e-5))
    before = torch.cat([unit.shard.detach() for unit in engine.units])
    for _ in range(3):
        inputs, classes = small.batch(8, seed=rank)
        F.cross_entropy(engine(inputs.bfloat16()), classes).backward()
        engine.step()
    after = torch.cat([unit.shard.detach() for unit in engine.units])
    assert not torch.equal(before, after)
    assert torch.equal(before.bfloat16(), after.bfloat16())


# --- tensor parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
def test_a_block_cut_by_columns_rows_and_heads(rank, world_size):
    n, full = world_size, gpt.seeded(lambda: gpt.Block(24, 12)).double()
    cut = plain_tensor_parallel
    plain = cut.Block(
        copy.deepcopy(full.norm_1),
        cut.Attention(full.attention.qkv, full.attention.out, 12),
        copy.deepcopy(full.norm_2),
        cut.MLP(full.mlp.first, full.mlp.second),
    )
    x, gradient = (gpt.numbers(2, 6, 24, seed=s, dtype=torch.float64) for s in (1, 2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [net(given) for net, given in zip((plain, full), inputs, strict=True)]
    for y in outputs:
        y.backward(gradient)
    of_heads = torch.cat([part.chunk(n)[rank] for part in full.attention.qkv.weight.grad.chunk(3)])
    pairs = [
        (outputs[0], outputs[1]),
        (inputs[0].grad, inputs[1].grad),
        (plain.attention.qkv.weight.grad, of_heads),
        (plain.attention.out.weight.grad, full.attention.out.weight.grad.chunk(n, 1)[rank]),
        (plain.mlp.first.weight.grad, full.mlp.first.weight.grad.chunk(n)[rank]),
        (plain.mlp.second.weight.grad, full.mlp.second.weight.grad.chunk(n, 1)[rank]),
        (plain.mlp.second.bias.grad, full.mlp.second.bias.grad),
        (plain.norm_1.weight.grad, full.norm_1.weight.grad),
    ]
    assert worst(pairs) < CLOSE


@pytest.mark.ranks(*SIZES)
def test_a_vocabulary_that_is_cut(rank, world_size):
    n, vocabulary = world_size, 24
    table = gpt.seeded(lambda: nn.Embedding(vocabulary, 8))
    tokens, targets = gpt.text(2, 6, vocabulary), gpt.text(2, 6, vocabulary, seed=1)

    def run(embed, loss_of):
        rows = embed(tokens)
        logits = (3 * gpt.numbers(2, 6, vocabulary)).requires_grad_()
        loss = loss_of(logits) + rows.square().mean()
        loss.backward()
        return rows, loss, logits.grad

    mine = plain_tensor_parallel.Embedding(table)
    ours = run(mine, lambda z: plain_tensor_parallel.cross_entropy(z.chunk(n, -1)[rank], targets))
    whole_one = run(table, lambda z: F.cross_entropy(z.flatten(0, 1), targets.flatten()))
    own = slice(rank * vocabulary // n, (rank + 1) * vocabulary // n)
    pairs = [(ours[0], whole_one[0]), (ours[1], whole_one[1]), (ours[2][..., own], whole_one[2][..., own])]
    assert worst([*pairs, (mine.weight.grad, table.weight.grad[own])]) < CLOSE


# --- pipeline parallelism --------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("m", [1, 2, 6])
@pytest.mark.parametrize("order", ["gpipe", "one_f_one_b"])
def test_pipelines(rank, world_size, m, order):
    layers = [gpt.seeded(lambda: gpt.MLP(8), seed).double() for seed in range(2 * world_size)]
    stage, whole_model = nn.Sequential(*copy.deepcopy(layers[2 * rank : 2 * rank + 2])), nn.Sequential(*layers)
    inputs, targets = (gpt.numbers(m * 2, 8, seed=s, dtype=torch.float64) for s in (1, 2))
    expected = F.mse_loss(whole_model(inputs), targets)
    expected.backward()
    plain = plain_pipeline.PlainPipeline(stage, F.mse_loss, m)
    loss = getattr(plain, order)(inputs, targets)
    plain.close()
    mine = whole_model[2 * rank : 2 * rank + 2].parameters()
    pairs = [(p.grad, q.grad) for p, q in zip(stage.parameters(), mine, strict=True)]
    pairs += [(loss, expected)] if loss is not None else []
    assert worst(pairs) < CLOSE
    assert plain.most_held == (m if order == "gpipe" else min(world_size - rank, m))


# --- expert parallelism ----------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
def test_experts(rank, world_size):
    """Tokens, router and experts against those of one process with all experts."""
    count, k = 2 * world_size, 2
    build = lambda: nn.ModuleList([expert_parallel.Router(8, count, k), *(gpt.MLP(8) for _ in range(count))])  # noqa: E731
    router, *experts = gpt.seeded(build).double()
    everyone = gpt.numbers(6 * world_size, 8, seed=1, dtype=torch.float64)
    gradient = gpt.numbers(6 * world_size, 8, seed=2, dtype=torch.float64)
    plain = plain_expert_parallel.PlainExperts(router.gate, experts, k)
    whole = everyone.clone().requires_grad_()
    routing = router(whole)
    weights = torch.zeros_like(routing.scores).scatter(1, routing.experts, routing.weights)
    expected = sum(weight[:, None] * expert(whole) for weight, expert in zip(weights.T, experts, strict=True))
    expected.backward(gradient)
    x = everyone.chunk(world_size)[rank].clone().requires_grad_()
    y = plain(x)
    y.backward(gradient.chunk(world_size)[rank])
    plain.sum_router_gradient()
    pairs = [(y, expected.chunk(world_size)[rank]), (x.grad, whole.grad.chunk(world_size)[rank])]
    pairs += [(plain.gate.weight.grad, router.gate.weight.grad)]
    others = nn.ModuleList(experts[2 * rank : 2 * rank + 2])
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
    mine = [one.chunk(world_size, 2)[rank].clone().requires_grad_() for one in whole]
    out = getattr(plain_context_parallel, name)(*mine)
    found = out, *torch.autograd.grad(out, mine, gradient.chunk(world_size, 2)[rank])
    own = [one.chunk(world_size, 2)[rank] for one in right]
    assert worst(zip(found, own, strict=True)) < CLOSE
