"""What training code does to ``.grad`` between backward() and step(): under every stage as in one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn

from pardemo.small_models import gpt
from pardemo.tensor_parallel import ColumnParallelLinear
from pardemo.zero import Zero1, Zero2, Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
SAMPLES, STEPS = 12, 3
#: fp32 sums in another order; steps are 0.005 and more
TOLERANCE = {"atol": 2e-6, "rtol": 1e-5}


def net():
    """Sizes that do not divide by the ranks, and a parameter smaller than they are many."""
    return gpt.seeded(
        lambda: nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Sequential(nn.Linear(9, 5), nn.Tanh()), nn.Linear(5, 1))
    )


def loss_of(model, step, part):
    x = gpt.numbers(SAMPLES, 7, seed=step)
    return (model(x[part]) - x[part, :1] * 3).square().mean()


class Plain:
    """One process, with an engine's step."""

    def __init__(self):
        self.module, self.part = net(), slice(None)
        self.optimizer = SGD(self.module.parameters())

    def __call__(self, x):
        return self.module(x)

    def parameters(self):
        return self.module.parameters()

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.optimizer.zero_grad()
        return loss


def engine_of(stage, **options):
    options |= {"bucket_bytes": 100} if stage == 2 else {}
    engine = STAGES[stage](net(), SGD, **options)
    share = SAMPLES // dist.get_world_size()
    engine.part = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    return engine


def clip(model, step, max_norm=0.1, **options):
    loss_of(model, step, model.part).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm, **options).item()


def clip_value(model, step):
    loss_of(model, step, model.part).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.02)


def clip_each(model, step):
    loss_of(model, step, model.part).backward()
    return sum(nn.utils.clip_grad_norm_(p, 0.05).item() for p in model.parameters())


def clip_by_hand(model, step):
    loss_of(model, step, model.part).backward()
    norms = [p.grad.detach().data.norm(2) for p in model.parameters() if p.grad is not None]
    norm = torch.stack(norms).norm().item()
    for p in model.parameters():
        p.grad.data.mul_(0.1 / norm)
    return norm


def clip_the_sum(model, step):
    (loss_of(model, step, model.part) / 2).backward()
    (loss_of(model, step + 50, model.part) / 2).backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()


def clip_between(model, step):
    first, second = clip(model, step), clip(model, step + 50, max_norm=0.15)
    return first, second


def scale(model, step):
    loss_of(model, step, model.part).backward()
    for p in model.parameters():
        p.grad.mul_(0.5).div_(torch.tensor(3.0))
    next(iter(model.parameters())).grad *= 2


def discard_all(model, step):
    (1000 * loss_of(model, step, model.part)).backward()
    model.module.zero_grad()
    loss_of(model, step + 50, model.part).backward()


def discard_in_place(model, step):
    (1000 * loss_of(model, step, model.part)).backward()
    model.module.zero_grad(set_to_none=False)
    return clip(model, step + 50)


def discard_some(model, step):
    (3 * loss_of(model, step, model.part)).backward()
    for p in list(model.parameters())[::3]:
        p.grad = None
    loss_of(model, step + 50, model.part).backward()


def discard_by_optimizer(model, step):
    (1000 * loss_of(model, step, model.part)).backward()
    model.optimizer.zero_grad()
    return clip(model, step)


LOOPS = {
    "clip": clip,
    "clip by foreach": partial(clip, foreach=True),
    "clip by the largest": partial(clip, norm_type=float("inf")),
    "clip by another norm": partial(clip, norm_type=1.5),
    "not above": partial(clip, max_norm=1e3),
    "clip value": clip_value,
    "clip each": clip_each,
    "clip by hand": clip_by_hand,
    "clip the sum": clip_the_sum,
    "clip between": clip_between,
    "scale": scale,
    "discard all": discard_all,
    "discard in place": discard_in_place,
    "discard some": discard_some,
    "discard by optimizer": discard_by_optimizer,
}


def compare(engine, plain, name=""):
    with engine.whole():
        for mine, theirs in zip(engine.module.parameters(), plain.module.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, **TOLERANCE, msg=lambda text: f"{name}: {text}")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_are_clipped_scaled_and_discarded_as_in_one_process(stage):
    for name, loop in LOOPS.items():
        plain, engine = Plain(), engine_of(stage)
        for step in range(STEPS):
            expected, result = loop(plain, step), loop(engine, step)
            assert result == (expected and pytest.approx(expected, rel=1e-5)), name
            plain.step()
            engine.step()
        compare(engine, plain, name)
        engine.close()


