"""Defines the records of a job's ranks, and reads the names that torch gives collectives, dtypes and groups."""

import functools
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pardemo.script.hangs.journal import LoggedCall

#: Ranks of the largest job: a file with a larger number in a rank's place is not torch's.
MOST_RANKS = 1 << 20
#: Parts of the names of collectives, in letters alone, and the kinds that they mean; the first that fits counts.
_KINDS = {
    "barrier": "barrier", "reducescatter": "reduce-scatter", "allreduce": "all-reduce", "allgather": "all-gather",
    "alltoall": "all-to-all", "broadcast": "broadcast", "sendrecv": "send/receive", "send": "send", "recv": "receive",
    "gather": "gather", "scatter": "scatter", "reduce": "reduce",
}  # fmt: skip
#: torch's names of dtypes in C++, in letters and digits alone, with the name in Python and the bytes of an element.
_DTYPES = {
    "float": ("float32", 4), "double": ("float64", 8), "half": ("float16", 2), "bfloat16": ("bfloat16", 2),
    "long": ("int64", 8), "longint": ("int64", 8), "int": ("int32", 4), "short": ("int16", 2),
    "byte": ("uint8", 1), "unsignedchar": ("uint8", 1), "char": ("int8", 1), "signedchar": ("int8", 1),
    "complexfloat": ("complex64", 8), "complexdouble": ("complex128", 16), "bool": ("bool", 1),
    "float8e4m3fn": ("float8_e4m3fn", 1), "float8e5m2": ("float8_e5m2", 1),
}  # fmt: skip


@dataclass
class JobCall(LoggedCall):
    """A collective or message in a job's file. ``ranks`` are empty, and ``nbytes`` −1, where the file has none.

    ``lasted_s``: its kernel's seconds; None without one. ``exposed_s``: those in which no other kernel computes.
    """

    lasted_s: float | None = None
    exposed_s: float = 0.0


@dataclass(frozen=True)
class Device:
    """A rank's GPU, and how many GPUs its node has; "" and 0 where the file does not say it."""

    name: str = ""
    memory_bytes: int = 0
    on_host: int = 0


@dataclass
class Timing:
    """The seconds that a device spent on computation and on communication.

    Args:
        computes, communicates: lengths of the unions of all kernels but nccl's, and of nccl's.
        exposed: the length of that part of the latter in which no other kernel runs.
        span: from the first kernel to the end of the last. of_none: exposed seconds of kernels without a call, by kind.
        steps: how many the trace says that it has. products: FLOPs and seconds of matrix multiplications.
        copies: bytes and seconds of copies within the device. of_device: whether these are a GPU's kernels.
    """

    computes: float
    communicates: float
    exposed: float
    span: float
    of_none: dict[str, float]
    steps: int
    products: list[tuple[float, float]]
    copies: list[tuple[float, float]]
    of_device: bool

    @property
    def overlap(self) -> float:
        """The share of the communication that runs while other kernels compute."""
        return 1 - self.exposed / self.communicates if self.communicates else 0.0


@dataclass
class JobRankRecord:
    """A rank's calls and times in a file of its job. ``world``: the job's ranks; 0 where the file does not say it."""

    rank: int
    calls: list[JobCall]
    world: int = 0
    timing: Timing | None = None
    device: Device = Device()
    host: str = ""

    def exposed_by(self) -> dict[tuple[str, str], float]:
        """Sums the seconds in which kernels communicate while none computes, by kind and line; 0 without a trace."""
        by: dict[tuple[str, str], float] = defaultdict(float)
        for kind, seconds in self.timing.of_none.items() if self.timing else ():
            by[kind, ""] += seconds
        for call in self.calls:
            by[call.kind, call.line] += call.exposed_s
        return dict(by)


@dataclass
class MemoryRecord:
    """A rank's memory at its peak: bytes by kind where the file has it, else by the frames that allocated them."""

    rank: int
    peak_bytes: int
    by_kind: Counter[str]
    by_frames: Counter[tuple[str, ...]]


@dataclass(frozen=True)
class LoggedStep:
    """The numbers of a step in a line of a log; None where the line does not have them."""

    step: int
    at_s: float | None = None
    step_s: float | None = None
    loss: float | None = None
    memory_bytes: float | None = None
    tflops: float | None = None
    tokens_per_s: float | None = None


@dataclass
class JobRecords:
    """All records of a job's files, by rank; ``refused``: a line for each file that could not be read."""

    recorders: dict[int, JobRankRecord] = field(default_factory=dict)
    traces: dict[int, JobRankRecord] = field(default_factory=dict)
    memory: dict[int, MemoryRecord] = field(default_factory=dict)
    steps: list[LoggedStep] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def collective_kind(name: str) -> str:
    """Returns the kind of a collective by its name in torch or nccl, as ``all-reduce``; "" for other names."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for part, kind in _KINDS.items() if part in letters), "")


def dtype_and_size(name: str) -> tuple[str, int]:
    """Returns a dtype's name in Python and the bytes of an element; an unknown one as it is, with 0 bytes."""
    plain = re.sub("[^a-z0-9]", "", str(name).lower().removeprefix("c10::"))
    return _DTYPES.get(plain, (str(name), 0))


def ranks_of(value: Any, start: Any = None, stride: Any = None, size: Any = None) -> tuple[int, ...]:
    """Returns a group's ranks from a list, the text of a list, or else from start, stride and size."""
    if isinstance(value, str) and re.fullmatch(r"\[[\d, ]*\]", value):
        value = re.findall(r"\d+", value)
    if isinstance(value, list | tuple):
        return tuple(int(rank) for rank in value)
    return _strided(int(start), int(stride), int(size)) if stride and size and 0 < int(size) < MOST_RANKS else ()


@functools.lru_cache
def _strided(start: int, stride: int, size: int) -> tuple[int, ...]:
    return tuple(range(start, start + stride * size, stride))


def rank_in_name(path: Path) -> int:
    """Reads the rank from a file's name, behind the word or at its end: ``trace_rank_3``, ``rank3.json``, ``x7.gz``.

    Raises:
        ValueError: there is none.
    """
    number = re.search(r"rank[-_ ]?(\d+)", path.name) or re.search(r"(\d+)$", path.name.split(".")[0])
    if number and len(number[1]) < len(str(MOST_RANKS)):
        return int(number[1])
    raise ValueError(f"{path.name} does not say its rank, and its name does not end in its number, as in dump_3")
