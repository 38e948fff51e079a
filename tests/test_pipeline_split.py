"""A backward pass in two parts against autograd's own."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pardemo.meters import Timeline
from pardemo.meters.padding import PaddedModule
from pardemo.pipeline_parallel.split import SplitBackward
from pardemo.small_models import gpt


class Shared(nn.Module):
    """A weight used three times, once transposed; an output that skips the trunk, and one that is the input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = F.linear(self.b(self.norm(self.a(x)).tanh()), self.a.weight, self.b.bias) + x
        return F.linear(y, self.a.weight.t() * self.scale), self.scale.exp(), x


class Doubled(nn.Module):
    """A hook changes the gradient where the weight joins the trunk."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return self.b(y.relu())


class Again(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.layers, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), reentrant

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


def of(module, x):
    found = module(x)
    return [y for y in (found if isinstance(found, tuple) else (found,)) if y.requires_grad]


MODULES = {
    "linear": lambda: nn.Linear(8, 8),
    "mlp": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
    "shared": Shared,
    "hook": Doubled,
    "checkpointed": Again,
    "nothing": nn.Identity,
    "frozen": lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
    "lstm": lambda: gpt.seeded(lambda: OfLstm()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
}


class OfLstm(nn.LSTM):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, x):
        return super().forward(x)[0]


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("needs_input", [True, False])
def test_the_two_parts_are_autograds_backward_bit_for_bit(name, needs_input):
    module = gpt.seeded(MODULES[name])
    plain, hooked = copy.deepcopy(module), []
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hooked.append)
    for step in range(2):  # gradients add up
        x = gpt.numbers(4, 5, 8, seed=step).requires_grad_(needs_input or name in ("nothing", "checkpointed"))
        same = x.detach().clone().requires_grad_(x.requires_grad)
        torch.manual_seed(step)
        outputs = of(module, x)
        torch.manual_seed(step)
        expected = of(plain, same)
        gradients = [gpt.numbers(*y.shape, seed=7 + n) for n, y in enumerate(outputs)]
        torch.autograd.backward(expected, gradients)
        before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        split = SplitBackward([get_gradient_edge(y) for y in outputs], gradients, [x])
        if x.requires_grad:
            assert torch.equal(x.grad, same.grad)
        for p, was in zip(module.parameters(), before, strict=True):
            assert (p.grad is None and was is None) or torch.equal(p.grad, was), "a weight's gradient came early"
        split.weights()
        for found, goal in zip(module.parameters(), plain.parameters(), strict=True):
            assert (found.grad is None and goal.grad is None) or torch.equal(found.grad, goal.grad)
    assert len(hooked) == 2 * sum(p.requires_grad for p in module.parameters()), "once per weight and backward"


def test_the_parts_together_compute_no_more_than_the_whole():
    from torch.utils.flop_counter import FlopCounterMode

    module, flops = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), []
    x = gpt.numbers(4, 8).requires_grad_()
    y = module(x)
    with FlopCounterMode(display=False) as counter:
        split = SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])
    flops.append(counter.get_total_flops())
    with FlopCounterMode(display=False) as counter:
        split.weights()
    flops.append(counter.get_total_flops())
    assert flops == [3 * 2 * 4 * 8 * 8] * 2


def test_reentrant_checkpointing_is_refused_by_autograd():
    x = gpt.numbers(4, 8).requires_grad_()
    y = Again(reentrant=True)(x)
    with pytest.raises(RuntimeError, match=r"use_reentrant=True, .* is incompatible"):
        SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])


def test_a_paced_module_waits_for_its_weights_in_the_second_part():
    timeline, x = Timeline(), gpt.numbers(4, 8).requires_grad_()
    module = nn.Linear(8, 8)
    slow = PaddedModule(module, 0.01, 0.02, timeline, weights_s=0.03)
    y = slow(x)
    assert torch.equal(y, module(x))
    split = SplitBackward([get_gradient_edge(y)], [torch.ones(4, 8)], [x])
    assert [span.name for span in timeline.spans] == ["forward", "backward"]
    split.weights()
    assert [span.name for span in timeline.spans] == ["forward", "backward", "weight gradients"]
    assert torch.equal(module.weight.grad, torch.ones(4, 8).t() @ x)
    with pytest.raises(ValueError, match=r"weights.*gradients"):
        PaddedModule(nn.ReLU(), weights_s=0.1)
    with pytest.raises(ValueError, match=r"padded.*0.*-1"):
        PaddedModule(nn.ReLU(), weights_s=-1)
