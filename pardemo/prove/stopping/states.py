"""Optimizers' states of two runs beside each other: the same, zero, another step's, rounded, or others."""

from collections.abc import Callable, Iterable, Sequence

import torch

from pardemo.prove.proof import alike
from pardemo.prove.record.facts import Tensors
from pardemo.prove.runner import STATE, Run
from pardemo.prove.stopping.state import SLOTS

#: Of each step by its number, all ranks' tensors of a kind; one step after the other, since together they are many.
Steps = Callable[[], Iterable[tuple[int, Sequence[Tensors]]]]


def kinds(run: Run, step: int) -> set[str]:
    """Kinds of states that any rank has in a step."""
    return {
        key.split("/", 1)[0]
        for rank in range(run.layout.ranks)
        for key in run.keys(step, rank)
        if key.startswith(STATE)
    }


def compared(
    kind: str, theirs: Sequence[Tensors], ours: Sequence[Tensors], steps: Steps, begins: int, tolerance: float
) -> tuple[bool, dict[str, list[str]]]:
    """Whether a state is equal to the last bit, and sentences about what is not equal, with the parameters.

    Args:
        theirs, ours: by rank, of the undisturbed and the resumed run. steps: the undisturbed run's in each step, one
            after the other; read where something is not equal.
    """
    what = SLOTS.get(kind.removeprefix(STATE), f"the optimizer's {kind.removeprefix(STATE)}")
    exact, told = True, dict[str, list[str]]()
    for rank, (wanted, own) in enumerate(zip(theirs, ours, strict=True)):
        for name, tensor in wanted.items():
            value = own.get(name)
            if value is not None and value.shape == tensor.shape and torch.equal(value, tensor):
                continue
            exact = False
            if value is not None and alike(value, tensor, tolerance):
                continue
            if value is None and not bool(tensor.any()):
                continue
            why = _why(what, name, tensor, value, rank, steps, begins)
            names = told.setdefault(why, [])
            if name not in names:
                names.append(name)
    return exact, told


def _why(
    what: str, name: str, wanted: torch.Tensor, own: torch.Tensor | None, rank: int, steps: Steps, begins: int
) -> str:
    if own is None or not bool(own.any()):
        return f"{what} starts at zero"
    for step, of_ranks in steps():
        tensors = of_ranks[rank]
        if step != begins and name in tensors and tensors[name].shape == own.shape and torch.equal(tensors[name], own):
            return f"{what} is the one before step {step + 1}"
    if wanted.dim() == 0 and own.dim() == 0:
        return f"{what} is {float(own):g} in place of {float(wanted):g}"
    if rounded(wanted, own):
        return f"{what} comes back rounded to bf16"
    if own.numel() == wanted.numel() and torch.equal(own.reshape(-1).sort().values, wanted.reshape(-1).sort().values):
        return f"{what} has its numbers in other places"
    return f"{what} is another one"


def rounded(wanted: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether one is the other in bf16."""
    return wanted.is_floating_point() and wanted.shape == own.shape and torch.equal(
        wanted.to(torch.bfloat16).to(own.dtype), own
    )  # fmt: skip
