"""Each wrapper around each layer that is cut, and each use of the two: as one process trains, or refused in one line.

Four ranks, tensor parallel 2 × data parallel 2. Ranks of one tensor-parallel group see the same samples; one process
sees all of them. The gate runs each use on one model and each layer in one use, the night all cells.
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel, shard_weight
from pardemo.expert_parallel import ExpertParallel, Router
from pardemo.groups import Groups, ParallelDims, cut_of
from pardemo.pipeline_parallel import Pipeline, Schedule, one_f_one_b
from pardemo.small_models import gpt
from pardemo.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from pardemo.zero import Zero1, Zero2, Zero3
from pardemo.zero.gradient_norm import clip_grad_norm_

HIDDEN, VOCABULARY, SAMPLES, STEPS, CLIP = 16, 32, 8, 3, 0.1
SGD = partial(torch.optim.SGD, lr=0.3, momentum=0.9)  # Adam divides a factor on all gradients out again
#: Of a parameter's way in three steps: fp32 sums in another order make some 1e-6 of it. A sum for a mean, a norm of one
#: rank's part, or a gradient that one group has not summed makes 1e-2 and more.
CLOSE = 1e-4
#: Rows for layers that take numbers.
TABLE = gpt.numbers(VOCABULARY, HIDDEN)


class Loss(nn.Module):
    """Wrappers call ``forward``."""

    def __init__(self, net, checkpointed):
        super().__init__()
        self.net, self.checkpointed = net, checkpointed

    def forward(self, tokens):
        loss = of_text if hasattr(self.net, "loss") else of_numbers
        return checkpoint(loss, self.net, tokens, use_reentrant=False) if self.checkpointed else loss(self.net, tokens)


def of_numbers(net, tokens):
    return (net(TABLE.to(next(net.parameters()).dtype)[tokens]).float() - 1).square().mean()


def of_text(net, tokens):
    return net.loss(torch.cat([tokens, tokens[:, :1]], 1)).float()


class Adapted(nn.Module):
    """A frozen MLP whose first layer has an adapter of rank 4 (LoRA): the lower half is whole, the upper cut."""

    def __init__(self, first, second, down, up):
        super().__init__()
        self.first, self.second, self.down, self.up = first, second, down, up
        for layer in (first, second):
            layer.requires_grad_(False)

    def forward(self, x):
        return self.second(nn.functional.gelu(self.first(x) + self.up(self.down(x))))


def adapted():
    widths = ((HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4), (4, 4 * HIDDEN))
    return Adapted(*(nn.Linear(*width) for width in widths))


def cut_adapted(full, group):
    first, up = (ColumnParallelLinear(layer, group) for layer in (full.first, full.up))
    return Adapted(first, RowParallelLinear(full.second, group), copy.deepcopy(full.down), up)


def small_gpt():
    """Its vocabulary is cut, and tied to its head; all kinds of linear layers, attention, norms."""
    return gpt.GPT(VOCABULARY, hidden=HIDDEN, layers=2, heads=2, sequence=8)


#: The full layer, and its part on a rank of a group.
LAYERS = {
    "GPT": (small_gpt, gpt.ParallelGPT),
    "GPT, sequence": (small_gpt, partial(gpt.ParallelGPT, sequence_parallel=True)),
    "one key head": (lambda: gpt.Attention(HIDDEN, 4, 1), gpt.parallel_attention),
    "adapter": (adapted, cut_adapted),
}
WRAPPERS = {"naive": NaiveDataParallel, "bucketed": BucketedDataParallel, "zero 1": Zero1, "zero 2": Zero2,
            "zero 3": Zero3}  # fmt: skip
USES = ("accumulated", "clipped", "torch's clipping", "checkpointed", "compiled", "frozen", "uneven", "bf16")


def full_layer(make, use):
    net = gpt.seeded(make)
    if use == "frozen":
        next(p for p in net.parameters() if p.requires_grad).requires_grad_(False)
    return net.bfloat16() if use == "bf16" else net


def shares(tokens, use):
    """The replicas' samples, in the ratio of 3 to 1 where they are uneven."""
    return tokens.split([6, 2]) if use == "uneven" else tokens.chunk(2)


def train(model, optimizer, use, clip, mine=lambda tokens: tokens, weight=1.0, no_sync=nullcontext):
    """The norms of its gradients where they are clipped."""
    norms = []
    for step in range(STEPS):
        micro_batches = mine(gpt.text(SAMPLES, 8, VOCABULARY, seed=step)).chunk(2 if use == "accumulated" else 1)
        for number, tokens in enumerate(micro_batches, 1):
            with no_sync() if number < len(micro_batches) else nullcontext():
                (weight * model(tokens) / len(micro_batches)).backward()
        norms.append(float(clip(model.parameters(), CLIP)) if clip else None)
        stepped = optimizer.step()
        norms[-1] = stepped if stepped is not None else norms[-1]
        optimizer.zero_grad()
    return norms


