"""Reads a rank's collectives and the use of its GPU's time from a trace of torch's profiler.

Only a few numbers are kept of an event that is no collective, so that a trace of gigabytes fits into memory. A GPU's
time is that of its kernels; a trace without kernels has the time of the CPU's operators, and of gloo's annotations.
"""

import re
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

from pardemo.meters.coverage import Coverage
from pardemo.script.job_files.records import (
    Device,
    JobCall,
    JobRankRecord,
    Timing,
    collective_kind,
    dtype_and_size,
    ranks_of,
)

#: The operator by which torch notes a collective with its sizes and its group.
_NOTED = "record_param_comms"
#: How operators are called that start a collective or wait for it: they compute nothing.
_STARTS = (_NOTED, "c10d::", "_c10d_functional::", "nccl:", "gloo:")
#: Operators that multiply matrices, and the places of the two factors among their inputs.
_PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}
_FRAME = re.compile(r"([^<>]+\.py)\((\d+)\): ")
_LIBRARIES = {"torch", "numpy", "triton", *sys.stdlib_module_names}
_SEVERAL = re.compile(r"rank (\d+)$")  # a process of a file that joins several ranks' traces
#: Parts of the names of kernels that multiply matrices.
_MULTIPLIES = re.compile("gemm|nvjet|cutlass|xmma|Cijk", re.IGNORECASE)


class _Kernel(NamedTuple):
    """A kernel, or gloo's annotation, that communicates, in µs; ``call``: the number of the operator that starts it."""

    begin: float
    end: float
    kind: str
    call: int
    elements: int
    dtype: str


def records_of(stream: Iterable[Any], fields: Mapping[str, Any], rank: int | None) -> list[JobRankRecord]:
    """Reads a trace's events and makes a record of each rank in it.

    Args:
        stream: the events. fields: the file's other fields, which are complete when the events have been read.
        rank: counts where the file does not say its rank; None: the file has to say it.

    Raises:
        ValueError: an event is none of torch's profiler; the trace does not say its rank.
    """
    ranks: dict[Any, _RankEvents] = defaultdict(_RankEvents)
    of_process: dict[Any, int] = {}
    try:
        for event in stream:
            if event.get("ph") == "X" and "dur" in event:
                ranks[of_process.get(event.get("pid"), -1)].add(event)
            elif event.get("name") == "process_name" and (several := _SEVERAL.match(str(event["args"]["name"]))):
                of_process[event.get("pid")] = int(several[1])
        if (alone := ranks.pop(-1, None)) and not ranks:
            inside = (fields.get("distributedInfo") or {}).get("rank")
            if inside is None and rank is None:
                raise ValueError("it does not say its rank, and its name does not end in its number, as in trace_3")
            ranks[int(inside or 0) if rank is None or inside is not None else rank] = alone
        return [events.record(number, fields) for number, events in sorted(ranks.items())]
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise ValueError(f"an event that torch's profiler does not write: {error!r}") from None


