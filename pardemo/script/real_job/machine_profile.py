"""Computes from a job's traces which rates its machine reaches, as a profile for ``pardemo plan --gpu FILE``."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from pardemo.formulas.communication import bus_bandwidth
from pardemo.planner import hardware, profile
from pardemo.planner.profile import four_digits
from pardemo.script.job_files.records import JobCall, JobRankRecord

#: Kinds whose bytes go over each link of a ring, and nccl-tests' names of them.
_RINGS = {"all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter", "all-gather": "all_gather"}
#: Of the largest collectives or products, and up to which bytes a collective is all latency.
_LARGE, _SMALL = 0.25, 64 << 10
#: Bytes of a copy from which on it says what memory carries.
_COPY = 16 << 20


@dataclass(frozen=True)
class LinkRate:
    """The bytes/s that collectives of one kind reach over each link, inside nodes or ``between`` them."""

    kind: str
    between: bool
    bytes_per_s: float
    collectives: int


def link_rates(
    records: Mapping[int, JobRankRecord], host_gpus: int
) -> tuple[list[LinkRate], dict[str, dict[str, float]]]:
    """Computes the rate of each kind of collective, and the profile's fields ``inside`` and ``between``.

    A collective's time is that of its shortest kernel: the others also wait for their ranks. A rate is the median of
    the larger collectives.
    """
    shortest: dict[tuple[Any, ...], JobCall] = {}
    for record in records.values():
        for call in record.calls:
            if call.kind in _RINGS and call.lasted_s and call.nbytes > 0 and len(call.ranks) > 1:
                key = call.key
                known = shortest.get(key)
                if known is None or call.lasted_s < (known.lasted_s or 0.0):
                    shortest[key] = call
    by_kind: dict[tuple[str, bool], list[JobCall]] = defaultdict(list)
    for call in shortest.values():
        by_kind[call.kind, len({rank // host_gpus for rank in call.ranks}) > 1].append(call)
    rates, links = [], {}
    for (kind, between), calls in sorted(by_kind.items()):
        largest = max(call.nbytes for call in calls)
        large = [call for call in calls if call.nbytes >= _LARGE * largest]
        rates.append(LinkRate(kind, between, median(_rate(call, host_gpus, between) for call in large), len(large)))
    for name, between in (("inside", False), ("between", True)):
        of_place = [call for (_, outside), calls in by_kind.items() for call in calls if outside == between]
        small = [(call.lasted_s or 0.0) / math.log2(len(call.ranks)) for call in of_place if call.nbytes <= _SMALL]
        if best := max((rate.bytes_per_s for rate in rates if rate.between == between), default=0.0):
            links[name] = {
                "gb_per_s": four_digits(best / 1e9),
                "latency_us": four_digits(1e6 * median(small)) if small else 0.0,
            }
    return rates, links


def _rate(call: JobCall, host_gpus: int, between: bool) -> float:
    """Computes a collective's bytes/s over a GPU's link; between nodes over all adapters of a node together."""
    rate = bus_bandwidth(_RINGS[call.kind], call.nbytes, len(call.ranks), call.lasted_s or 0.0)
    on_a_host = max(1, len(call.ranks) // len({rank // host_gpus for rank in call.ranks}))
    return rate * max(1, host_gpus // on_a_host) if between else rate


def product_rate(records: Mapping[int, JobRankRecord]) -> float | None:
    """Computes the FLOP/s of the larger matrix multiplications, all together; None where no shapes are known."""
    products = [each for record in records.values() if record.timing for each in record.timing.products]
    largest = max((flops for flops, _ in products), default=0.0)
    large = [each for each in products if each[0] >= _LARGE * largest]
    return sum(flops for flops, _ in large) / sum(seconds for _, seconds in large) if large else None


def host_gpus(records: Mapping[int, JobRankRecord]) -> int:
    """Counts the GPUs of a node: those that its processes see, or the ranks with one host name."""
    hosts: dict[str, int] = defaultdict(int)
    for record in records.values():
        hosts[record.host] += bool(record.host)
    return max([record.device.on_host for record in records.values()] + list(hosts.values()) + [1])


def profile_fields(records: Mapping[int, JobRankRecord]) -> dict[str, Any]:
    """Returns a machine profile with the rates of the traces, in the fields of :mod:`pardemo.planner.profile`.

    Raises:
        ValueError: the traces do not have what a profile needs; the message says how they would.
    """
    from pardemo.planner.measure_profile import find_peak_flops

    device = next((record.device for record in records.values() if record.device.name), None)
    rate = product_rate(records)
    if device is None:
        raise ValueError("a profile needs traces of GPUs: these name none")
    if rate is None:
        raise ValueError("a profile needs matrix multiplications with shapes: trace with record_shapes=True")
    copies = [each for record in records.values() if record.timing for each in record.timing.copies]
    copied = [2 * nbytes / seconds for nbytes, seconds in copies if nbytes >= _COPY]
    peak_flops, source = find_peak_flops(device.name, rate)
    alike = [gpu for gpu in hardware.GPUS.values() if gpu.flops == peak_flops]
    table = min(alike, key=lambda gpu: abs(gpu.memory_bytes - device.memory_bytes), default=None)
    memory_rate = median(copied) if copied else table.memory_bytes_per_s if table else None
    if memory_rate is None:
        raise ValueError(f"a profile needs a copy of {_COPY >> 20} MiB in a trace, or a GPU of the planner's table: "
                         f"{device.name} is not there")  # fmt: skip
    fields: dict[str, Any] = {
        "name": device.name, "memory_gib": four_digits(device.memory_bytes / 2**30),
        "peak_tflops": four_digits(peak_flops / 1e12),
        "reachable_tflops": min(four_digits(rate / 1e12), four_digits(peak_flops / 1e12)),
        "memory_gb_per_s": four_digits(memory_rate / 1e9), "host_gpus": host_gpus(records),
        "source": f"traces of {len(records)} ranks; {source}" + ("" if copied else "; memory's rate of the datasheet"),
    }  # fmt: skip
    fields |= link_rates(records, fields["host_gpus"])[1]
    profile.parse_profile(fields)
    return fields
