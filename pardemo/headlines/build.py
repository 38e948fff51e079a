"""Builds training and test files: rows chosen by a seed, a manifest with counts and checksums, a picture of lengths."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.headlines import grammar, sources
from pardemo.headlines.rows import BadRow, as_line
from pardemo.headlines.select import Selection

GENERATED = "generated"
TRAIN = {GENERATED: 20_000, "real": 80_000}  # rows by default; the article's figure for real data
TEST = 1_000
LINES_TOLD = 20  # of each file and reason: the count is of all


@dataclass(frozen=True)
class Limits:
    """Rows outside are left out and counted; in characters. 4,000 is about what 1,024 tokens of English hold."""

    min_input: int = 20
    max_input: int = 4_000
    min_output: int = 2
    max_output: int = 200

    def fault(self, row: dict[str, str]) -> str | None:
        for name, low, high in (
            ("input", self.min_input, self.max_input),
            ("output", self.min_output, self.max_output),
        ):
            if not low <= len(row[name]) <= high:
                return f"{name} not of {low} to {high} characters"
        return None


@dataclass
class LeftOut:
    """Rows that were not taken: how many, by file and reason, and the first lines of each."""

    first_lines: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)

    def add(self, file: str, line: int, reason: str) -> None:
        self.counts[file, reason] += 1
        lines = self.first_lines.setdefault((file, reason), [])
        if len(lines) < LINES_TOLD:
            lines.append(line)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"file": file, "reason": reason, "count": self.counts[file, reason], "first_lines": lines}
            for (file, reason), lines in self.first_lines.items()
        ]


def build(
    origins: Sequence[str],
    out: str | Path | None = None,
    *,
    train: int | None = None,
    test: int = TEST,
    seed: int | None = None,
    tasks: Sequence[str] = sources.TASKS,
    wanted: Sequence[str] = sources.SOURCES,
    limits: Limits | None = None,
    on_read: Callable[[str], object] = lambda name: None,
) -> dict[str, Any]:
    """Writes ``train.json``, ``test.json``, ``manifest.json`` and ``lengths.png``, and returns the manifest.

    Args:
        origins: ``generated``, or folders and data sets of :mod:`pardemo.headlines.sources`.
        out: the folder to write to, by default ``headlines`` in the run's output folder.
        train, test: rows; no input is in both, none twice. train is 80,000 by default, 20,000 of generated ones.
        seed: chooses the rows; by default 0, of generated ones 1, because 0 made what the tiny model was pretrained
            on. The test rows do not depend on ``train``.
        tasks: what rows of csl are for; every abstract is used for one of them.
        wanted: the sources to take rows from.
        limits: lengths to keep to; only for real sources.
        on_read: called with the name of each file or data set before it is read.

    Raises:
        ValueError: more rows wanted than there are, an unknown task or source, a file that is cut off or no data;
            generated rows of the seed that the tiny model was pretrained on.
        OSError: a file or data set that cannot be read, or an output that cannot be written.
    """
    _check(origins, tasks, wanted)
    generated = list(origins) == [GENERATED]
    train = TRAIN[GENERATED if generated else "real"] if train is None else train
    seed = (grammar.PRETRAINED + 1 if generated else 0) if seed is None else seed
    if generated and seed == grammar.PRETRAINED:
        raise ValueError(f"seed {seed} made the news that the tiny model was pretrained on: take another")
    if train < 1 or test < 1:
        raise ValueError(f"at least one row each is needed for training and test, not {train} and {test}")
    out = Path(out) if out is not None else project.output_dir() / "headlines"
    manifest: dict[str, Any] = {"from": list(origins), "train": train, "test": test, "seed": seed}
    if generated:
        train_rows, test_rows = grammar.corpus(train, test, seed)
        chosen = {"train": [as_line(row) for row in train_rows], "test": [as_line(row) for row in test_rows]}
    else:
        limits = limits or Limits()
        tasks = [task for task in sources.TASKS if task in tasks]  # the order given is no matter
        manifest |= {"tasks": tasks, "sources": list(wanted), "limits": asdict(limits), "inputs": []}
        choice = _Choice(Selection(train + test, seed), tasks, limits)
        for item in sources.find(origins, wanted):
            on_read(item.name)
            manifest["inputs"].append(choice.offer(item))
        lines, duplicates = choice.selection.rows(), choice.selection.duplicates
        if len(lines) < train + test:
            raise ValueError(
                f"{train + test} rows are wanted, but there are {len(lines)} distinct ones"
                f" ({choice.left_out.counts.total()} rows left out, {duplicates} duplicates)"
            )
        manifest |= {"left_out": choice.left_out.rows(), "duplicates_of_chosen": duplicates}
        chosen = {"train": lines[test:], "test": lines[:test]}
    return _written(out, chosen, manifest)


def _check(origins: Sequence[str], tasks: Sequence[str], wanted: Sequence[str]) -> None:
    if not origins:
        raise ValueError(
            f"name where the rows come from: {GENERATED}, a folder, or one of {', '.join(sources.DATASETS)}"
        )
    if GENERATED in origins and len(origins) > 1:
        raise ValueError(f"{GENERATED} rows are not mixed with others: build them apart")
    for kind, names, choices in (("task", tasks, sources.TASKS), ("source", wanted, sources.SOURCES)):
        unknown = [name for name in names if name not in choices]
        if unknown or not names:
            raise ValueError(f"no {kind} named {', '.join(unknown) or 'at all'}; there are: {', '.join(choices)}")


@dataclass
class _Choice:
    """Offers the rows of several inputs to a selection, and counts those that are left out."""

    selection: Selection
    tasks: Sequence[str]
    limits: Limits
    left_out: LeftOut = field(default_factory=LeftOut)

    def offer(self, item: sources.FileInput | sources.HubInput) -> dict[str, Any]:
        """Offers every row of an input; returns its entry of the manifest. ``rows`` counts all, good and bad."""
        count = 0
        for line, value, reason in item.records():
            count += 1
            try:
                self.selection.offer(self._row(item.source, value, reason))
            except BadRow as bad:
                self.left_out.add(item.name, line, str(bad))
        return {"name": item.name, "source": item.source, "rows": count, "sha256": item.sha256()}

    def _row(self, source: str, value: Any, reason: str | None) -> dict[str, str]:
        if reason is None:
            row = sources.convert(value, source, self._task_of)
            reason = self.limits.fault(row)
        if reason is not None:
            raise BadRow(reason)
        return row

    def _task_of(self, text: str) -> str:
        return self.tasks[self.selection.hash_of(text) % len(self.tasks)]  # low bits: the choice goes by the high ones


def _written(out: Path, chosen: dict[str, list[bytes]], manifest: dict[str, Any]) -> dict[str, Any]:
    from pardemo.headlines.picture import lengths

    (out / "manifest.json").unlink(missing_ok=True)  # a folder without one is not whole
    manifest["files"] = {}
    for name, lines in chosen.items():
        content = b"[\n" + b",\n".join(lines) + b"\n]\n"  # one row a line, so that rows have line numbers
        project.write_atomically(out / f"{name}.json", lambda path, content=content: path.write_bytes(content))
        manifest["files"][f"{name}.json"] = {
            "rows": len(lines),
            "by_source": _counts(lines),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    lengths(chosen, out / "lengths.png")
    project.write_json(out / "manifest.json", manifest)
    return manifest


def _counts(lines: Iterable[bytes]) -> dict[str, int]:
    """Rows by source and task, most first."""
    counts = Counter(json.loads(line)["source"] for line in lines)
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
