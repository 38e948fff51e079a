"""Optimizers under ZeRO: flat shards are right for those that work element by element, and for no others."""

from functools import partial

import pytest
import torch
from torch import nn

from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, load, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


class Lamb(torch.optim.Optimizer):
    """The trust ratio alone: as large a step as the layer is (You et al. 2020, arXiv 1904.00962)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad * p.norm() / p.grad.norm(), alpha=group["lr"])


class Lars(Lamb):
    """Its ratio counts from the second step on: a warm-up by the optimizer itself."""

    def step(self):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
        super().step() if self.param_groups[0]["steps"] > 1 else None


class Shampoo(torch.optim.Optimizer):
    """Preconditions rows by the gradient's own covariance (Gupta et al. 2018, arXiv 1802.09568, one side)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                g = p.grad.view(p.shape[0], -1)
                p.sub_(torch.linalg.solve(g @ g.T + torch.eye(len(g)), g).view_as(p), alpha=group["lr"])


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


class CountsSteps(torch.optim.Optimizer):
    """Element by element, but for a count that every call of ``step`` advances."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["steps"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] / group["steps"])


class Factored(Plainly):
    """Keeps a matrix's second moments by row and column, from 16 x 16 on (Shazeer and Stern 2018, arXiv 1804.04235)."""

    def change(self, p):
        squares = p.grad.square() + 1e-6
        if p.dim() == 2 and min(p.shape) >= 16:
            squares = squares.mean(0, keepdim=True) * squares.mean(1, keepdim=True) / squares.mean()
        return p.grad / squares.sqrt()


class FactoredFrom128(Factored):
    def change(self, p):
        return super().change(p) if min(p.shape) >= 128 else p.grad


class Centralised(Plainly):
    """Takes the mean out of the gradients of convolutions' kernels (Yong et al. 2020, arXiv 2004.01461)."""

    def change(self, p):
        return p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad


class LooksAhead(Plainly):
    """Goes half of the way back at every tenth call (Zhang et al. 2019, arXiv 1907.08610)."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.calls = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.clone())
        super().step()
        self.calls += 1
        for p, state in self.state.items() if self.calls % 10 == 0 else ():
            p.copy_(state["slow"].lerp_(p, 0.5))


class OneStateForAll(Plainly):
    """Scales all steps by the first gradients that it is given."""

    def change(self, p):
        group = self.param_groups[0]
        group.setdefault("first", p.grad.norm())
        return p.grad / group["first"]


NOT_ELEMENTWISE = [
    (Factored, r"Factored is not element by element: it updates a tensor of shape \(129, 131\)"),
    (FactoredFrom128, r"FactoredFrom128 is not element by element"),
    (Centralised, r"Centralised is not element by element: it updates a tensor of shape \(4, 3, 3, 5\)"),
    (LooksAhead, "LooksAhead is not element by element"),
    (OneStateForAll, "OneStateForAll is not element by element"),
    (torch.optim.Adafactor, "Adafactor is not element by element"),
    (partial(torch.optim.Adafactor, lr=0.0), "Adafactor is not element by element"),
    (torch.optim.Muon, "Muon cannot update flat shards .*Muon only supports 2D parameters"),
    (torch.optim.LBFGS, "LBFGS cannot update flat shards .*closure"),
    (torch.optim.SparseAdam, "SparseAdam cannot update flat shards"),
    (Lamb, "Lamb is not element by element"),
    (Lars, "Lars is not element by element"),
    (Shampoo, "Shampoo is not element by element"),
    (CountsSteps, "CountsSteps is not element by element"),
]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_that_look_at_shapes_or_norms_are_refused(stage):
    for optimizer, message in NOT_ELEMENTWISE:
        with pytest.raises(ValueError, match=message) as raised:
            STAGES[stage](nn.Linear(4, 4), optimizer)
        assert "\n" not in str(raised.value)


ELEMENTWISE = [
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
    """fp32: sums in another order; a step is 1e-3 and more."""
    rank, size, before = rank, world_size, torch.get_rng_state()
    x = gpt.numbers(4, 9)
    for make in ELEMENTWISE:
        net, plain = (gpt.seeded(lambda: nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 3))) for _ in range(2))
        engine, optimizer = STAGES[stage](net, make), make(plain.parameters())
        for _ in range(4):
            engine(x[rank * 4 // size : (rank + 1) * 4 // size]).square().mean().backward()
            engine.step()
            plain(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with engine.whole():
            for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    mine, theirs, atol=2e-5, rtol=0, msg=lambda text, make=make: f"{make}: {text}"
                )
    assert torch.equal(torch.get_rng_state(), before), "the sample takes no random numbers"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_optimizers_own_step_and_zero_grad_do_not_pass_the_engine_by(stage):
    net = nn.Linear(5, 5)
    engine = STAGES[stage](net, partial(torch.optim.SGD, lr=1.0))
    engine(torch.ones(2, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call engine\.step\(\)"):
        engine.optimizer.step()
    engine.optimizer.zero_grad()  # as loops do: it has to reach what is in shards
    with engine.whole():
        before = net.weight.detach().clone()
    engine(torch.zeros(2, 5)).sum().backward()
    engine.step()
    with engine.whole():
        assert torch.equal(net.weight, before), "the gradient of before zero_grad() is gone"


class CountsInStates(torch.optim.Optimizer):
    """A step count that is a Python number in the state of each parameter, as older optimizers keep it."""

    def __init__(self, params, lr=0.5):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / count)


@pytest.mark.ranks(2)
def test_checkpoints_keep_counts_that_are_no_tensors(tmp_path):
    def steps(engine, count):
        for _ in range(count):
            engine(torch.ones(1, 5)).sum().backward()
            engine.step()
        with engine.whole() as net:
            return net.weight.detach().clone()

    def make():
        return Zero3(gpt.seeded(lambda: nn.Linear(5, 5)), CountsInStates)

    first, again = make(), make()
    steps(first, 3)
    save(first, tmp_path / "at")
    expected = steps(first, 2)
    load(again, tmp_path / "at")
    torch.testing.assert_close(steps(again, 2), expected, atol=1e-6, rtol=0)
