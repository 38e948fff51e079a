"""Reads a machine's own rates from a JSON file, in place of a datasheet's: ``--gpu FILE``.

``pardemo plan --measure FILE`` writes one. All of it is what was reached, so that nothing is taken off it again.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pardemo import argument_checks
from pardemo.planner import hardware
from pardemo.planner.hardware import Gpu
from pardemo.planner.layouts.machines import Link, Machine
from pardemo.planner.rates import LINK_SHARE

#: Numbers of a profile: unit, least, most. What lies outside was written in another unit.
NUMBERS = {
    "memory_gib": ("GiB of one GPU, as torch reports it", 0.01, 4096),
    "peak_tflops": ("TFLOP/s of its datasheet", 1e-4, 1e5),
    "reachable_tflops": (
        'TFLOP/s of large products, or one for each size, as {"1024": 310, "8192": 640}', 1e-4, 1e5,
    ),
    "memory_gb_per_s": ("GB/s that a copy reads and writes", 0.1, 1e5),
    "sustained": ("a share of it", 0.01, 1),
    "gb_per_s": ("GB/s", 1e-6, 1e5),
    "latency_us": ("µs of a collective for each doubling of ranks", 0, 1e7),
}  # fmt: skip
LINKS = {
    "inside": "from a GPU to the others of its host",
    "between": "of a host's adapters together, one way",
}
OF_A_LINK = ("gb_per_s", "latency_us")
NEEDED = ("name", "memory_gib", "peak_tflops", "reachable_tflops", "memory_gb_per_s")
KNOWN = (*NEEDED, "sustained", "inside", "between", "host_gpus", "bf16", "source")


@dataclass(frozen=True)
class GpuProfile:
    """A GPU, and the start-up seconds and link rates of its machine; None where they were not measured.

    ``file``: name of the file that it was read from.
    """

    gpu: Gpu
    inside: bool = True
    latency_within: float | None = None
    latency_between: float | None = None
    between: float | None = None
    host_gpus: int | None = None
    file: str = ""

    def machine(self, gpus: int, hosts: int | None = None, link: str | None = None) -> Machine:
        """Makes the machine of ``gpus`` such GPUs on ``hosts`` hosts (as few as hold them, if not said).

        Args:
            link: names the link between hosts; else it is the measured one, or the usual one of such GPUs.

        Raises:
            ValueError: the GPUs do not divide over the hosts, or there is no such link.
        """
        host_gpus = gpus // self.hosts(gpus, hosts)
        if link is not None:
            return self.on_hosts(gpus, host_gpus, Link(f"--link {link}", hardware.link(link)))
        if (measured := self.measured_link) is not None:
            return self.on_hosts(gpus, host_gpus, measured)
        name, rate = hardware.usual_link(self.gpu, host_gpus)
        return self.on_hosts(gpus, host_gpus, Link(f"{name}, the default of --link", rate))

    @property
    def measured_link(self) -> Link | None:
        """The link between hosts, if it was measured."""
        return None if self.between is None else Link(f"measured, {self.file}", self.between, measured=True)

    def on_hosts(self, gpus: int, host_gpus: int, link: Link) -> Machine:
        """Makes the machine of such GPUs on hosts of ``host_gpus``, joined by that link.

        Nothing is taken off what was measured. A link that was not reaches its usual share of its data sheet.
        """
        latencies = {"latency_within": self.latency_within, "latency_between": self.latency_between}
        measured: dict[str, Any] = {name: seconds for name, seconds in latencies.items() if seconds is not None}
        rate = link.bytes_per_s
        if self.gpu.measured:
            measured["link_share"], rate = 1.0, rate if link.measured else rate * LINK_SHARE
        return Machine(self.gpu, gpus, host_gpus, rate, link=link, **measured)

    def hosts(self, gpus: int, count: int | None = None) -> int:
        """Returns ``count``, or as few hosts as ``gpus`` GPUs fit on, as many of them on each.

        Raises:
            ValueError: the GPUs do not divide over so many hosts.
        """
        if count is not None:
            if gpus % count:
                raise ValueError(f"{gpus} GPUs do not divide over {count} hosts")
            return count
        most = self.host_gpus or hardware.host_gpus(self.gpu, gpus)
        return next(hosts for hosts in range(-(-gpus // most), gpus + 1) if gpus % hosts == 0)


def four_digits(value: float) -> float:
    """Rounds a measured value to four digits, as profiles have them."""
    return float(f"{value:.4g}")


def is_file(name: str) -> bool:
    """Returns whether ``--gpu`` means a file."""
    return name.lower().endswith(".json") or Path(name).expanduser().is_file()


def find_profile(name: str, gpus: int = 1) -> GpuProfile:
    """Returns the GPU of that name, or the profile in that file, for so many GPUs.

    Raises:
        ValueError: there is none, something in the file is wrong, or it has no link that several GPUs need.
    """
    if not is_file(name):
        return GpuProfile(hardware.gpu(name))
    gpu_profile = load_profile(Path(name).expanduser())
    check_inside(gpu_profile, gpus)
    return gpu_profile


def check_inside(gpu_profile: GpuProfile, gpus: int) -> None:
    """Refuses a profile without the link inside a host for several GPUs.

    Raises:
        ValueError: it has none, and there are several.
    """
    if gpus > 1 and not gpu_profile.inside:
        raise ValueError(f"{gpu_profile.file} has no inside (gb_per_s, latency_us), which {gpus} GPUs need")


def load_profile(path: Path) -> GpuProfile:
    """Reads the profile in a file.

    Raises:
        ValueError: one line that names the file, the field, and what would be right.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(f"no file {path}; pardemo plan --measure {path.name} writes one") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from None
    try:
        return replace(parse_profile(values), file=path.name)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def parse_profile(values: Any) -> GpuProfile:
    """Makes a profile of these fields.

    Raises:
        ValueError: one line that names the field, and what would be right.
    """
    if not isinstance(values, dict):
        raise ValueError("not a profile, which is an object with " + ", ".join(NEEDED))
    if "matmul_flops" in values:
        raise ValueError("a run's machine.json, and no profile; pardemo plan --measure FILE writes one")
    _check_names(values, KNOWN, "")
    units = {"name": "of the GPU"} | {name: unit for name, (unit, _, _) in NUMBERS.items()}
    if missing := [name for name in NEEDED if name not in values]:
        raise ValueError("no " + ", ".join(f"{name} ({units[name]})" for name in missing))
    if not isinstance(values["name"], str) or not values["name"].strip():
        raise ValueError(f"name must be a text, not {values['name']!r}")
    number = {name: _number(values[name], name) for name in ("memory_gib", "peak_tflops", "memory_gb_per_s")}
    reachable, small = _reachable(values["reachable_tflops"], number["peak_tflops"])
    sustained = _number(values.get("sustained", 1.0), "sustained")
    inside, between = (_link(values, name) for name in LINKS)
    host_gpus, bf16 = values.get("host_gpus"), values.get("bf16", True)
    if host_gpus is not None:
        argument_checks.whole_number(host_gpus, "host_gpus")
    if not isinstance(bf16, bool):
        raise ValueError(f"bf16 must be true or false, not {bf16!r}")
    gpu = Gpu(
        values["name"], number["memory_gib"] * 2**30, number["peak_tflops"] * 1e12, number["memory_gb_per_s"] * 1e9,
        inside["gb_per_s"] * 1e9 if inside else 1.0, str(values.get("source", "measured")),
        bf16=bf16, reachable=reachable * 1e12, sustained=sustained, measured=True, small=small,
    )  # fmt: skip
    return GpuProfile(
        gpu, inside is not None,
        inside["latency_us"] * 1e-6 if inside else None, between["latency_us"] * 1e-6 if between else None,
        between["gb_per_s"] * 1e9 if between else None, host_gpus,
    )  # fmt: skip


