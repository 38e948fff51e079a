"""Builds training and test files: rows chosen by a seed, a manifest with counts and checksums, a picture of lengths."""

import hashlib
import heapq
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.headlines import grammar, sources
from pardemo.headlines.rows import BadRow, as_line, key_of

GENERATED = "generated"
TRAIN = {GENERATED: 20_000, "real": 80_000}  # rows by default; the article's figure for real data
TEST = 1_000
LINES_LISTED = 20  # of each file and reason: the count is of all


@dataclass(frozen=True)
class Limits:
    """Rows outside are left out and counted; in characters. 4,000 is about what 1,024 tokens of English hold."""

    min_input: int = 20
    max_input: int = 4_000
    min_output: int = 2
    max_output: int = 200

    def check(self, row: dict[str, str]) -> None:
        """Raises BadRow."""
        for name in ("input", "output"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if not low <= len(row[name]) <= high:
                raise BadRow(f"{name} not of {low} to {high} characters")


class Selection:
    """Keeps the ``size`` rows whose inputs have the smallest keyed hashes: those a seed chooses, whatever the order.

    Equal inputs (see :func:`pardemo.headlines.rows.key_of`) have equal hashes, so that of a duplicate only the first is
    kept, also where the first has been pushed out since. Memory: ``size`` · (the row's own bytes + about 300 B),
    however many rows are offered. The chosen rows in the order of their hashes are a shuffle, and the first of them
    are the choice for any smaller size.
    """

    def __init__(self, size: int, seed: int):
        self._size = size
        self._key = str(seed).encode()
        self._heap: list[tuple[int, bytes]] = []  # the largest hash on top: (−hash, row)
        self._held: set[int] = set()
        self.duplicates = 0

    def hash_of(self, text: str) -> int:
        """128 bits that depend on the seed and on the input's text alone."""
        return int.from_bytes(hashlib.blake2b(key_of(text), digest_size=16, key=self._key).digest())

    def offer(self, row: Mapping[str, str]) -> None:
        """Takes or leaves a row; one that is kept is held as its line of JSON."""
        value = self.hash_of(row["input"])
        if value in self._held:
            self.duplicates += 1
        elif len(self._heap) < self._size or value < -self._heap[0][0]:
            heapq.heappush(self._heap, (-value, as_line(row)))
            self._held.add(value)
            if len(self._heap) > self._size:
                self._held.remove(-heapq.heappop(self._heap)[0])

    def rows(self) -> list[bytes]:
        """The chosen rows, as lines, in the order of their hashes."""
        return [row for _, row in sorted(self._heap, reverse=True)]


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
        rows_of = dict(zip(("train", "test"), grammar.corpus(train, test, seed), strict=True))
        files = {name: [as_line(row) for row in rows] for name, rows in rows_of.items()}
    else:
        limits = limits or Limits()
        tasks = [task for task in sources.TASKS if task in tasks]  # the order given is no matter
        manifest |= {"tasks": tasks, "sources": list(wanted), "limits": asdict(limits)}
        selection = Selection(train + test, seed)
        manifest |= _select(selection, sources.find_sources(origins, wanted), tasks, limits, on_read)
        lines = selection.rows()
        if len(lines) < train + test:
            left_out = sum(entry["count"] for entry in manifest["left_out"])
            raise ValueError(f"{train + test} rows are wanted, but there are {len(lines)} distinct ones ({left_out} "
                             f"rows left out, {selection.duplicates} duplicates)")  # fmt: skip
        files = {"train": lines[test:], "test": lines[:test]}
    return _written(out, files, manifest)


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


def _select(
    selection: Selection,
    inputs: Sequence[sources.FileInput | sources.HubInput],
    tasks: Sequence[str],
    limits: Limits,
    on_read: Callable[[str], object],
) -> dict[str, Any]:
    """Offers all rows of all inputs; returns the manifest's entries of what was read and what was left out."""

    def task_of(text: str) -> str:
        return tasks[selection.hash_of(text) % len(tasks)]  # low bits: the choice goes by the high ones

    read: list[dict[str, Any]] = []
    left_out: dict[tuple[str, str], dict[str, Any]] = {}
    for item in inputs:
        on_read(item.name)
        count = 0
        for line, value, reason in item.records():
            count += 1
            try:
                if reason is not None:
                    raise BadRow(reason)
                row = sources.convert_record(value, item.source, task_of)
                limits.check(row)
                selection.offer(row)
            except BadRow as bad:
                about = {"file": item.name, "reason": str(bad), "count": 0, "first_lines": []}
                entry = left_out.setdefault((item.name, str(bad)), about)
                entry["count"] += 1
                if entry["count"] <= LINES_LISTED:
                    entry["first_lines"].append(line)
        read.append({"name": item.name, "source": item.source, "rows": count, "sha256": item.sha256()})
    return {"inputs": read, "left_out": list(left_out.values()), "duplicates_of_chosen": selection.duplicates}


def _written(out: Path, files: dict[str, list[bytes]], manifest: dict[str, Any]) -> dict[str, Any]:
    (out / "manifest.json").unlink(missing_ok=True)  # a folder without one is not whole
    manifest["files"] = {}
    for name, lines in files.items():
        content = b"[\n" + b",\n".join(lines) + b"\n]\n"  # one row a line, so that rows have line numbers
        project.write_atomically(out / f"{name}.json", partial(Path.write_bytes, data=content))
        counts = Counter(json.loads(line)["source"] for line in lines)
        manifest["files"][f"{name}.json"] = {
            "rows": len(lines),
            "by_source": dict(sorted(counts.items(), key=lambda item: (-item[1], item[0]))),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    draw_lengths(files, out / "lengths.png")
    project.write_json(out / "manifest.json", manifest)
    return manifest


def draw_lengths(files: Mapping[str, Sequence[bytes]], path: Path) -> None:
    """Draws how long bodies and headlines are, of each file one line.

    Args:
        files: name -> its rows, each a line of JSON.
    """
    import numpy as np

    from pardemo.draw import style

    fig, axes = style.new(1, 2, size=(9.0, 3.2))
    medians = []
    for ax, field in zip(axes, ("input", "output"), strict=True):
        lengths_of = {name: [len(json.loads(line)[field]) for line in lines] for name, lines in files.items()}
        top = max(map(max, lengths_of.values()))
        edges = np.arange(0, top + 2, max(1, top // 40))
        for (name, lengths), dashes in zip(lengths_of.items(), ("-", "--"), strict=True):
            share = np.histogram(lengths, np.append(edges, edges[-1] + 1))[0] / len(lengths) * 100
            ax.step(edges, share, where="post", linestyle=dashes, color="black", label=f"{name} ({len(lengths):,})")
            medians.append(f"{name} {field} {np.median(lengths):g}")
        ax.set(xlabel=f"{field}, characters", ylabel="rows, %")
        ax.legend()
    style.write(fig, path, f"Histograms of the lengths in characters; medians: {', '.join(medians)}.")