class _RankEvents:
    """Collects the events of a rank, with times in microseconds."""

    def __init__(self) -> None:
        # of kernels; as long as there is none, of the processor's operators and gloo's bars
        self._computes = array("d"), array("d")  # begins and ends
        self._communicates: list[_Kernel] = []
        self._noted: list[dict[str, Any]] = []
        self._starts: list[dict[str, Any]] = []
        self._frames: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
        self._flops: dict[int, float] = {}  # of an operator that multiplies
        self._of_operator: dict[int, float] = defaultdict(float)  # its kernels' time
        self._copies: list[tuple[float, float]] = []
        self._steps: set[str] = set()
        self._has_kernels = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds an event that has a begin and a duration."""
        kind, name = str(event.get("cat", "")).lower(), str(event["name"])
        begin = float(event["ts"])
        end, more = begin + max(float(event["dur"]), 0.0), event.get("args") or {}
        if kind == "kernel":
            self._kernel(name, begin, end, more)
        elif kind in ("cpu_op", "operator"):
            self._operator(name, begin, end, event, more)
        elif kind == "python_function":
            frame = _FRAME.match(name)
            if frame and frame[1].split("/")[0].removesuffix(".py") not in _LIBRARIES and "/lib/python" not in frame[1]:
                self._frames[event["tid"]].append((begin, end, f"{frame[1].rsplit('/', 1)[-1]}:{frame[2]}"))
        elif kind == "gpu_memcpy" and "DtoD" in name and more.get("bytes"):
            self._copies.append((float(more["bytes"]), (end - begin) / 1e6))
        elif name.startswith("gloo:") and kind == "user_annotation" and not self._has_kernels:
            dtype = str(next(iter(more.get("Input type") or []), ""))
            self._communicates.append(_Kernel(begin, end, collective_kind(name), -1, _elements(more), dtype))
        elif name.startswith("ProfilerStep#"):
            self._steps.add(name)

    def _kernel(self, name: str, begin: float, end: float, more: Mapping[str, Any]) -> None:
        if not self._has_kernels:
            self._has_kernels, self._computes, self._communicates = True, (array("d"), array("d")), []
        launched_by = int(more.get("External id", more.get("external id", -1)))
        if "nccl" in name.lower():
            kind = collective_kind(str(more.get("Collective name", ""))) or collective_kind(name)
            elements, dtype = int(more.get("In msg nelems", -1)), str(more.get("dtype", ""))
            self._communicates.append(_Kernel(begin, end, kind, launched_by, elements, dtype))
            return
        self._compute(begin, end)
        if launched_by in self._flops or (launched_by >= 0 and _MULTIPLIES.search(name)):  # its operator may come later
            self._of_operator[launched_by] += (end - begin) / 1e6

    def _operator(self, name: str, begin: float, end: float, event: Mapping[str, Any], more: Mapping[str, Any]) -> None:
        if name.startswith(_STARTS):
            started = {"ts": begin, "tid": event.get("tid"), "name": name, "args": more}
            if name == _NOTED and collective_kind(str(more.get("Collective name", ""))):
                self._noted.append(started)
            elif name.startswith("c10d::") and collective_kind(name):
                self._starts.append(started)
            return
        if not self._has_kernels:
            self._compute(begin, end)
        if name in _PRODUCTS and "External id" in more:
            shapes = list(more.get("Input Dims") or [])
            first, second = (shapes[at] if len(shapes) > at else [] for at in _PRODUCTS[name])
            if len(first) == len(second) > 1:
                self._flops[int(more["External id"])] = 2.0 * prod(map(int, first)) * int(second[-1])

    def _compute(self, begin: float, end: float) -> None:
        self._computes[0].append(begin)
        self._computes[1].append(end)

    def record(self, rank: int, fields: Mapping[str, Any]) -> JobRankRecord:
        """Makes the rank's record from the events that were added."""
        distributed, devices = fields.get("distributedInfo") or {}, fields.get("deviceProperties") or []
        groups = {str(group["pg_name"]): ranks_of(group["ranks"]) for group in distributed.get("pg_config") or []}
        base_s, lines = float(fields.get("baseTimeNanoseconds") or 0) / 1e9, _Lines(self._frames)
        started = sorted(self._noted or self._starts, key=lambda event: event["ts"])
        calls = [_call(event, groups, base_s, lines) for event in started]
        _count(calls)
        computing, kernels = Coverage(*self._computes), sorted(self._communicates)
        numbers = [int(event["args"].get("External id", -1)) for event in started]
        of_none = _give_kernels(calls, numbers, kernels, computing)
        communicating = Coverage([kernel.begin for kernel in kernels], [kernel.end for kernel in kernels])
        there = [coverage for coverage in (computing, communicating) if coverage.total]
        timing = Timing(
            computing.total / 1e6, communicating.total / 1e6,
            (communicating.total - communicating.overlap(computing)) / 1e6,
            (max(part.end for part in there) - min(part.begin for part in there)) / 1e6 if there else 0.0,
            of_none, len(self._steps),
            [(self._flops[op], s) for op, s in self._of_operator.items() if op in self._flops and s > 0],
            [copy for copy in self._copies if copy[1] > 0], self._has_kernels,
        )  # fmt: skip
        first = devices[0] if devices else {}
        device = Device(str(first.get("name", "")), int(first.get("totalGlobalMem", 0)), len(devices))
        world = int(distributed.get("world_size") or 0)
        return JobRankRecord(rank, calls, world, timing, device, str(fields.get("host_name", "")))