def _reachable(value: Any, peak: float) -> tuple[float, float | None]:
    """TFLOP/s of large products; and what smaller ones lose, where rates by size tell it.

    With s rows, columns and depth lost, a product of n × n × n reaches R / (1 + s/n)³, as the time model has it.
    """
    name = "reachable_tflops"
    unit = NUMBERS[name][0]
    if value == {}:
        raise ValueError(f"{name} has no sizes; it takes {unit}")
    rates = {}
    for size, rate in value.items() if isinstance(value, dict) else ():
        if not str(size).isdigit() or int(size) < 1:
            raise ValueError(f"{name} has the size {size!r}, no whole number of at least 1")
        rates[int(size)] = _number(rate, f"{name} of {size}", ("TFLOP/s", 1e-6, 1e5))
    most = max(rates.values()) if rates else _number(value, name)
    if most > peak:
        raise ValueError(f"{name} is {most:g}, above peak_tflops, {peak:g}: are both in TFLOP/s?")
    if len(rates) < 2:
        return most, None
    logs = {
        lost: [math.log(rate) + 3 * math.log1p(lost / size) for size, rate in rates.items()] for lost in range(1001)
    }
    lost = min(logs, key=lambda lost: _spread(logs[lost]))
    return min(peak, math.exp(sum(logs[lost]) / len(rates))), float(lost)


def _spread(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def _link(values: Mapping[str, Any], name: str) -> dict[str, float] | None:
    if name not in values:
        return None
    link = values[name]
    if not isinstance(link, dict):
        raise ValueError(f"{name} must be an object with {' and '.join(OF_A_LINK)} ({LINKS[name]}), not {link!r}")
    _check_names(link, OF_A_LINK, f"{name}.")
    if missing := [field for field in OF_A_LINK if field not in link]:
        raise ValueError(f"{name} has no " + ", ".join(f"{field} ({NUMBERS[field][0]})" for field in missing))
    return {field: _number(link[field], f"{name}.{field}", NUMBERS[field]) for field in OF_A_LINK}


def _number(value: Any, name: str, limits: tuple[str, float, float] | None = None) -> float:
    """Returns the value of the field ``name``, within its limits, of :data:`NUMBERS` unless given."""
    unit, least, most = limits or NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number ({unit}), not {value!r}")
    if not least <= value <= most:  # no number is within nothing, so this is for NaN, too
        raise ValueError(f"{name} is {value:g}, not within {least:g} to {most:g}; it is in {unit}")
    return float(value)


def _check_names(values: Mapping[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
    for name in values:
        if name not in allowed:
            hint = argument_checks.nearest(f"{prefix}{name}", [prefix + field for field in allowed])
            raise ValueError(f"no field {prefix}{name}{hint}")
