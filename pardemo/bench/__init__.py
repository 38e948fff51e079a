"""The speed table: every figure a ratio, ours against a peer, measured side by side in one run.

``ratio`` is the peer's median over ours, so above 1 means faster (or smaller) than the peer; ``spread`` is the
middle half of the ratios of neighbouring runs. Runs alternate, so that a drift of the machine meets both. The table
that is committed is made of several such tables, of different days: :mod:`pardemo.bench.runs`.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from statistics import median, quantiles

from pardemo.tables import text_table

#: name -> module of this package with a ``rows()`` function
BENCHES = {
    "import": "importing",
    "launch": "launch",
    "ring": "ring",
    "cluster": "cluster",
    "data-parallel": "data_parallel",
    "pipeline": "pipeline",
    "tensor-parallel": "tensor_parallel",
    "context-parallel": "context_parallel",
    "expert-parallel": "expert_parallel",
    "muon": "muon",
    "low-precision": "low_precision",
    "zero": "zero",
    "finetune": "finetune",
    "predict": "predict",
    "loss-head": "loss_head",
    "plan": "plan",
    "pytest": "pytest_plugin",
    "measure": "measure",
    "growth": "growth",
}


@dataclass(frozen=True)
class BenchRow:
    """One line of the table; ``target`` is the least ratio asked for, None where a row only informs.

    Where ``within`` is given, the ratio is to be no further than that from ``target``, above or below.
    """

    name: str
    ours: float
    peer: float
    unit: str
    ratio: float
    spread: tuple[float, float]
    target: float | None
    met: bool | None
    note: str = ""
    within: float | None = None


def slowest(results: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of every rank's seconds in each round, by name: those of the round's slowest rank, for whom the others wait."""
    return {
        name: [max(times) for times in zip(*(of_rank[name] for of_rank in results), strict=True)] for name in results[0]
    }


def by_turns(ways: Mapping[str, Callable[[], object]], rounds: int, warm: int) -> dict[str, list[float]]:
    """On every rank, which begin together: seconds of each way in each round, after ``warm`` that do not count."""
    import torch.distributed as dist

    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + warm):
        for name, way in ways.items():
            dist.barrier()
            begin = time.perf_counter()
            way()
            if turn >= warm:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def compare(
    name: str,
    ours: Sequence[float],
    peer: Sequence[float],
    unit: str,
    target: float | None,
    note: str = "",
    within: float | None = None,
) -> BenchRow:
    """A row from two lists of alternating measurements (smaller is better; with ``within``, the same is)."""
    ratio = median(peer) / median(ours)
    pairs = [p / o for o, p in zip(ours, peer, strict=True)]
    low, _, high = quantiles(pairs, n=4) if len(pairs) > 1 else (pairs[0],) * 3
    met = is_met(ratio, target, within)
    return BenchRow(name, median(ours), median(peer), unit, ratio, (low, high), target, met, note, within)


def is_met(ratio: float, target: float | None, within: float | None = None) -> bool | None:
    """Whether a ratio is what is asked for: at least the target, or no further from it than ``within``. None where
    nothing is asked."""
    if target is None:
        return None
    return ratio >= target if within is None else abs(ratio - target) <= within


def run(names: Sequence[str], on_start: Callable[[str], None] = lambda name: None) -> list[BenchRow]:
    """Runs the named benches (all when none is named).

    Raises:
        ValueError: a name that does not exist.
    """
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        raise ValueError(f"no bench named {', '.join(unknown)}; there are: {', '.join(BENCHES)}")
    rows: list[BenchRow] = []
    for name in names or BENCHES:
        on_start(name)
        with contextlib.redirect_stdout(sys.stderr):  # what ranks print is not the table
            rows += import_module(f"pardemo.bench.{BENCHES[name]}").rows()
    return rows


def as_json(rows: Sequence[BenchRow]) -> list[dict]:
    return [asdict(row) for row in rows]


def as_text(rows: Sequence[BenchRow]) -> str:
    """The table for the terminal."""
    head = ("name", "ours", "peer", "unit", "ratio", "middle half", "target", "met", "peer is")
    lines = [head] + [
        (
            row.name,
            f"{row.ours:.4g}",
            f"{row.peer:.4g}",
            row.unit,
            f"{row.ratio:.2f}",
            f"{row.spread[0]:.2f} to {row.spread[1]:.2f}",
            asked(row),
            "" if row.met is None else ("yes" if row.met else "NO"),
            row.note,
        )
        for row in rows
    ]
    return text_table(lines)


def asked(row: BenchRow) -> str:
    """What is asked of a row's ratio, in the fewest signs."""
    if row.target is None:
        return ""
    return f">= {row.target:g}" if row.within is None else f"{row.target:g} ± {row.within:g}"