def trained_as_one_process(wrapper, layer, use):
    make, cut = LAYERS[layer]
    expected = full_layer(make, use).float()
    plain = Loss(expected, checkpointed=False)
    norms = train(plain, SGD(plain.parameters()), use, nn.utils.clip_grad_norm_ if "clip" in use else None)
    with Groups(ParallelDims(tp=2, dp=2)) as groups:
        net = cut(full_layer(make, use), groups.tp)
        start = {name: p.detach().clone() for name, p in net.named_parameters()}
        module, clip = Loss(net, checkpointed=use == "checkpointed"), None
        if "zero" in wrapper:
            engine = WRAPPERS[wrapper](module, SGD, groups.dp, max_norm=CLIP if use == "clipped" else None)
            optimizer, whole, no_sync = engine, engine.full_parameters, nullcontext
        else:
            engine = WRAPPERS[wrapper](module, groups.dp)
            optimizer, whole, no_sync = SGD(engine.parameters()), nullcontext, engine.no_sync
            clip = (lambda _, most: clip_grad_norm_(engine, most)) if use == "clipped" else None
        if use == "torch's clipping":
            clip = nn.utils.clip_grad_norm_
        model = torch.compile(engine, backend="aot_eager") if use == "compiled" else engine
        replica = dist.get_rank(groups.dp)
        weight = shard_weight(len(shares(torch.zeros(SAMPLES), use)[replica]), groups.dp)
        found = train(model, optimizer, use, clip, lambda tokens: shares(tokens, use)[replica], weight, no_sync)
        assert found == (pytest.approx(norms, rel=CLOSE) if "clip" in use else norms)
        ends = dict(cut(expected, groups.tp).named_parameters())
        cut_names = {name for name, p in net.named_parameters() if cut_of(p)}
        with whole():
            for name, p in net.named_parameters():
                close = (0.1, 2**-7) if use == "bf16" else (CLOSE, 0)
                moved = (ends[name] - start[name].float()).norm()
                assert (p - ends[name]).norm() <= close[0] * moved + close[1] * ends[name].norm(), name
                same = groups.dp if name in cut_names else dist.group.WORLD
                replicas = [torch.empty_like(p) for _ in range(same.size())]
                dist.all_gather(replicas, p.detach().contiguous(), group=same)
                assert all(torch.equal(one, p) for one in replicas), f"{name}: the replicas differ"


def cells():
    for wrapper in WRAPPERS:
        for layer in LAYERS:
            for use in USES:
                if (wrapper, use) != ("naive", "compiled"):  # torch's compiler takes no bucket below a MiB
                    if layer == "GPT":
                        in_gate = wrapper in ("bucketed", "zero 2", "zero 3") or "clip" in use
                    else:
                        in_gate = wrapper in ("bucketed", "zero 3") and use == "accumulated"
                    # compiled on four ranks it takes as long as all others of a wrapper
                    marks = () if in_gate and use != "compiled" else pytest.mark.nightly
                    yield pytest.param(wrapper, layer, use, marks=marks)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("wrapper", "layer", "use"), list(cells()))
def test_a_wrapper_around_cut_layers_trains_as_one_process(wrapper, layer, use):
    refuses = use == "torch's clipping" and "zero" in wrapper
    with pytest.raises(RuntimeError, match="max_norm") if refuses else nullcontext():
        trained_as_one_process(wrapper, layer, use)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", [ParallelDims(tp=2, pp=2), ParallelDims(dp=2, pp=2)], ids=["tp", "dp"])