def largest_of_the_mean():
    plain = Plain()
    loss_of(plain, 0, plain.part).backward()
    return next(plain.parameters()).grad.abs().max().item()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_what_gradients_in_shards_cannot_do_is_refused(stage):
    engine = engine_of(stage)
    with pytest.raises(RuntimeError, match=r"engine\.parameters\(\)"):
        nn.utils.clip_grad_norm_(engine.optimizer.param_groups[0]["params"], 1.0)
    loss_of(engine, 0, engine.part).backward()
    gradients = [p.grad for p in engine.parameters()]
    assert [g.shape for g in gradients] == [p.shape for p in Plain().parameters()]
    if stage == 1:  # what looks at values sees the mean
        assert gradients[0].abs().max().item() == pytest.approx(largest_of_the_mean(), rel=1e-5)
        return
    assert all(g.untyped_storage().nbytes() <= 4 for g in gradients)
    assert says(repr(gradients[0]), "0.weight")
    for use in (torch.abs, torch.Tensor.clone, lambda g: g + 1, lambda g: g.norm(dim=0), lambda g: g.add_(1.0)):
        with pytest.raises(RuntimeError, match=r"0\.weight\.grad.*\w+\(\)"):
            use(gradients[0])
    with pytest.raises(RuntimeError, match=r"orders.*0.*0"):
        gradients[0].norm(0)
    engine.step()
    assert all(p.grad is None for p in engine.parameters())
    with pytest.raises(RuntimeError, match=r"0\.weight.*step\(\)"):
        gradients[0].mul_(2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["factor", "times", "discarded"])
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_change_gradients_differently_are_told_apart(rank, stage, how):
    engine = engine_of(stage)
    loss_of(engine, 0, engine.part).backward()
    gradient = next(engine.parameters()).grad
    if how == "factor":
        gradient.mul_(rank + 2)
    elif rank == 0:
        gradient.mul_(2) if how == "times" else engine.module.zero_grad()
    with pytest.raises(ValueError, match=r"gradients changed \(\w+\)"):  # noqa: PT012 - the step notices, or the next pass
        engine.step()
        loss_of(engine, 1, engine.part).backward()


class Branches(nn.Module):
    """A layer that some ranks use in a pass, and others do not."""

    def __init__(self):
        super().__init__()
        self.all, self.some = gpt.seeded(lambda: nn.Linear(7, 5)), gpt.seeded(lambda: nn.Linear(7, 5))

    def forward(self, x, both):
        return self.all(x) + (self.some(x) if both else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("before", ["nothing", "forward", "backward"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_layer_that_one_rank_alone_uses_is_in_all_ranks_norm(rank, world_size, stage, before):
    """Also after the module's own zero_grad(), which leaves None where this rank adds no gradient."""
    alone, engine = Branches(), STAGES[stage](Branches(), SGD)
    x = gpt.numbers(4, 7, seed=1)
    losses = [alone(x, both).square().mean() for both in (True, False)]
    (sum(losses) / world_size).backward()
    if before == "backward":
        engine(x, rank == 0).sum().backward()
    loss = engine(x, rank == 0).square().mean() if before == "forward" else None
    engine.module.zero_grad()
    loss = engine(x, rank == 0).square().mean() if loss is None else loss
    loss.backward()
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in (alone, engine)]
    torch.testing.assert_close(norms[1], norms[0], **TOLERANCE)
    SGD(alone.parameters()).step()
    engine.step()
    with engine.whole():
        for ours, theirs in zip(engine.module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_torch_does_not_clip_by_the_norm_of_a_part(rank, world_size, stage):
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    net = ColumnParallelLinear(gpt.seeded(lambda: nn.Linear(4, 4)), dist.group.WORLD)
    engine = STAGES[stage](net, SGD, alone)
    engine(torch.ones(2, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="max_norm"):
        nn.utils.clip_grad_norm_(engine.parameters(), 1.0)


def scaled(model, optimizer, scaler, overflows):
    """Losses are scaled; one overflows in the third step, on the last rank alone."""
    scales, norms = [], []
    for step in range(5):
        loss = loss_of(model, step, model.part)
        scaler.scale(loss * float("inf") if step == 2 and overflows else loss).backward()
        scaler.unscale_(optimizer)
        if step != 2:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        scaler.step(optimizer)
        scaler.update()
        model.optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales, norms


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", STAGES)
def test_a_scaler_of_gradients_skips_a_step_on_all_ranks(rank, world_size, stage):
    plain, engine = Plain(), engine_of(stage)
    last = rank == world_size - 1
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]
    scales, norms = scaled(plain, plain.optimizer, scalers[0], overflows=True)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(engine, 0, engine.part)).backward()
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(engine\)"):
        scaler.unscale_(engine.optimizer)
    engine.zero_grad()
    our_scales, our_norms = scaled(engine, engine, scalers[1], overflows=last)
    assert our_scales == scales
    assert our_norms == pytest.approx(norms, rel=1e-5)
    compare(engine, plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_calls_its_closure_first(world_size, stage):
    plain, engine = Plain(), engine_of(stage)
    losses = []
    for model in (plain, engine):
        for step in range(STEPS):

            def closure(model=model, step=step):
                model.optimizer.zero_grad()
                loss = loss_of(model, step, model.part)
                loss.backward()
                return loss

            with torch.no_grad():
                losses.append(model.step(closure).detach())
    mean = torch.stack(losses[STEPS:])
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / world_size, torch.stack(losses[:STEPS]), **TOLERANCE)
    compare(engine, plain)
