"""Optimizers under ZeRO: flat shards are right for those that work element by element; parameter groups, schedules."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


class Plainly(torch.optim.Optimizer):
    """Subtracts what ``change`` makes of a gradient."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.change(p), alpha=group["lr"])

    def change(self, p):
        return p.grad


class Lamb(Plainly):
    """The trust ratio alone: as large a step as the layer is (You et al. 2020, arXiv 1904.00962)."""

    def change(self, p):
        return p.grad * p.norm() / p.grad.norm()


class Lars(Lamb):
    """Its ratio counts from the second step on: a warm-up by the optimizer itself."""

    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step() if self.param_groups[0]["steps"] > 1 else None


class Factored(Plainly):
    """Keeps a matrix's second moments by row and column, from 16 x 16 on (Shazeer and Stern 2018, arXiv 1804.04235)."""

    def change(self, p):
        squares = p.grad.square() + 1e-6
        if p.dim() == 2 and min(p.shape) >= 16:
            squares = squares.mean(0, keepdim=True) * squares.mean(1, keepdim=True) / squares.mean()
        return p.grad / squares.sqrt()


class Centralised(Plainly):
    """Takes the mean out of the gradients of convolutions' kernels (Yong et al. 2020, arXiv 2004.01461)."""

    def change(self, p):
        return p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad


class OneStateForAll(Plainly):
    """Scales all steps by the first gradients that it is given."""

    def change(self, p):
        group = self.param_groups[0]
        group.setdefault("first", p.grad.norm())
        return p.grad / group["first"]


NOT_ELEMENTWISE = [
    (Factored, r"Factored is not element by element: it updates a tensor of shape \(128, 128\)"),
    (Centralised, r"Centralised is not element by element: it updates a tensor of shape \(4, 3, 3, 5\)"),
    (OneStateForAll, "OneStateForAll is not element by element"),
    (torch.optim.Adafactor, "Adafactor is not element by element"),
    (partial(torch.optim.Adafactor, lr=0.0), "Adafactor is not element by element"),
    (torch.optim.Muon, "Muon only supports 2D parameters"),
    (torch.optim.LBFGS, "closure"),
    (torch.optim.SparseAdam, "SparseAdam"),
    (Lamb, "Lamb is not element by element"),
    (Lars, "Lars is not element by element"),
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_optimizers_that_look_at_shapes_or_norms_are_refused(stage):
    for optimizer, message in NOT_ELEMENTWISE:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message) as raised:
            STAGES[stage](nn.Linear(4, 4), optimizer)
        assert "\n" not in str(raised.value)


class CountsSteps(Plainly):
    """Element by element, and a count that every call of ``step`` advances."""

    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step()

    def change(self, p):
        return p.grad / self.param_groups[0]["steps"]


ELEMENTWISE = [
    CountsSteps,
    partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    partial(torch.optim.SGD, lr=0.0),
    partial(torch.optim.AdamW, amsgrad=True),
    partial(torch.optim.AdamW, fused=True),
    partial(torch.optim.AdamW, foreach=True),
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.Rprop,
    partial(torch.optim.RMSprop, centered=True, momentum=0.5),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_element_by_element_optimizers_equal_one_process(rank, world_size, stage):
    """fp32: sums in another order; a step is 1e-3 and more. Rprop assigns by masks, which DTensors refuse."""
    size, before = world_size, torch.get_rng_state()
    x = gpt.numbers(4, 9)
    for make in ELEMENTWISE if stage < 3 else [make for make in ELEMENTWISE if make is not torch.optim.Rprop]:
        net, plain = (gpt.seeded(lambda: nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))) for _ in range(2))
        engine, optimizer = STAGES[stage](net, make), make(plain.parameters())
        for _ in range(4):
            engine(x[rank * 4 // size : (rank + 1) * 4 // size]).square().mean().backward()
            engine.step()
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with engine.full_parameters():
            for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    mine, theirs, atol=2e-5, rtol=0, msg=lambda text, make=make: f"{make}: {text}"
                )
    assert torch.equal(torch.get_rng_state(), before), "the sample takes no random numbers"


ADAMW = partial(torch.optim.AdamW, lr=2e-2)
STEPS, SAMPLES = 6, 8


def model(dtype=torch.float32):
    """Norms and biases between weights, none of a size that divides by 2; one frozen."""
    net = gpt.seeded(
        lambda: nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(9, 9), nn.LayerNorm(9), nn.Tanh())])
    ).to(dtype)
    net[3].bias.requires_grad_(False)
    return net


