"""Reads a CSV file of training runs, a row each: its job, its layout, and the seconds and peak bytes that it took."""

import csv
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pardemo.planner import hardware, profile
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check_layout, recomputation
from pardemo.planner.layouts.machines import Link
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.profile import GpuProfile

Value = TypeVar("Value")
TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Cells:
    """The cells of a row.

    Each method raises ValueError for a wrong cell: one line that names the column and what would be right.
    """

    def __init__(self, row: Mapping[str, str | None], left_out: Mapping[str, str] | None = None):
        """``left_out``: by column, what an empty or missing cell stands for; "" by default."""
        self._row, self._left_out = row, left_out or {}

    def has(self, name: str) -> bool:
        """Returns whether the row itself has a value in that column."""
        return bool((self._row.get(name) or "").strip())

    def text(self, name: str) -> str:
        return (self._row.get(name) or "").strip() or self._left_out.get(name, "")

    def integer(self, name: str, least: int = 1) -> int:
        try:
            value = int(self.text(name))
        except ValueError:
            value = None
        if value is None or value < least:
            raise ValueError(f"{self._problem(name)}; right would be a whole number of at least {least}")
        return value

    def number(self, name: str, least: float | None = None) -> float:
        """Returns a number above 0, or of at least ``least``."""
        try:
            value = float(self.text(name))
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            right = "above 0" if least is None else f"of at least {least:g}"
            raise ValueError(f"{self._problem(name)}; right would be a number {right}")
        return value

    def one_of(self, name: str, meanings: Mapping[str, Value]) -> Value:
        """Returns the meaning of the cell's word; capitals do not matter."""
        words = {word.lower(): value for word, value in meanings.items()}
        if (word := self.text(name).lower()) not in words:
            raise ValueError(f"{self._problem(name)}; right would be {', '.join(meanings)}")
        return words[word]

    def _problem(self, name: str) -> str:
        return f"{name} is {self.text(name)!r}" if self.text(name) else f"{name} is empty"


