"""Compares versions of a script, gradients of ranks with one process's, and losses with one another."""

from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pardemo.prove import Proof

#: Relative to a gradient of fp64: what rounding leaves of it is less, and what any bug changes is more.
TOLERATED = 1e-9
_LOCAL = (
    "        dist.all_reduce(count, group=data)\n",
    "        add_up(list(model.parameters()), data)\n",
    "        yield printed.item(), model\n",
    '        norms = [p for name, p in model.named_parameters() if "norm" in name]\n',
)
_AVERAGE = "        for p in model.parameters():\n            p.grad /= data.size()\n"


def versions(script: str) -> dict[str, str]:
    """The four versions of the page's script by their days; Wednesday's is the script as it is.

    Raises:
        ValueError: the script has no such lines as the versions change.
    """
    for line in _LOCAL:
        if script.count(line) != 1:
            raise ValueError(f"the script has no line {line.strip()!r}, or several: run the cell that writes it again")
    counted, summed, printed, named = _LOCAL
    averaged = script.replace(summed, summed + _AVERAGE)
    return {
        "monday": averaged,
        "tuesday": averaged.replace(counted, "").replace(printed, printed.replace("()", "() / data.size()")),
        "wednesday": script,
        "thursday": script.replace(named, named.replace('"norm" in name', 'name.startswith("norm")')),
    }


def off(ours: torch.Tensor, right: torch.Tensor) -> float:
    """‖ours − right‖ / ‖right‖."""
    return ((ours - right).norm() / right.norm()).item()


def disagreement(ranks: Sequence[Mapping[str, torch.Tensor]], t: int, right: Mapping[str, torch.Tensor]) -> float:
    """The largest difference between gradients of ranks that hold the same: replicas, and what is whole on each rank.

    Args:
        ranks: of each rank its gradients by parameter. t: ranks that share a model, which lie side by side.
    """
    largest = 0.0
    for name, like in right.items():
        for rank, gradients in enumerate(ranks):
            same = ranks[0 if gradients[name].shape == like.shape else rank % t][name]
            largest = max(largest, off(gradients[name], same))
    return largest


def wrong(factor: float, rest: float) -> bool:
    """Whether a gradient of this factor and this rest is another one than the right one."""
    return abs(factor - 1) > TOLERATED or rest > TOLERATED


def alike(compared: Mapping[str, tuple[float, float]]) -> list[dict[str, str]]:
    """A row for all parameters with one factor and no rest, and one for those with a rest, in the model's order.

    Args:
        compared: parameter -> its factor and rest.
    """
    groups: dict[str, list[str]] = {}
    for name, (factor, rest) in compared.items():
        groups.setdefault("rest" if rest > TOLERATED else f"{factor:.6g}", []).append(name)
    rows = []
    for names in groups.values():
        factors, rests = zip(*(compared[name] for name in names), strict=True)
        shown = ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"
        rows.append(
            {
                "parameters": len(names),
                "from … to": shown,
                "factor": _range(factors),
                "rest": _range(rests) if max(rests) > TOLERATED else f"0 ({max(rests):.0e})",
            }
        )
    return rows


def _range(values: Sequence[float]) -> str:
    ends = [f"{value:.2g}" for value in (min(values), max(values))]
    same = max(values) - min(values) <= TOLERATED
    return f"{values[0]:.4g}" if same else ends[0] if ends[0] == ends[1] else " to ".join(ends)


def gaps(curves: Mapping[str, Sequence[float]], right: str) -> dict[str, float]:
    """Returns how far each version's losses are from the right one's: the mean of the steps' differences, without
    signs."""
    return {
        version: sum(abs(a - b) for a, b in zip(losses, curves[right], strict=True)) / len(losses)
        for version, losses in curves.items()
        if version != right
    }


def between_steps(losses: Sequence[float]) -> float:
    """Returns how far a curve's loss is from the next step's: the mean over the later half, in which it falls
    slowly."""
    later = losses[len(losses) // 2 :]
    return sum(abs(a - b) for a, b in pairwise(later)) / (len(later) - 1)


def suspect(name: str) -> str:
    """The script of an exercise.

    Raises:
        ValueError: no exercise of that name.
    """
    folder = resources.files(__package__) / "suspects"  # texts, or whoever imports the package's modules would run them
    names = sorted(file.name.removesuffix(".txt") for file in folder.iterdir())
    if name not in names:
        raise ValueError(f"no script {name!r}; there are: {', '.join(names)}")
    return (folder / f"{name}.txt").read_text(encoding="utf-8")


def verdicts_of(proofs: Mapping[str, "Proof"]) -> list[dict[str, str]]:
    """A row for each framework: how it ran, in which type, and what was said of it."""
    return [
        {
            "framework": name,
            "layout": " ".join(word for word in proof.layouts[1].name.split() if not word.startswith("engine=")),
            "in": "fp64" if proof.tolerance < 1e-6 else "fp32",
            "steps": str(proof.steps),
            "trains as one process": "yes" if proof.equal else "no",
        }
        for name, proof in proofs.items()
    ]
