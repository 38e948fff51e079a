"""Runs whose outcome is known, one in each row of a CSV file: a published table's, or your own."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pardemo.planner import profile
from pardemo.planner.layouts import machines
from pardemo.planner.layouts import shape as shapes
from pardemo.planner.layouts.layout import Layout, check
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.stacks import stack
from pardemo.planner.layouts.work import Job
from pardemo.planner.profile import Profile

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
    "sharding": "none", "shard_group": "0", "sequence_parallel": "0", "chunks": "1", "recompute": "none",
    "fused": "1", "precision": "bf16", "program": "megatron-core", "seconds": "", "tokens_per_s": "", "peak_gb": "",
    "outcome": "ok", "source": "",
}  # fmt: skip
_YES = {"1", "true", "yes", "on"}


@dataclass(frozen=True)
class Run:
    """A run and what came of it.

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


def read(path: Path, own: Profile | None = None) -> list[Run]:
    """The rows of a file of the columns above. ``own`` takes the place of the GPU that has its name.

    Raises:
        ValueError: a column is missing, or a row is impossible; its line is named.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} is no UTF-8 text; a CSV with a run in each row is asked for") from None
    rows = csv.DictReader(io.StringIO(text))
    header = rows.fieldnames or []
    if missing := [name for name in NEEDED if name not in header]:
        told = ", ".join(f"{name} ({NEEDED[name]})" for name in missing)
        raise ValueError(f"{path.name} has no column {told}; docs/planner.md lists all")
    if "model" not in header and not {"layers", "hidden", "heads", "vocabulary"} <= set(header):
        raise ValueError(f"{path.name} says no model: a column model, or layers, hidden, heads, middle and vocabulary")
    if not {"seconds", "tokens_per_s"} & set(header):
        raise ValueError(f"{path.name} says no speed: a column seconds (of a step) or tokens_per_s (of one GPU)")
    if unknown := [name for name in header if name and name not in NEEDED and name not in OPTIONAL]:
        raise ValueError(f"{path.name}: no such column: {', '.join(unknown)}; docs/planner.md lists all")
    found = []
    for row in rows:
        try:
            found.append(run(row, own, path.parent))
        except ValueError as error:
            raise ValueError(f"{path.name}, line {rows.line_num}: {error}") from None
    if not found:
        raise ValueError(f"{path.name} has no rows")
    return found


def run(row: Mapping[str, str], own: Profile | None = None, folder: Path = Path()) -> Run:
    """One row, in a file of that folder.

    Raises:
        ValueError: a value is none, or the layout cannot be run.
    """
    value = {name: (row.get(name) or "").strip() or left_out for name, left_out in OPTIONAL.items()}
    value |= {name: (row.get(name) or "").strip() for name in NEEDED}

    def number(name: str, kind: type = int):
        try:
            return kind(value[name])
        except ValueError:
            raise ValueError(f"{name} is {value[name]!r}, no number") from None

    gpus = number("gpus")
    found = _gpu(value["gpu"], gpus, own, folder)
    each = number("host_gpus") if row.get("host_gpus") or not found.host_gpus else found.host_gpus
    between = None if found.between and not row.get("between") else number("between", float) * 1e9 / 8
    machine = machines.machine(found, gpus, min(gpus, each), between)
    model_parallel = number("tp") * number("cp") * number("pp")
    layout = Layout(
        tp=number("tp"), cp=number("cp"), pp=number("pp"), ep=number("ep"),
        dp=number("dp") if value["dp"] else max(1, gpus // model_parallel), sharding=value["sharding"],
        shard_group=number("shard_group"), sequence_parallel=value["sequence_parallel"].lower() in _YES,
        micro_batch=number("micro_batch"), accumulation=number("accumulation"), chunks=number("chunks"),
        recompute=value["recompute"],
    )  # fmt: skip
    shape, sequence = _shape(value, number), number("sequence")
    check(layout, shape, gpus, sequence)
    job = Job(shape, machine, stack(value["program"]), sequence, value["fused"].lower() in _YES, _fp8(value))
    seconds = number("seconds", float) if value["seconds"] else None
    if seconds is None and value["tokens_per_s"]:
        seconds = layout.batch * sequence / number("tokens_per_s", float) / gpus
    if value["outcome"] == "ok" and not (seconds and seconds > 0):
        raise ValueError("outcome ok without seconds or tokens_per_s above 0")
    peak = number("peak_gb", float) * 1e9 if value["peak_gb"] else None
    return Run(job, layout, seconds, peak, value["outcome"], value["source"])


def _gpu(name: str, gpus: int, own: Profile | None, folder: Path) -> Profile:
    """A GPU's name, the own profile's, or a profile's file, seen from the folder of the runs."""
    if own is not None and name == own.gpu.name:
        return own
    return profile.find(str(folder / name) if profile.is_file(str(folder / name)) else name, gpus)


def _fp8(value: Mapping[str, str]) -> bool:
    if value["precision"] not in ("bf16", "fp8"):
        raise ValueError(f"precision is {value['precision']!r}; bf16 and fp8 are known")
    return value["precision"] == "fp8"


def _shape(value: Mapping[str, str], number) -> Shape:
    if value["model"] and not value["layers"]:
        from pardemo.planner import models

        return shapes.of(models.find(value["model"]))
    for name in ("layers", "hidden", "heads", "vocabulary"):
        if not value[name]:
            raise ValueError(f"neither a model nor its {name}")
    hidden, heads = number("hidden"), number("heads")
    return Shape(
        number("layers"), hidden, heads, number("groups") if value["groups"] else heads,
        number("middle") if value["middle"] else 4 * hidden, number("vocabulary"), value["gated"].lower() in _YES,
        value["tied"].lower() in _YES, name=value["model"],
    )  # fmt: skip


def write(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Rows by column name into a file that :func:`read` takes; columns that no row has are left out."""
    rows = list(rows)
    names = [name for name in (*NEEDED, *OPTIONAL) if any(name in row for row in rows)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