class _Lines:
    """Finds which line of the training script was running at a time: the first line of the innermost function."""

    def __init__(self, frames: Mapping[Any, list[tuple[float, float, str]]]):
        self._frames = {thread: deque(sorted(of_thread)) for thread, of_thread in frames.items()}
        self._open: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)

    def at(self, thread: Any, time: float) -> str:
        """Returns the line at a time, ``train.py:88``; the times of a thread have to ascend from call to call."""
        stack, coming = self._open[thread], self._frames.get(thread, deque())
        while coming and coming[0][0] <= time:
            stack.append(coming.popleft())
        while stack and stack[-1][1] < time:
            stack.pop()
        return next((line for _, end, line in reversed(stack) if end >= time), "")


def _call(started: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]], base_s: float, lines: _Lines) -> JobCall:
    more, begin_s = started["args"], base_s + started["ts"] / 1e6
    line = lines.at(started["tid"], started["ts"])
    group, ranks = str(more.get("Process Group Name", "")), tuple[int, ...]()
    if started["name"] != _NOTED:  # gloo's: its group is not in the trace
        kind, dtype, nbytes = collective_kind(started["name"]), "", -(_elements(more) or 1)
        if len(set(groups.values())) == 1:
            ranks = next(iter(groups.values()))
    else:
        kind = collective_kind(str(more["Collective name"]))
        dtype, size = dtype_and_size(more.get("dtype", ""))
        nbytes = size * max(int(more.get("In msg nelems", 0)), int(more.get("Out msg nelems", 0))) or -1
        ranks = ranks_of(
            more.get("Process Group Ranks"), more.get("Global rank start"), more.get("Global rank stride"),
            more.get("Group size"),
        ) or groups.get(group, ())  # fmt: skip
        if kind in ("send", "receive") and "Dst Rank" in more:
            ends = int(more.get("Src Rank", -1)), int(more["Dst Rank"])
            ranks = tuple(ranks[end] if 0 <= end < len(ranks) else end for end in ends)
    if kind == "barrier":
        dtype, nbytes = "", 0
    return JobCall(
        kind=kind, ranks=ranks, number=int(more.get("Seq", 0)) - 1, group=group, nbytes=nbytes, shape=(), dtype=dtype,
        line=line, module="", phase="", step=0, begin_s=begin_s, end_s=begin_s,
    )  # fmt: skip


def _count(calls: Iterable[JobCall]) -> None:
    """Numbers the calls of each group where the trace does not."""
    counts: dict[tuple[Any, ...], int] = defaultdict(int)
    for call in calls:
        key = call.group_key
        if call.number < 0:
            call.number, counts[key] = counts[key], counts[key] + 1


def _give_kernels(
    calls: Iterable[JobCall], numbers: Iterable[int], kernels: Iterable[_Kernel], computing: Coverage
) -> dict[str, float]:
    """Adds each kernel's time to its call; returns the exposed seconds of kernels without a call, by kind.

    Most kernels say which operator launched them. Any other kernel, and gloo's annotations, belong to the first call of
    their kind without a kernel, if possible with as many elements.
    """
    by_number = {number: call for number, call in zip(numbers, calls, strict=True) if number >= 0}
    waiting: dict[str, list[JobCall]] = defaultdict(list)
    for each in calls:
        waiting[each.kind].append(each)
    of_none: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds = (kernel.end - kernel.begin) / 1e6
        exposed_s = seconds - float(computing.within(kernel.begin, kernel.end)) / 1e6
        call = by_number.get(kernel.call)
        of_kind = waiting[kernel.kind if call is None else call.kind]
        if call is None and of_kind:
            call = next((each for each in of_kind[:64] if each.nbytes == -kernel.elements), of_kind[0])
        if call is None:
            of_none[kernel.kind] += exposed_s
            continue
        if call.lasted_s is None:
            of_kind.remove(call)
        if call.nbytes < 0:  # it was the number of elements
            call.dtype, size = dtype_and_size(kernel.dtype)
            call.nbytes = -call.nbytes * size or -1
        call.lasted_s = (call.lasted_s or 0.0) + seconds
        call.exposed_s += exposed_s
    return dict(of_none)


def _elements(arguments: Mapping[str, Any]) -> int:
    """Counts the elements of an operator's largest argument, which is a tensor or a list of tensors."""
    counts = []
    for shape in arguments.get("Input Dims") or []:
        tensors = shape if shape and isinstance(shape[0], list) else [shape]
        counts.append(sum(prod(map(int, tensor)) for tensor in tensors))
    return max(counts, default=0)
