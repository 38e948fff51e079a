"""Parameter groups under every stage against torch's own AdamW with the same groups in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, load, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
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


def loss_of(net, step, part=slice(None)):
    x = gpt.numbers(SAMPLES, 9, seed=step)[part].to(
        net[0].weight.dtype if isinstance(net, nn.Sequential) else net.dtype
    )
    return (net(x).float() - 1).square().mean()


def one_process(dtype):
    """AdamW on fp32 copies of the parameters, as in mixed precision."""
    net = model(dtype)
    masters = {p: p.detach().float().clone().requires_grad_() for p in net.parameters()}
    groups = groups_of([p for p in net.parameters() if p.requires_grad])
    optimizer = ADAMW([group | {"params": [masters[p] for p in group["params"]]} for group in groups])
    scheduler = halves_every_two(optimizer)
    for step in range(STEPS):
        loss_of(net, step).backward()
        for parameter, master in masters.items():
            master.grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, master in masters.items():
                parameter.copy_(master)
    return [p.detach() for p in net.parameters()]


def train(stage, dtype, options):
    rank, size = dist.get_rank(), dist.get_world_size()
    net = model(dtype)
    engine = STAGES[stage](net, ADAMW, param_groups=groups_of(list(net.parameters())), **options)
    engine.dtype = dtype
    scheduler = halves_every_two(engine.optimizer)
    for step in range(STEPS):
        loss_of(engine, step, slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)).backward()
        engine.step()
        scheduler.step()
    assert [group["lr"] for group in engine.optimizer.param_groups] == [2e-2 / 8, 2e-2 / 8, 5e-3 / 8]
    with engine.whole():
        return [p.detach().clone() for p in net.parameters()]


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
def test_groups_and_a_schedule_are_torchs(world_of, stage, options, dtype, tolerance):
    expected = one_process(dtype)
    for found in world_of(2).run(train, stage, dtype, options):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


def engine_with(stage, change=lambda groups: groups):
    net = model()
    return STAGES[stage](net, ADAMW, param_groups=change(groups_of(list(net.parameters()))))


def write_checkpoint(stage, folder):
    engine = engine_with(stage)
    engine(torch.ones(2, 9)).sum().backward()
    engine.optimizer.param_groups[1]["lr"] = 0.125
    engine.step()
    save(engine, folder)


def read_checkpoint(stage, folder):
    engine = engine_with(stage)
    load(engine, folder)
    assert [group["lr"] for group in engine.optimizer.param_groups] == [2e-2, 0.125, 5e-3]
    assert [group["weight_decay"] for group in engine.optimizer.param_groups] == [0.5, 0.0, 0.5]

    def swapped(groups):
        first, second, third = (group["params"] for group in groups)
        return [{"params": second}, {"params": first}, {"params": third}]

    with pytest.raises(
        ValueError, match=r"in parameter group 0, this engine in 1|in parameter group 1, this engine in 0"
    ):
        load(engine_with(stage, swapped), folder)
    with pytest.raises(ValueError, match=r"parameter.*3.*1"):
        load(engine_with(stage, lambda groups: [{"params": [p for g in groups for p in g["params"]]}]), folder)


@pytest.mark.parametrize("stage", STAGES)
def test_checkpoints_keep_groups_and_refuse_others(world_of, tmp_path, stage):
    world_of(1).run(write_checkpoint, stage, tmp_path / "at")
    world_of(2).run(read_checkpoint, stage, tmp_path / "at")


def refusals():
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
    with pytest.raises(ValueError, match=r"parameters.*groups"):
        Zero2(model(), lambda _: torch.optim.AdamW(net.parameters()))


def test_groups_that_are_not_the_modules_parameters_are_refused(world_of):
    world_of(1).run(refusals)
