"""What stages may hand on, and what a step refuses: each against one process, or one clear line."""

import copy

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn
from torch.nn import functional as F

from pardemo.data_parallel import BucketedDataParallel
from pardemo.groups import Groups, ParallelDims
from pardemo.meters import WireMeter
from pardemo.pipeline_parallel import (
    Pipeline,
    Schedule,
    cut_by_layers,
    exchange,
    gpipe,
    interleaved,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from pardemo.small_models import gpt

WIDTH, BATCH, M = 32, 24, 4
#: fp32 sums in another order: some 1e-7 of a gradient's norm. A factor of 1.003 somewhere would be 3e-3.
CLOSE = 1e-5


def batch(seed=0, samples=BATCH):
    return gpt.numbers(samples, WIDTH, seed=seed), gpt.numbers(samples, WIDTH, seed=seed + 1)


def train(stages, order=one_f_one_b, chunks=1, steps=3, inputs=lambda x: x, loss_of=F.mse_loss, **options):
    """Several steps of SGD with momentum on this rank's part of ``stages``; losses and every stage's parameters."""
    schedule = Schedule(order, dist.get_world_size(), M, chunks)
    mine = [stages[s] for s in schedule.stages_of(dist.get_rank())]
    found = Pipeline(mine, schedule, loss_of, **options)
    parameters = [p for stage in mine for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9) if parameters else None
    losses = []
    for step in range(steps):
        x, y = batch(10 * step)
        losses.append(found.step(inputs(x), y))
        if optimizer:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {s: list(stage.parameters()) for s, stage in found._stages.items()}


def train_plainly(stages, steps=3, inputs=lambda x: x, loss_of=F.mse_loss):
    """The same in one process and in one batch; the model's parameters stay where they were where nothing trains."""
    parameters = [p for stage in stages for p in stage.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.SGD(parameters, lr=0.1, momentum=0.9), []
    for step in range(steps):
        x, y = batch(10 * step)
        hidden = inputs(x)
        for stage in stages:
            hidden = stage(*hidden) if isinstance(hidden, tuple) else stage(hidden)
        loss = loss_of(hidden, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_equal_to_one_process(results, stages, before, losses):
    """Losses, and what each parameter moved by: an error in a gradient is not hidden behind the weight's size."""
    assert [loss.item() for loss in of_last(results)] == pytest.approx(losses, rel=CLOSE)
    of_stage = {stage: found for _, part in results for stage, found in part.items()}
    for number, (stage, start) in enumerate(zip(stages, before, strict=True)):
        for found, expected, was in zip(of_stage[number], stage.parameters(), start.parameters(), strict=True):
            if expected.requires_grad:
                assert gpt.relative_error(found - was, expected - was) < CLOSE
            else:
                assert torch.equal(found, was)
                assert found.grad is None, "a frozen stage got a gradient"


def of_last(results):
    """The losses, of the rank with the last stage."""
    return next(losses for losses, _ in results if losses[0] is not None)


def errors(function, *args):
    """What it raises on this rank, if anything; the ranks stay for the next test, whose links are new ones."""
    told = ""
    try:
        function(*args)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    exchange.abandon(dist.group.WORLD)  # also where this rank saw nothing of the error
    return told


# --- what stages hand on, and do to what they are handed ------------------------------------------------------------


class Skip(nn.Module):
    """Passes a skip connection and a mask of integers on beside what it computes; the last stage adds them up."""

    def __init__(self, number, last):
        super().__init__()
        self.layer, self.number, self.last = gpt.MLP(WIDTH), number, last

    def forward(self, x, skip=None, mask=None):
        if skip is None:
            skip, mask = x, (x > 0).long()
        y = x + self.layer(x)
        if self.last:
            return y + skip * mask
        return y, skip + y.mean(-1, keepdim=True) if self.number % 2 else skip, mask


class Two(nn.Linear):
    """Takes two tensors and hands on three, of which two are one and the same."""

    def forward(self, a, b):
        y = super().forward(a) * b
        return y, y, a.view(-1, 2, WIDTH // 2)


class Three(nn.Linear):
    def forward(self, a, b, c):
        return super().forward(a + 2 * b) + c.flatten(1)


def two_inputs(x):
    return x, x.cos()


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), 2, -1).transpose(1, 2)


def relu_at_both_ends(number, _):
    """Activations in place where the stages are cut: an odd stage changes what it is handed, and what it hands on."""
    inner = [nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(nn.ReLU(inplace=True), *inner, nn.LeakyReLU(0.3, inplace=True)) if number % 2 else inner[0]


class Doubles(nn.Linear):
    """Changes its input in place so that a second run on it would give another result."""

    def forward(self, x):
        return super().forward(x.mul_(2))


class Lazy(nn.Linear):
    """Hands on a negative that is not carried out, and so is the gradient that comes back."""

    def forward(self, x):
        return torch.complex(super().forward(x.real), super().forward(x)).conj().imag


#: Stage ``number`` of so many.
STAGES = {
    "skip and mask": lambda number, many: Skip(number, number == many - 1),
    "two inputs": lambda number, _: (Two, Three)[number](WIDTH, WIDTH),
    "input and view": lambda number, _: (nn.Identity(), nn.Linear(WIDTH, WIDTH), View(), nn.Flatten())[number],
    "in place": relu_at_both_ends,
    "its input in place": lambda number, _: Doubles(WIDTH, WIDTH),
    "lazy negatives": lambda number, _: Lazy(WIDTH, WIDTH),
    "compiled": lambda number, _: torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager"),
}
ORDERS = [(2, gpipe, 1), (2, one_f_one_b, 1), (2, interleaved, 2), (2, zb_h1, 1), (2, zb_v, 2)]
CELLS = [
    *(("skip and mask", *layout, False) for layout in [(1, interleaved, 2), *ORDERS]),
    *(("skip and mask", *layout, True) for layout in [(1, interleaved, 2), *ORDERS[:3]]),
    ("two inputs", 2, one_f_one_b, 1, False),
    ("input and view", 2, interleaved, 2, False),
    ("input and view", 1, interleaved, 4, False),
    *((name, *layout, False) for name in list(STAGES)[3:] for layout in ORDERS),
]


def build(name, many):
    return [gpt.seeded(lambda: STAGES[name](number, many), number) for number in range(many)]  # noqa: B023


def train_built(name, order, chunks, **options):
    return train(build(name, dist.get_world_size() * chunks), order, chunks, **options)


@pytest.mark.parametrize(("name", "ranks", "order", "chunks", "checkpointing"), CELLS)
def test_stages_train_as_in_one_process(world_of, name, ranks, order, chunks, checkpointing):
    stages, before = (build(name, ranks * chunks) for _ in range(2))
    options = {"inputs": two_inputs} if name == "two inputs" else {}
    results = world_of(ranks).run(train_built, name, order, chunks, checkpointing=checkpointing, **options)
    assert_equal_to_one_process(results, stages, before, train_plainly(stages, **options))


def test_under_checkpointing_a_stage_that_changes_its_input_is_refused(world_of):
    def check():
        Pipeline([Doubles(WIDTH, WIDTH)], Schedule(gpipe, 2, M), F.mse_loss, checkpointing=True).step(*batch())

    told = world_of(2).run(errors, check)
    assert any(says(one, "RuntimeError: stage ", "in place") for one in told), told


# --- gradients that do not come back ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "order", "chunks"), ORDERS)
@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_first_stages_change_nothing_in_later_steps(world_of, ranks, order, chunks, frozen):
    stages = [gpt.seeded(lambda: gpt.MLP(WIDTH), s).requires_grad_(s >= frozen) for s in range(4)]
    stages = cut_by_layers(stages, 2 * chunks)
    before = copy.deepcopy(stages)
    results = world_of(ranks).run(train, stages, order, chunks)
    assert_equal_to_one_process(results, stages, before, train_plainly(stages))


def bytes_back(frozen):
    stage = nn.Linear(512, 512).requires_grad_(not (frozen and dist.get_rank() == 0))
    found = Pipeline([stage], Schedule(gpipe, 2, M), F.mse_loss)
    x = gpt.numbers(2048, 512)
    found.step(x, x)
    with WireMeter() as wire:
        found.step(x, x)
    return wire.sent_bytes


def test_nothing_travels_back_to_a_frozen_stage(world_of):
    activations = 4 * 2048 * 512
    forth, back = world_of(2).run(bytes_back, True)
    assert forth == pytest.approx(activations, rel=0.001)
    assert back < 1000
    assert world_of(2).run(bytes_back, False) == pytest.approx([activations] * 2, rel=0.001)


class Cut(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        if self.how == "no_grad":
            with torch.no_grad():
                return 2 * x
        return x.detach() if self.how == "detach" else x.long()


def cut_at(how, where):
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    if dist.get_rank() == where:
        stage.append(Cut(how))
    Pipeline([stage], Schedule(one_f_one_b, dist.get_world_size(), M), F.mse_loss).step(*batch())


@pytest.mark.parametrize("how", ["detach", "no_grad", "integers"])
@pytest.mark.parametrize("where", [0, 1])
def test_a_stage_that_cuts_the_graph_is_an_error_at_once(world_of, how, where):
    told = world_of(2).run(errors, cut_at, how, where, timeout_s=120)
    assert told[where].startswith(f"RuntimeError: stage {where} hands on no gradient, though")
    assert told[1 - where].startswith("ConnectionError: "), "the other rank does not wait"


def cut_behind():
    stage = [nn.Linear(WIDTH, WIDTH), Cut("detach"), nn.Identity(), nn.Identity()][dist.get_rank()]
    Pipeline([stage], Schedule(one_f_one_b, 4, M), F.mse_loss).step(*batch())


def test_a_cut_behind_trained_stages_is_told_too(world_of):
    told = world_of(4).run(errors, cut_behind, timeout_s=120)
    assert says(told[1], "RuntimeError", "stage 1")
    assert all(other.startswith("ConnectionError: ") for other in (told[0], *told[2:]))


class SomeMicroBatches(nn.Module):
    """Detaches, or leaves its input unused, from the second micro-batch on."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how, self.seen = nn.Linear(WIDTH, WIDTH), how, 0

    def forward(self, x):
        self.seen += 1
        if self.seen == 1:
            return self.layer(x)
        if self.how == "detaches":
            return self.layer(x), x.detach()  # as a second output
        if self.how == "freezes":
            self.layer.requires_grad_(False)
        return self.layer(x.detach()) if self.how == "leaves its input" else self.layer(x)


@pytest.mark.parametrize(
    ("how", "where", "message"),
    [
        ("detaches", 0, ("stage 0", "micro-batch 1", "has_gradient=True", "has_gradient=False")),
        ("freezes", 0, ("stage 0", "has_gradient=True", "micro-batch 1", "has_gradient=False")),
        ("leaves its input", 1, ("stage 1 gives its input 0 no gradient",)),
    ],
)
def test_micro_batches_of_two_kinds_are_refused(world_of, how, where, message):
    def step():
        stage = SomeMicroBatches(how) if dist.get_rank() == where else nn.Linear(WIDTH, WIDTH)
        Pipeline([stage], Schedule(gpipe, 2, M), F.mse_loss).step(*batch())

    assert says(world_of(2).run(errors, step, timeout_s=120)[where], *message)


# --- precision -------------------------------------------------------------------------------------------------------


class Seen(nn.Module):
    """Notes what arrives, and what comes back as its gradient."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.dtypes = layer, set()

    def forward(self, x):
        self.dtypes.add(x.dtype)
        return self.layer(x)


def under_autocast(checkpointing):
    stage = Seen(gpt.seeded(lambda: gpt.MLP(WIDTH), dist.get_rank()))
    found = Pipeline([stage], Schedule(one_f_one_b, 2, M), F.mse_loss, checkpointing=checkpointing)
    with torch.autocast("cpu", torch.bfloat16):
        loss = found.step(*batch())
    return loss, [p.grad for p in stage.parameters()], stage.dtypes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_under_autocast_activations_travel_in_bf16(world_of, checkpointing):
    (_, first, _), (loss, second, arrived) = world_of(2).run(under_autocast, checkpointing)
    model = nn.Sequential(*(gpt.seeded(lambda: gpt.MLP(WIDTH), s) for s in range(2)))
    losses = []
    for x, y in zip(*(t.chunk(M) for t in batch()), strict=True):  # the same micro-batches: the same roundings
        with torch.autocast("cpu", torch.bfloat16):
            part = F.mse_loss(model(x), y) / M
        part.backward()
        losses.append(part.item())
    assert arrived == {torch.bfloat16}
    assert loss.item() == pytest.approx(sum(losses), rel=CLOSE)
    for found, parameter in zip(first + second, model.parameters(), strict=True):
        # one process adds up the micro-batches in fp32, a rank under autocast in its cached bf16 weight: 2^-8 each
        assert gpt.relative_error(found, parameter.grad) < 2**-8


# --- random numbers --------------------------------------------------------------------------------------------------


def dropping():
    return [nn.Sequential(gpt.seeded(lambda: gpt.MLP(WIDTH), s), nn.Dropout(0.5)) for s in range(2)]


def dropout_on_ranks(order, checkpointing):
    stage = dropping()[dist.get_rank()]
    found = Pipeline([stage], Schedule(order, 2, M), F.mse_loss, checkpointing=checkpointing)
    torch.manual_seed(dist.get_rank())
    return found.step(*batch()), [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_that_of_the_forward_when_it_is_run_again(world_of, order, checkpointing):
    """Masks of its own in the recomputation would be gradients of another network."""
    (_, first), (loss, second) = world_of(2).run(dropout_on_ranks, order, checkpointing)
    stages, (inputs, targets) = dropping(), (tensor.chunk(M) for tensor in batch())
    with torch.random.fork_rng():
        for rank, stage in enumerate(stages):  # each rank draws for its micro-batches in their order
            torch.manual_seed(rank)
            inputs = [stage(x) for x in inputs]
    expected = sum(F.mse_loss(y, target) for y, target in zip(inputs, targets, strict=True)) / M
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=CLOSE)
    parameters = [p for stage in stages for p in stage.parameters()]
    for found, parameter in zip(first + second, parameters, strict=True):
        assert gpt.relative_error(found, parameter.grad) < CLOSE


# --- losses and evaluation -------------------------------------------------------------------------------------------


def one_number(loss, target):
    return F.mse_loss(loss, target).reshape(1)


def counted(logits, targets):
    """A mean over the labels that are not ignored: of the whole batch's count, as the docstring says."""
    return F.cross_entropy(logits, targets, reduction="sum") * M / LABELS


LABELS = 15


def losses_of(kind):
    stages = [gpt.seeded(lambda: nn.Linear(WIDTH, WIDTH), s) for s in range(2)]
    x, y = batch()
    if kind == "nan":
        x[BATCH - 1] = torch.nan
    if kind == "ignored":
        y = gpt.text(1, BATCH, WIDTH)[0]
        y[: BATCH - LABELS] = -100
    if not dist.is_initialized():
        loss = (F.cross_entropy if kind == "ignored" else F.mse_loss)(nn.Sequential(*stages)(x), y)
        loss.backward()
        return loss, [p.grad for stage in stages for p in stage.parameters()]
    loss_of = {"ignored": counted, "shape": one_number}.get(kind, F.mse_loss)
    stage = stages[dist.get_rank()]
    loss = Pipeline([stage], Schedule(one_f_one_b, 2, M), loss_of).step(x, y)
    return loss, [p.grad for p in stage.parameters()]


@pytest.mark.parametrize("kind", ["shape", "nan", "ignored"])
def test_losses_are_those_of_one_process(world_of, kind):
    (_, first), (found, second) = world_of(2).run(losses_of, kind)
    loss, gradients = losses_of(kind)
    torch.testing.assert_close(found, loss, rtol=CLOSE, atol=0, equal_nan=True)
    for gradient, expected in zip(first + second, gradients, strict=True):
        assert torch.equal(gradient.isnan(), expected.isnan())
        if kind != "nan":
            assert gpt.relative_error(gradient, expected) < CLOSE


def evaluated():
    stage = gpt.seeded(lambda: gpt.MLP(WIDTH), dist.get_rank())
    found = Pipeline([stage], Schedule(one_f_one_b, 2, M), F.mse_loss)
    losses = [
        found.step(*batch()),
        found.evaluate(*batch(5, 2 * BATCH)),  # of another size, after a step
        found.step(*batch(7, BATCH // 2)),
        found.evaluate(*batch(5, 2 * BATCH)),
    ]
    return losses, [p.grad for p in stage.parameters()]


def test_evaluation_gives_the_loss_and_leaves_gradients_alone(world_of):
    (_, first), (losses, second) = world_of(2).run(evaluated)
    model = nn.Sequential(*(gpt.seeded(lambda: gpt.MLP(WIDTH), s) for s in range(2)))
    expected = [F.mse_loss(model(x), y) for x, y in (batch(), batch(5, 2 * BATCH), batch(7, BATCH // 2))]
    (expected[0] + expected[2]).backward()
    expected.append(expected[1])
    assert [loss.item() for loss in losses] == pytest.approx([loss.item() for loss in expected], rel=CLOSE)
    for found, parameter in zip(first + second, model.parameters(), strict=True):
        assert gpt.relative_error(found, parameter.grad) < CLOSE


# --- tied weights ----------------------------------------------------------------------------------------------------


def accumulated(clears, replicas=None):
    """Two steps whose gradients add up, or are cleared in between, and a third; of ``replicas`` each has its part."""
    net = gpt.seeded(lambda: gpt.GPT(vocabulary=64))

    def loss_of(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    batches = [gpt.text(8, 33, 64, seed=step) for step in range(3)]
    if dist.is_initialized():
        group = dist.group.WORLD if replicas is None else replicas.pp
        stage = cut_by_layers(gpt.layers_of(net), 2)[dist.get_rank(group)]
        with torch.no_grad():
            net.embedding.weight += dist.get_rank(group)  # copies that start apart: tying makes them alike
        tied = [(net.embedding.weight, group)]
        stage = stage if replicas is None else BucketedDataParallel(stage, replicas.dp)
        found = Pipeline([stage], Schedule(one_f_one_b, 2, 2), loss_of, group, tied=tied)
    for tokens in batches:
        tokens = tokens if replicas is None else tokens.chunk(2)[dist.get_rank(replicas.dp)]
        if clears:
            net.zero_grad()
        if dist.is_initialized():
            found.step(tokens[:, :-1], tokens[:, 1:])
        else:
            net.loss(tokens).backward()
    return net.embedding.weight.grad


@pytest.mark.parametrize("clears", [False, True])
def test_gradients_of_tied_weights_add_up_over_steps(world_of, clears):
    first, last = world_of(2).run(accumulated, clears)
    assert torch.equal(first, last)
    assert gpt.relative_error(first, accumulated(clears)) < CLOSE


def accumulated_in_replicas():
    with Groups(ParallelDims(dp=2, pp=2)) as groups:
        return accumulated(False, groups).clone()


def test_gradients_of_tied_weights_add_up_in_replicas_too(world_of):
    """A wrapper's gradients lie in buckets that the next step writes over."""
    expected = accumulated(False)
    assert all(gpt.relative_error(found, expected) < CLOSE for found in world_of(4).run(accumulated_in_replicas))


# --- refused ---------------------------------------------------------------------------------------------------------


class Returns(nn.Linear):
    """Hands on what ``make`` makes of its output."""

    def __init__(self, make):
        super().__init__(WIDTH, WIDTH)
        self.make = make

    def forward(self, x):
        return self.make(super().forward(x))


def step(first=None, order=one_f_one_b, m=M, loss_of=F.mse_loss, inputs=None, freezes=False):
    """A step of two linear layers; ``first``: what the first of them hands on."""
    rank = dist.get_rank()
    stage = nn.Linear(WIDTH, WIDTH) if first is None or rank else Returns(first)
    stage.weight.requires_grad_(not freezes or rank == 0)
    tied = [(stage.weight, dist.group.WORLD)] if freezes else ()
    x, y = batch()
    Pipeline([stage], Schedule(order, 2, m), loss_of, tied=tied).step(x if inputs is None else inputs(x), y)


def each_samples(y, target):
    return F.mse_loss(y, target, reduction="none").mean(1)


REFUSED = {
    "dict": (lambda: step(lambda y: {"hidden": y}), "TypeError", "stage 0", "dict"),
    "list": (lambda: step(lambda y: [y]), "TypeError", "stage 0", "list"),
    "text": (lambda: step(lambda y: (y, "text")), "TypeError", "stage 0", "str"),
    "empty": (lambda: step(lambda y: ()), "TypeError", "stage 0", "NoneType"),
    "complex": (lambda: step(lambda y: y + 0j), "TypeError", "stage 0", "torch.complex64"),
    "each sample's loss": (
        lambda: step(loss_of=each_samples), "RuntimeError", "shape '[]' is invalid for input of size 6",
    ),
    "m": (
        lambda: step(m=M + dist.get_rank()),
        "ValueError", "one_f_one_b of 4 micro-batches", "rank 1 one_f_one_b of 5 micro-batches",
    ),
    "schedules": (
        lambda: step(order=gpipe if dist.get_rank() else one_f_one_b),
        "ValueError", "rank 0", "one_f_one_b", "rank 1 gpipe",
    ),
    "half-frozen": (
        lambda: step(freezes=True), "ValueError", "tied weight", "(32, 32), trained", "(32, 32), frozen",
    ),
    "no_grad": (lambda: torch.no_grad()(step)(), "RuntimeError", "evaluate"),
    "a list": (lambda: step(inputs=list), "ValueError", "inputs", "list"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_is_one_clear_line(world_of, what):
    call, *message = REFUSED[what]
    told = world_of(2).run(errors, call, timeout_s=120)
    told = [one for one in told if one and not one.startswith("Connection")]
    assert told
    assert all(says(one, *message) and "\n" not in one for one in told), told