@pytest.mark.parametrize("stage", [Zero1, Zero2, Zero3])
def test_a_pipelines_stages_in_shards_train_as_one_process(layout, stage):
    full, parts = ([gpt.seeded(lambda: gpt.Block(HIDDEN, 4), number) for number in range(2)] for _ in range(2))
    plain = nn.Sequential(*full)
    optimizer, norms, found = SGD(plain.parameters()), [], []
    with Groups(layout) as groups:
        place, replica = dist.get_rank(groups.pp), dist.get_rank(groups.dp)
        net = gpt.parallel_block(parts[place], groups.tp)
        engine = stage(net, SGD, groups.dp, max_norm=CLIP, pipeline_group=groups.pp)
        schedule = Schedule(one_f_one_b, ranks=2, micro_batches=2)
        pipeline = Pipeline([engine], schedule, nn.functional.mse_loss, groups.pp, checkpointing=True)
        for step in range(STEPS):
            batch = [gpt.numbers(SAMPLES, 4, HIDDEN, seed=10 * step + number) for number in range(2)]
            nn.functional.mse_loss(plain(batch[0]), batch[1]).backward()
            norms.append(nn.utils.clip_grad_norm_(plain.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
            pipeline.step(*(tensor.chunk(layout.dp)[replica] for tensor in batch))
            found.append(engine.step())
        assert found == pytest.approx(norms, rel=CLOSE)
        ends = dict(gpt.parallel_block(full[place], groups.tp).named_parameters())
        with engine.full_parameters():
            for name, p in net.named_parameters():
                torch.testing.assert_close(p, ends[name], atol=1e-6, rtol=1e-5)


class Repeated(nn.Module):
    """Re-entrant checkpoints: the backward pass of each layer is a pass of its own, within DDP's."""

    def __init__(self, layers):
        super().__init__()
        self.first, self.layers = nn.Linear(HIDDEN, HIDDEN), nn.ModuleList(layers)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.ranks(4)
def test_re_entrant_checkpoints_leave_parts_of_the_mean():
    """torch's norm took the last layers' parts for whole gradients, where buckets were full in several passes."""
    full = gpt.seeded(lambda: Repeated([gpt.MLP(HIDDEN) for _ in range(3)]))
    with Groups(ParallelDims(tp=2, dp=2)) as groups:
        net = copy.deepcopy(full)
        net.layers = nn.ModuleList(gpt.parallel_mlp(layer, groups.tp) for layer in full.layers)
        wrapped = NaiveDataParallel(net, groups.dp)
        for step in range(2):  # DDP makes its buckets after the first
            tokens = gpt.text(SAMPLES, 8, VOCABULARY, seed=step)
            of_numbers(wrapped, tokens.chunk(2)[dist.get_rank(groups.dp)]).backward()
            of_numbers(full, tokens).backward()
            found, expected = (nn.utils.clip_grad_norm_(one.parameters(), CLIP).item() for one in (wrapped, full))
            assert found == pytest.approx(expected, rel=CLOSE)
            wrapped.zero_grad()
            full.zero_grad()


@pytest.mark.ranks(2)
def test_a_part_that_was_frozen_when_it_was_made_is_a_part_when_it_is_trained():
    full = gpt.seeded(lambda: gpt.MLP(HIDDEN)).requires_grad_(False)
    norms = []
    for net in (gpt.parallel_mlp(full), full):
        net.requires_grad_(True)
        of_numbers(net, gpt.text(SAMPLES, 8, VOCABULARY)).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), CLIP).item())
    assert norms[0] == pytest.approx(norms[1], rel=CLOSE)


def experts(group=None):
    parts = gpt.seeded(lambda: nn.ModuleList([Router(8, 4, 2), *(nn.Linear(8, 8, bias=False) for _ in range(4))]))
    return nn.Sequential(gpt.seeded(lambda: nn.Linear(8, 8)), ExpertParallel(parts[0], list(parts[1:]), group))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_over_the_group_that_cuts_a_layer_it_is_refused_and_no_part_is_overwritten(wrapper):
    options = (SGD,) if "zero" in wrapper else ()
    for layer in (
        ColumnParallelLinear(gpt.seeded(lambda: nn.Linear(8, 16))),
        RowParallelLinear(gpt.seeded(lambda: nn.Linear(8, 16))),
        VocabParallelEmbedding(gpt.seeded(lambda: nn.Embedding(12, 8))),
        experts(),
    ):
        before = {name: p.detach().clone() for name, p in layer.named_parameters()}
        cut = next(name for name, p in layer.named_parameters() if cut_of(p))
        with pytest.raises(ValueError, match=rf"{cut}.*\[0, 1\].*data-parallel"):
            WRAPPERS[wrapper](layer, *options)
        assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


@pytest.mark.ranks(2)
def test_what_would_be_a_wrong_mean_is_refused(rank, world_size):
    """Experts have the sum over their group, and other layers a rank's own gradient: a ZeRO engine has one group."""
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    for stage in (Zero1, Zero2, Zero3):
        with pytest.raises(ValueError, match=r"1\.experts\.0\.weight.*average_gradients"):
            stage(experts(), SGD, alone)
    stages = BucketedDataParallel(nn.Linear(4, 4), alone, find_unused_parameters=True)
    with pytest.raises(ValueError, match="find_unused_parameters"):
        Pipeline([stages], Schedule(one_f_one_b, ranks=1, micro_batches=2), nn.functional.mse_loss, alone)