def rows(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    """Reads a file's columns, and its rows, each with the number of its line.

    Raises:
        ValueError: the file is not UTF-8 text.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no UTF-8 text; a CSV with a run in each row is asked for") from None
    header = list(reader.fieldnames or [])
    return header, ((reader.line_num, row) for row in reader)


#: Columns that every row needs, with what they say.
NEEDED = {
    "gpu": "A100-80GB, H100, … or a profile.json", "gpus": "in all", "sequence": "tokens of a sample",
    "micro_batch": "samples of one", "accumulation": "micro-batches of a step",
}  # fmt: skip
#: Columns with what is taken where they are left out or empty. A model is ``model``, a name, folder or config.json, or
#: its sizes. ``between`` is Gbit/s of a host's adapters together. Of ``seconds`` and ``tokens_per_s`` (of one GPU) one
#: is needed where the outcome is ok.
OPTIONAL = {
    "model": "", "layers": "", "hidden": "", "heads": "", "groups": "", "middle": "", "vocabulary": "", "gated": "1",
    "tied": "0", "host_gpus": "8", "between": "400", "tp": "1", "cp": "1", "dp": "", "pp": "1", "ep": "1",
    "etp": "1", "context": "ring", "offload": "0", "graphs": "", "dispatch": "", "dropless": "1", "imbalance": "1",
    "mtp": "0",
    "sharding": "none", "shard_group": "0", "sequence_parallel": "0", "chunks": "1", "recompute": "none",
    "fused": "1", "precision": "bf16", "program": "megatron-core", "seconds": "", "tokens_per_s": "", "peak_gb": "",
    "outcome": "ok", "source": "",
}  # fmt: skip
OUTCOMES = {"ok": "ok", "oom": "oom", "failed": "failed"}


@dataclass(frozen=True)
class PublishedRun:
    """A training run as it was published: job, layout, and what came of it.

    Args:
        seconds: of a step; peak_bytes: of a GPU; None where not known.
        outcome: ok, oom, or failed, which may have any reason.
        wrong: why the row cannot be true as it stands, "" where it can.
    """

    job: Job
    layout: Layout
    seconds: float | None
    peak_bytes: float | None
    outcome: str = "ok"
    source: str = ""
    wrong: str = ""

    @property
    def publisher(self) -> str:
        """Who published it: what stands before the comma in ``source``."""
        return self.source.split(",")[0]


def read(path: Path, measured: GpuProfile | None = None, left_out: list[str] | None = None) -> list[PublishedRun]:
    """Reads the runs of a file that has the columns above.

    Args:
        measured: takes the place of the GPU that has its name.
        left_out: gets a line for each row that is impossible, whose other rows are then read all the same.

    Raises:
        ValueError: a column is missing; or a row is impossible, whose line is named, and there is no ``left_out``, or
            every row is.
    """
    header, lines = rows(path)
    known = set(header)
    if missing := [name for name in NEEDED if name not in known]:
        columns = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
        raise ValueError(f"{path.name} has no column {columns}; docs/plan.md lists all")
    if "model" not in known and not {"layers", "hidden", "heads", "vocabulary"} <= known:
        raise ValueError(f"{path.name} says no model: a column model, or layers, hidden, heads, middle and vocabulary")
    if not {"seconds", "tokens_per_s"} & known:
        raise ValueError(f"{path.name} says no speed: a column seconds (of a step) or tokens_per_s (of one GPU)")
    if unknown := [name for name in header if name and name not in NEEDED | OPTIONAL]:
        raise ValueError(f"{path.name}: no such column: {', '.join(unknown)}; docs/plan.md lists all")
    return read_each(path, lines, lambda row: [run(row, measured, path.parent)], left_out)


def read_each(
    path: Path,
    lines: Iterable[tuple[int, dict[str, str]]],
    runs_of: Callable[[dict[str, str]], Iterable[PublishedRun]],
    left_out: list[str] | None,
) -> list[PublishedRun]:
    """Reads the runs of all rows; what ``left_out`` is, and what is raised: :func:`read`."""
    published: list[PublishedRun] = []
    problems = [] if left_out is None else left_out
    for number, row in lines:
        try:
            published += runs_of(row)
        except ValueError as error:
            problems.append(f"{path.name}, line {number}: {error}")
            if left_out is None:
                raise ValueError(problems[-1]) from None
    if not published:
        raise ValueError(problems[-1] if problems else f"{path.name} has no rows")
    return published


def run(row: Mapping[str, str], measured: GpuProfile | None = None, folder: Path = Path()) -> PublishedRun:
    """Reads the run of one row; paths in it start from ``folder``.

    Raises:
        ValueError: a value is wrong, or the layout cannot be run.
    """
    value = Cells(row, OPTIONAL)
    gpus = value.integer("gpus")
    gpu = _gpu(value.text("gpu"), gpus, measured, folder)
    of_a_host = value.integer("host_gpus") if value.has("host_gpus") else gpu.host_gpus or hardware.host_gpus(gpu.gpu)
    link = None if value.has("between") else gpu.measured_link
    link = link or Link("between", value.number("between") * 1e9 / 8)
    machine = gpu.on_hosts(gpus, min(gpus, of_a_host), link)
    counts = {
        name: value.integer(name) for name in ("tp", "cp", "pp", "ep", "etp", "micro_batch", "accumulation", "chunks")
    } | {"shard_group": value.integer("shard_group", 0), "offloaded_layers": value.integer("offload", 0)}  # fmt: skip
    others = counts["tp"] * counts["cp"] * counts["pp"]
    layout = Layout(
        **counts,  # type: ignore[arg-type]
        dp=value.integer("dp") if value.has("dp") else max(1, gpus // others), sharding=value.text("sharding"),
        context=value.text("context"),
        sequence_parallel=value.one_of("sequence_parallel", TRUTH), **recomputation(value.text("recompute")),
    )  # fmt: skip
    shape, sequence = _shape(value), value.integer("sequence")
    if mtp := value.integer("mtp", 0):
        shape = replace(shape, mtp_layers=mtp)
    program = find_program(value.text("program"))
    check_layout(layout, shape, gpus, sequence, program.embedding_and_loss_as_layers)
    job = Job(
        shape, machine, program, sequence, value.one_of("fused", TRUTH),
        hardware.precision(value.text("precision")),
        graphs=value.one_of("graphs", TRUTH) if value.has("graphs") else None, dispatch=value.text("dispatch"),
        dropless=value.one_of("dropless", TRUTH), imbalance=value.number("imbalance"),
    )  # fmt: skip
    outcome = value.one_of("outcome", OUTCOMES)
    peak = value.number("peak_gb") * 1e9 if value.has("peak_gb") else None
    return PublishedRun(job, layout, _seconds(value, layout, sequence, outcome), peak, outcome, value.text("source"))


def _seconds(value: Cells, layout: Layout, sequence: int, outcome: str) -> float | None:
    """Seconds of a step; a run that was not ok may have none, or 0."""
    seconds = value.number("seconds", 0) if value.has("seconds") else None
    if seconds is None and value.has("tokens_per_s"):
        tokens = value.number("tokens_per_s", 0)
        seconds = tokens and layout.batch * sequence / tokens / layout.gpus
    if outcome == "ok" and not seconds:
        raise ValueError("outcome ok without seconds or tokens_per_s above 0")
    return seconds or None


def _gpu(name: str, gpus: int, measured: GpuProfile | None, folder: Path) -> GpuProfile:
    """Finds a GPU by its name, as the own profile's, or by a profile's file, seen from the folder of the runs."""
    if measured is not None and name == measured.gpu.name:
        return measured
    return profile.find_profile(str(folder / name) if profile.is_file(str(folder / name)) else name, gpus)


def _shape(value: Cells) -> Shape:
    if value.has("model") and not value.has("layers"):
        from pardemo.planner.layouts import configurations

        return configurations.shape_of_config(configurations.find_configuration(value.text("model")))
    for name in ("layers", "hidden", "heads", "vocabulary"):
        if not value.has(name):
            raise ValueError(f"neither a model nor its {name}")
    hidden, heads = value.integer("hidden"), value.integer("heads")
    return Shape(
        value.integer("layers"), hidden, heads, value.integer("groups") if value.has("groups") else heads,
        value.integer("middle") if value.has("middle") else 4 * hidden, value.integer("vocabulary"),
        value.one_of("gated", TRUTH), value.one_of("tied", TRUTH), name=value.text("model"),
    )  # fmt: skip
