"""Lists GPUs and links: memory, rates and their sources. Units are decimal, rates dense, links' of one direction."""

import csv
import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from pardemo import argument_checks


@dataclass(frozen=True)
class Gpu:
    """One GPU. ``memory_bytes`` is what torch reports of it (``total_memory``): boards of "80 GB" have nearly 80 GiB.

    ``link_bytes_per_s`` is one direction to the other GPUs of its host (datasheets print both together).
    ``reachable``: what large bf16 products reach alone, as the MAMF finder of stas00/ml-engineering measured it, else
    0.8 of the peak. ``sustained``: of that, what they reach in a step, when the GPU is warm and its power is shared.
    ``measured``: its rates are what was reached, and no datasheet's (:mod:`pardemo.planner.profile`); ``small``: what
    products lose of each size, where that was measured.
    """

    name: str
    memory_bytes: float
    flops: float  # dense bf16 (V100: fp16)
    memory_bytes_per_s: float
    link_bytes_per_s: float
    source: str
    bf16: bool = True
    reachable: float = 0.0
    sustained: float = 1.0
    measured: bool = False
    small: float | None = None

    def __post_init__(self):
        if not self.reachable:
            object.__setattr__(self, "reachable", USUAL * self.flops)


ENDLESS = 1e30  # bytes or operations a second: takes no time
USUAL = 0.8  # of the peak, where nobody has published what large products reach

#: A row for each GPU. ``memory_gib`` is the "total capacity" of torch's message "out of memory" in the GitHub issue
#: that ``memory_source`` names; rates are dense, without sparsity; ``fp32_tflops`` without TF32, as torch multiplies
#: unless told otherwise. What a GPU does not have, or nobody published, is empty. In 8 bits Ada and Hopper have one
#: scale for a tensor (Hopper also one for a block); on Blackwell 32 numbers of MXFP8 share one, and 16 of NVFP4.
#: ``sustained`` of Blackwell is fitted to NVIDIA's runs of Megatron-core, of Hopper to MosaicML's on A100 and H100.
#: ``link_gb_per_s``: both directions together. ``host_gb_per_s``: one direction to the host's memory, over NVLink-C2C
#: of Grace, else 16 lanes of PCIe (16, 32, 64 GB/s by generation), 0.8 of it. ``host_gpus``: joined by one NVLink where
#: these are more than a board of eight.
TABLE = Path(__file__).with_name("gpus.csv")
with TABLE.open(encoding="utf-8", newline="") as _file:
    _ROWS = {row["name"]: row for row in csv.DictReader(_file)}


def _column(name: str) -> dict[str, float]:
    """GPU -> its value, of those that have one."""
    return {gpu: float(row[name]) for gpu, row in _ROWS.items() if row[name]}


GPUS = {
    name: Gpu(
        name, float(row["memory_gib"]) * 2**30, float(row["bf16_tflops"]) * 1e12, float(row["memory_gb_per_s"]) * 1e9,
        float(row["link_gb_per_s"]) / 2 * 1e9, row["source"], row["has_bf16"] != "no",
        float(row["reached_tflops"] or 0) * 1e12, float(row["sustained"] or 1),
    )
    for name, row in _ROWS.items()
}  # fmt: skip
FP32_TFLOPS, FP8_TFLOPS, FP4_TFLOPS = map(_column, ("fp32_tflops", "fp8_tflops", "fp4_tflops"))
HOST_GPUS = {name: int(count) for name, count in _column("host_gpus").items()}
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
USUAL_LINK = "ethernet-100g"
HOST_BYTES_PER_S = 51.2e9  # to its host's memory, of a GPU that is not in the table: PCIe 5.0


def host_bytes_per_s(gpu: Gpu) -> float:
    """Bytes/s of one direction to the host's memory."""
    return float(_ROWS[gpu.name]["host_gb_per_s"]) * 1e9 if gpu.name in _ROWS else HOST_BYTES_PER_S