def groups_of(parameters):
    """What everybody trains with: a weight decay that leaves norms and biases alone; and a group's own rate."""
    weights, others = ([p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False))
    return [
        {"params": weights[1:], "weight_decay": 0.5},
        {"params": others, "weight_decay": 0.0},
        {"params": weights[:1], "weight_decay": 0.5, "lr": 5e-3},
    ]


def halves_every_two(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def loss_of(net, step, dtype, part=slice(None)):
    return (net(gpt.numbers(SAMPLES, 9, seed=step)[part].to(dtype)).float() - 1).square().mean()


def groups_in_one_process(dtype):
    """AdamW on fp32 copies of the parameters, as in mixed precision."""
    net = model(dtype)
    masters = {p: p.detach().float().clone().requires_grad_() for p in net.parameters()}
    groups = groups_of([p for p in net.parameters() if p.requires_grad])
    optimizer = ADAMW([group | {"params": [masters[p] for p in group["params"]]} for group in groups])
    scheduler = halves_every_two(optimizer)
    for step in range(STEPS):
        loss_of(net, step, dtype).backward()
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return [p.detach() for p in net.parameters()]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("stage", "options"), [(1, {}), (2, {}), (2, {"bucket_bytes": 1}), (3, {}), (3, {"layers": []})]
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        (torch.float32, 1e-5),  # sums in another order; a decay of biases too moves them by 1e-3
        (torch.bfloat16, 2e-2),  # 8 bits of numbers up to 1, and halves of the batch rounded each on its own
    ],
    ids=["fp32", "bf16"],
)
def test_groups_and_a_schedule_are_torchs(rank, world_size, stage, options, dtype, tolerance):
    net = model(dtype)
    engine = STAGES[stage](net, ADAMW, param_groups=groups_of(list(net.parameters())), **options)
    scheduler = halves_every_two(engine.optimizer)
    part = slice(rank * SAMPLES // world_size, (rank + 1) * SAMPLES // world_size)
    for step in range(STEPS):
        loss_of(engine, step, dtype, part).backward()
        engine.step()
        scheduler.step()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [2e-2 / 8, 2e-2 / 8, 5e-3 / 8]
    with engine.full_parameters():
        for mine, theirs in zip(net.parameters(), groups_in_one_process(dtype), strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


@pytest.mark.ranks(1)
def test_groups_that_are_not_the_modules_parameters_are_refused():
    net = model()
    weights = [p for p in net.parameters() if p.dim() > 1]
    for groups, message in [
        ([{"params": weights}], "0.bias requires a gradient and is in none of param_groups"),
        ([{"params": net.parameters()}, {"params": weights[0]}], "0.weight is in more than one of param_groups"),
        ([{"params": [*net.parameters(), nn.Parameter(torch.ones(1))]}], "has a parameter that is not the module's"),
        ([{"lr": 0.1}], r'param_groups\[0\] has no "params"'),
    ]:
        with pytest.raises(ValueError, match=message):
            Zero2(net, ADAMW, param_groups=groups)
    for stage in STAGES.values():
        with pytest.raises(ValueError, match=r"parameters.*groups"):
            stage(model(), lambda _: torch.optim.AdamW(net.parameters()))


def shards_only(shards):
    """Takes the two samples that an engine tries, and refuses the real shards."""
    if sum(p.numel() for p in shards) < 1000:
        raise MemoryError("no room for states")
    return torch.optim.SGD(shards, lr=0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_that_one_rank_cannot_make_leaves_the_module_as_it_was(rank, stage):
    net = gpt.seeded(model, rank)
    before = {p: (p.data_ptr(), p.detach().clone()) for p in net.parameters()}
    with pytest.raises(MemoryError, match="no room for states" if rank else "rank 1: no room for states"):
        STAGES[stage](net, shards_only if rank else partial(torch.optim.SGD, lr=0.1))
    assert all(p.data_ptr() == place and torch.equal(p, value) for p, (place, value) in before.items())
    engine = STAGES[stage](net, ADAMW)  # another engine may be made
    loss_of(engine, 0, torch.float32).backward()
    engine.step()
    mine = torch.cat([p.detach().flatten() for p in net.parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    assert torch.equal(mine, theirs)
