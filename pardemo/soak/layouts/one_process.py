"""A case trained in one process: what ranks are held against, and what both have alike."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pardemo.soak.layouts import models
from pardemo.soak.layouts.case import Case
from pardemo.soak.layouts.comparison import gradients_as_model


@dataclass
class Reference:
    """A model after all steps, and as the optimizer has it (in fp32, for ZeRO); one whose values are the gradients of
    the first step; the loss of each step; the average of the model over the steps."""

    model: nn.Sequential
    masters: nn.Sequential
    first_gradients: nn.Sequential
    losses: list[float]
    average: nn.Sequential | None


def one_process(case: Case) -> Reference:
    """The steps on the whole batch, without a group. For ZeRO the optimizer has copies in fp32, as the engines do."""
    model = models.plain(case)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: nn.Parameter(p.detach().float()) if case.is_zero else p for name, p in named.items()}
    optimizer = optimizer_of(case, masters)
    losses: list[float] = []
    first: nn.Sequential | None = None
    average = averaged(case, model)
    for step in range(case.steps):
        losses.append(sum(_backward_alone(case, model, step, micro) for micro in range(case.accumulation)))
        if case.zero_for_none:
            for p in named.values():
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        first = first or gradients_as_model(model)
        if case.is_zero:
            for name, p in named.items():
                assert p.grad is not None, "an engine gives a zero"
                masters[name].grad, p.grad = p.grad.float(), None
        if case.clip is not None:
            nn.utils.clip_grad_norm_(masters.values(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in named.items():
                p.copy_(masters[name])
        if average is not None:
            average.update_parameters(model)
    assert first is not None, "a case has a step"
    kept = None if average is None else average.module
    assert kept is None or isinstance(kept, nn.Sequential)
    return Reference(model, _in_fp32(model, masters) if case.is_zero else model, first, losses, kept)


def _in_fp32(model: nn.Sequential, masters: dict[str, nn.Parameter]) -> nn.Sequential:
    """A copy with the optimizer's values; those that are not trained are the model's."""
    copied = copy.deepcopy(model).float()
    with torch.no_grad():
        for name, p in copied.named_parameters():
            if name in masters:
                p.copy_(masters[name])
    return copied


def _backward_alone(case: Case, model: nn.Sequential, step: int, micro: int) -> float:
    parts = models.batch(case, step, micro)
    if not case.sometimes:  # one batch, as it is without ranks
        tokens, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        parts = [(tokens, targets)]
    total, samples = 0.0, sum(case.samples)
    for rank, (tokens, targets) in enumerate(parts):
        models.switch(model, on=uses_sometimes(step, micro, rank))
        loss = models.loss_of(model(tokens), targets) * (len(tokens) / samples / case.accumulation)
        loss.backward()
        total += loss.item()
    return total


def uses_sometimes(step: int, micro: int, rank: int) -> bool:
    """Whether a rank uses the layer that is there for some."""
    return (step + micro + rank) % 2 == 0


def optimizer_of(case: Case, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Over parameters by name; in two groups, matrices and the rest, where the case has groups."""
    groups: Iterable = named.values()
    if case.param_groups:
        groups = in_two_groups(named.values())
    return make_optimizer(case)(groups)


def in_two_groups(parameters: Iterable[nn.Parameter]) -> list[dict]:
    parameters = list(parameters)
    few, many = ([p for p in parameters if (p.dim() > 1) is matrix] for matrix in (False, True))
    return [group for group in ({"params": many, "weight_decay": 0.2}, {"params": few, "lr": 0.01}) if group["params"]]


def make_optimizer(case: Case):
    if case.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.03, momentum=0.9, weight_decay=0.01)
    # An eps above the rounding of gradients: where they are zero but for that, Adam's step would be rounding too.
    return partial(torch.optim.AdamW, lr=0.02, eps=1e-2, weight_decay=0.1)


def averaged(case: Case, model: nn.Module) -> AveragedModel | None:
    """torch's average of weights, which begins with a deepcopy."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if case.averaged else None