def host_gpus(gpu: Gpu, gpus: int | None = None) -> int:
    """GPUs that one NVLink joins: of a board, or of a rack; of several racks the most that each of them then has."""
    most = HOST_GPUS.get(gpu.name, 8)
    if gpus is None or gpus <= most or gpu.name not in HOST_GPUS:
        return most
    return next((count for count in range(most, most // 2, -1) if gpus % count == 0), most)


def usual_link(gpu: Gpu, host_gpus: int) -> tuple[str, float]:
    """Returns the link of hosts of so many GPUs if none is given: a name, and bytes/s of a host's adapters together.

    A rack has an adapter for each GPU, ConnectX-7 (GB200) or 8 (GB300); of other hosts the least is taken.
    """
    if gpu.name in HOST_GPUS:
        gigabits = {"GB200": 400, "GB300": 800}[gpu.name]
        return f"{host_gpus} adapters of {gigabits} Gbit/s", host_gpus * gigabits * 1e9 / 8
    return USUAL_LINK, LINKS[USUAL_LINK]


#: What recipes call a precision, and which of ours it is.
_RECIPES = {
    "bfloat16": "bf16", "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-sc": "fp8", "float8": "fp8", "fp8-mx": "mxfp8",
    "fp8_cs": "fp8", "fp8_ds": "fp8", "fp8_sc": "fp8", "fp8_mx": "mxfp8", "fp4": "nvfp4",
}  # fmt: skip


def precision(name: str) -> str:
    """Returns one of :data:`PRECISIONS` by any of its names: FP8-CS, NVFP4, bfloat16.

    Raises:
        ValueError: there is none.
    """
    plain = _RECIPES.get(name.lower(), name.lower())
    if plain not in PRECISIONS:
        raise ValueError(f"no precision {name!r}{argument_checks.nearest(plain, PRECISIONS, cutoff=0.4)}")
    return plain


def peak_flops(gpu: Gpu, precision: str) -> float:
    """Returns the operations/s of dense products in that precision, by the data sheet.

    Raises:
        ValueError: the GPU has none in that precision, or there is no such precision.
    """
    if precision == "bf16":
        return gpu.flops
    table = FP4_TFLOPS if precision == "nvfp4" else FP8_TFLOPS
    blackwell = gpu.name in FP4_TFLOPS
    if gpu.name not in table or (precision == "mxfp8" and not blackwell):
        has = [name for name in PRECISIONS if name == "bf16" or (name == "fp8" and gpu.name in FP8_TFLOPS)
               or (name != "fp8" and blackwell)]  # fmt: skip
        raise ValueError(f"{gpu.name} has no products in {precision}; it has {', '.join(has)}")
    return table[gpu.name] * 1e12


#: Between hosts: bytes/s of one direction of each host's adapters together.
LINKS = {
    "ethernet-10g": 10e9 / 8,
    "ethernet-25g": 25e9 / 8,
    "ethernet-100g": 100e9 / 8,
    "infiniband-200g": 200e9 / 8,
    "infiniband-400g": 400e9 / 8,
    "infiniband-8x400g": 8 * 400e9 / 8,
}


#: Words of a GPU's name that nvidia-smi or people say, and that tell it from no other.
_COMMON = {"nvidia", "geforce", "rtx", "tesla", "amd", "instinct", "huawei", "gpu", "generation", "edition"}
_COMMON |= {"sxm", "sxm2", "sxm4", "sxm5", "sxm6", "dgx", "hgx", "nvl72"}
#: What is left of other names, and the table's: memory and board say which one it is.
_ALSO = {
    "h100-80gb": "H100",
    "h100-80gb-hbm3": "H100",
    "h100-80gb-pcie": "H100-PCIe",
    "h100-pcie-80gb": "H100-PCIe",
    "h100-94gb-nvl": "H100-NVL",
    "h200-141gb": "H200",
    "b200-180gb": "B200",
    "b200-192gb": "B200",
    "b300-288gb": "B300",
    "v100-32gb": "V100",
    "2080ti": "2080-Ti",
    "3060-12gb": "3060",
    "pro-6000-blackwell": "RTX-PRO-6000",
    "pro-6000-blackwell-workstation": "RTX-PRO-6000",
}


def _plain(name: str) -> str:
    """``NVIDIA GeForce RTX 4090`` or ``rtx4090`` -> ``4090``."""
    words = re.sub(r"\brtx(?=a?\d)", "", re.sub(r"[^a-z0-9.]+", " ", name.lower())).split()
    return "-".join(word for word in words if word not in _COMMON)


def gpu(name: str) -> Gpu:
    """Finds a GPU by name: the table's, nvidia-smi's, or as people say it (``NVIDIA H100 80GB HBM3``, ``rtx4090``).

    Raises:
        ValueError: there is none; the nearest names are offered.
    """
    by_name = {_plain(key): value for key, value in GPUS.items()}
    by_name |= {plain: GPUS[key] for plain, key in _ALSO.items()}
    words = _plain(name)
    if words in by_name:
        return by_name[words]
    begun = [key for key in by_name if words and (key.startswith(words) or words.startswith(key))]
    family = re.match(r"[a-z-]+", words)  # of a number alone the nearest is another card
    kin = [key for key in by_name if family and key.startswith(family.group())]
    close = difflib.get_close_matches(words, kin, 3, 0.6) + difflib.get_close_matches(words, by_name, 3, 0.8)
    near = begun if len(begun) > 1 else [*begun, *close]
    offered = [*dict.fromkeys(by_name[key].name for key in near)][:3]
    if not near:
        measuring = "another's rates can be given in a file, which pardemo plan --measure FILE writes on it"
        raise ValueError(f"no GPU {name!r}; there are {', '.join(GPUS)}; {measuring}")
    raise ValueError(f"no GPU {name!r}; did you mean {' or '.join(map(repr, offered))}?")


def link(name: str) -> float:
    """Bytes/s of a link of :data:`LINKS`, or of a number of Gbit/s.

    Raises:
        ValueError: neither.
    """
    if name in LINKS:
        return LINKS[name]
    try:
        value = float(name)
    except ValueError:
        listed = f"; there are {', '.join(LINKS)}, or Gbit/s as a number"
        raise ValueError(f"no link {name!r}{argument_checks.nearest(name, LINKS, listed)}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"a link's rate must be above 0 Gbit/s, not {name}")
    return value * 1e9 / 8
