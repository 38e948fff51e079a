"""Reads the files of a job, and recognises their kinds by their content, not by their names."""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pardemo.meters.event_stream import GZIP, EventStream
from pardemo.script.job_files import flight_recorder, memory_snapshot, profiler_trace, training_log
from pardemo.script.job_files.plain_pickle import read_plain
from pardemo.script.job_files.records import JobRankRecord, JobRecords, rank_in_name

#: How the pickles of torch begin: protocol 2 to 5.
_PICKLES = tuple(bytes([0x80, version]) for version in range(2, 6))
KINDS = "a flight recorder dump, a trace of torch's profiler, a memory snapshot, or a log of torchtitan or Megatron-LM"


def read_job(paths: Sequence[str]) -> JobRecords:
    """Reads files, and all files of folders; a file that cannot be read gets a line in ``refused``.

    Raises:
        ValueError: there is no such file.
    """
    job = JobRecords()
    for path in _files(paths):
        try:
            _read(path, job)
        except (ValueError, OSError) as error:
            text = " ".join(str(error).split())
            job.refused.append(text if path.name in text else f"{path.name}: {text}")
    _name_groups(job.recorders)
    return job


def _name_groups(dumps: Mapping[int, JobRankRecord]) -> None:
    """Fills in the ranks of groups that no dump lists, as gloo's: those whose dumps have calls of the group."""
    users: dict[str, set[int]] = defaultdict(set)
    everyone = tuple(range(1 + max(dumps, default=0)))
    for rank, record in dumps.items():
        for call in record.calls:
            users[call.group].add(rank)
    for record in dumps.values():
        for call in record.calls:
            if not call.ranks:
                default = call.group == flight_recorder.DEFAULT
                call.ranks = everyone if default else tuple(sorted(users[call.group]))


def _files(paths: Sequence[str]) -> Iterator[Path]:
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(f"there is no file {path}")
        yield from sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else [path]


def _read(path: Path, job: JobRecords) -> None:
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(_PICKLES):
        _read_pickle(path, job)
    elif head.startswith(GZIP) or head.lstrip()[:1] == b"{":  # torch compresses traces alone
        _read_json(path, job)
    elif steps := training_log.steps_of(_lines(path)):
        job.steps += steps
    else:
        raise ValueError(f"it is not {KINDS}")


def _read_pickle(path: Path, job: JobRecords) -> None:
    values = read_plain(path)
    if isinstance(values, dict) and "entries" in values and "version" in values:
        _add_dump(path, values["entries"], values, job)
    elif isinstance(values, dict) and {"segments", "device_traces"} <= values.keys():
        memory = memory_snapshot.memory_of(rank_in_name(path), values)
        _add(job.memory, memory.rank, memory)
    else:
        raise ValueError(f"it is a pickle, and not {KINDS}")


def _read_json(path: Path, job: JobRecords) -> None:
    stream = EventStream(path, ("traceEvents", "entries"))
    items = iter(stream)
    first = list(itertools.islice(items, 1))
    if stream.list == "entries":
        _add_dump(path, list(itertools.chain(first, items)), stream.fields, job)
    elif stream.list:
        try:
            rank = rank_in_name(path)
        except ValueError:
            rank = None
        records = profiler_trace.records_of(itertools.chain(first, items), stream.fields, rank)
        if not records:
            raise ValueError("a trace without an event")
        for record in records:
            _add(job.traces, record.rank, record)
    else:
        raise ValueError(f"it is JSON, and not {KINDS}")


def _add_dump(path: Path, entries: Iterable[Any], fields: Any, job: JobRecords) -> None:
    record = flight_recorder.record_of(rank_in_name(path), entries, fields.get("pg_config"))
    _add(job.recorders, record.rank, record)


def _add(records: dict[int, Any], rank: int, record: Any) -> None:
    if rank in records:
        raise ValueError(f"a file of this kind of rank {rank} was read before it")
    records[rank] = record


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(1 << 20):
            yield line
