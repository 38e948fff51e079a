"""GPUs and links to plan with: memory, rates and their sources. Decimal units, dense rates, one direction of a link."""

import difflib
import re
from dataclasses import dataclass


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


BLACKWELL = 0.71  # fitted to NVIDIA's runs of Megatron-core, beside Hopper's
HOPPER = 0.8  # fitted to MosaicML's runs, whose A100s reach all of it
USUAL = 0.8  # of the peak, where nobody has published what large products reach


def _gpu(name, gibibytes, tflops, bandwidth, both_ways, source, bf16=True, reached=0.0, sustained=1.0) -> Gpu:
    """In GiB, TFLOP/s and GB/s."""
    return Gpu(
        name, gibibytes * 2**30, tflops * 1e12, bandwidth * 1e9, both_ways / 2 * 1e9, source, bf16, reached * 1e12,
        sustained,
    )  # fmt: skip


#: GiB: the "total capacity" in torch's message "out of memory" of each GPU, in the GitHub issue named. Of H200 and H20
#: no message was seen: what nvidia-smi lists (140.40, and 95.58, not verified) less what an H100 lacks of that.
_TABLE = (
    # GiB: hahnyuan/PB-LLM#3
    _gpu("A800-80GB", 79.33, 312, 2039, 400, "an A100-80GB with NVLink at 400 GB/s", reached=271.2),
    # levihsu/OOTDiffusion#235
    _gpu("A100-80GB", 79.25, 312, 2039, 600, "NVIDIA A100 datasheet, SXM", reached=271.2),
    # TianheWu/CoSeR#10
    _gpu("A100-40GB", 39.50, 312, 1555, 600, "NVIDIA A100 datasheet, SXM", reached=271.2),
    # vllm-project/vllm#27508
    _gpu(
        "H100", 79.11, 989, 3350, 900, "NVIDIA H100 datasheet, SXM, without sparsity", reached=794.5, sustained=HOPPER
    ),
    _gpu(
        "H200", 139.8, 989, 4800, 900, "NVIDIA H200 datasheet, SXM, without sparsity", reached=794.5, sustained=HOPPER
    ),
    _gpu("H20", 95.0, 148, 4000, 900, "as GPU catalogues list it alike; no datasheet of NVIDIA seen"),
    _gpu(
        "H100-96GB-500W",
        94.5,
        989,
        2400,
        900,
        "torchtitan's benchmarks, 2024-12: HBM2e, limited to 500 W",
        reached=794.5,
        sustained=HOPPER,
    ),
    # no message was seen of one; nvidia-smi lists as much as of the SXM board
    _gpu("H100-PCIe", 79.11, 756, 2000, 128, "NVIDIA H100 datasheet, PCIe, without sparsity; a bridge would join two"),
    # ali-vilab/VACE#56
    _gpu("H100-NVL", 93.00, 835, 3900, 128, "NVIDIA H100 datasheet, NVL, without sparsity; a bridge would join two"),
    # pytorch/ao#4002: what a B200 says of itself, its bandwidth too
    _gpu(
        "B200",
        178.35,
        2250,
        7672,
        1800,
        "NVIDIA HGX B200 datasheet, without sparsity",
        reached=1745,
        sustained=BLACKWELL,
    ),
    # of the next three no message was seen: the datasheet's GB less what a B200 lacks of its own
    _gpu(
        "GB200",
        184,
        2500,
        8000,
        1800,
        "NVIDIA GB200 NVL72 datasheet, one GPU, without sparsity",
        reached=1822,
        sustained=BLACKWELL,
    ),
    _gpu(
        "GB300", 267, 2500, 8000, 1800, "NVIDIA GB300 NVL72 datasheet, one GPU, without sparsity", sustained=BLACKWELL
    ),
    _gpu(
        "B300", 267, 2250, 8000, 1800, "NVIDIA HGX B300 datasheet, without sparsity", reached=1769, sustained=BLACKWELL
    ),
    _gpu("MI300X", 191, 1307, 5300, 896, "AMD Instinct MI300X datasheet; 7 links of 128 GB/s", reached=668.4),
    # TrajectoryCrafter/TrajectoryCrafter#20
    _gpu("5090", 31.36, 209.5, 1792, 128, "NVIDIA RTX Blackwell architecture paper, fp32 accumulation; PCIe 5.0 x16"),
    # antirez/ds4#431
    _gpu(
        "RTX-PRO-6000",
        94.97,
        503.8,
        1792,
        128,
        "NVIDIA RTX Blackwell PRO architecture paper, workstation edition, without sparsity; PCIe 5.0 x16",
    ),
    # DINGYANB/MTVCrafter#21, with its error correction, which is how it comes
    _gpu("RTX-6000-Ada", 44.43, 364.2, 960, 64, "NVIDIA Ada GPU architecture paper, without sparsity; PCIe 4.0 x16"),
    # no message was seen: the 48 GiB without error correction, less what a 3090 lacks of its own
    _gpu("A6000", 47.5, 154.8, 768, 64, "NVIDIA GA102 architecture paper, fp32 accumulation; PCIe 4.0 x16"),
    # GaoLii/DSP#10
    _gpu("3090", 23.70, 71, 936, 64, "NVIDIA GA102 architecture paper, fp32 accumulation; PCIe 4.0 x16"),
    # Zheng-Chong/CatVTON#133
    _gpu("T4", 14.56, 65, 320, 32, "NVIDIA T4 datasheet, fp16; PCIe 3.0 x16", bf16=False),
    # signalnine/q27#1, an A10
    _gpu("A10G", 22.06, 70, 600, 64, "NVIDIA A10G datasheet, without sparsity; PCIe 4.0 x16"),
    # of the next two no message was seen
    _gpu("L4", 22.0, 121, 300, 64, "NVIDIA L4 datasheet, without sparsity; PCIe 4.0 x16"),
    _gpu("Ascend-910B", 61, 280, 1600, 392, "Gitee AI's page on the 910B (64 GB, 280 TFLOP/s); HCCS 7 × 56 GB/s"),
    # QwenLM/Qwen3-VL#2097, an L40
    _gpu("L40S", 44.40, 362, 864, 64, "NVIDIA L40S datasheet, without sparsity; PCIe 4.0 x16"),
    # deepseek-ai/DeepSeek-V3#205
    _gpu("4090", 23.64, 165, 1008, 64, "NVIDIA Ada GPU architecture paper, fp32 accumulation; PCIe 4.0 x16"),
    # liucongg/ChatGLM-Finetuning#73
    _gpu("V100", 31.74, 125, 900, 300, "NVIDIA V100 datasheet, SXM2 32 GB, fp16", bf16=False),
)
GPUS = {gpu.name: gpu for gpu in _TABLE}

#: TFLOP/s of products of fp32 without TF32, which is how torch multiplies unless it is told otherwise: from the same
#: datasheets and architecture papers. An H20's and an Ascend's were not seen.
FP32_TFLOPS = {
    "A800-80GB": 19.5, "A100-80GB": 19.5, "A100-40GB": 19.5, "H100": 67, "H200": 67, "H100-96GB-500W": 67,
    "H100-PCIe": 51, "H100-NVL": 60, "B200": 75, "GB200": 80, "B300": 75, "MI300X": 163.4, "5090": 104.8,
    "RTX-PRO-6000": 125, "RTX-6000-Ada": 91.1, "A6000": 38.7, "3090": 35.6, "T4": 8.1, "A10G": 31.2, "L4": 30.3,
    "L40S": 91.6, "4090": 82.6, "V100": 15.7,
}  # fmt: skip

#: TFLOP/s of products in 8 and in 4 bits, dense, from the same datasheets and architecture papers (fp32 accumulation).
#: What is not here has none. In 8 bits Ada and Hopper have one scale for a tensor (Hopper also one for a block); on
#: Blackwell 32 numbers of MXFP8 share one, and 16 of NVFP4.
FP8_TFLOPS = {
    "H100": 1979, "H200": 1979, "H20": 296, "H100-96GB-500W": 1979, "H100-PCIe": 1513, "H100-NVL": 1671, "B200": 4500,
    "GB200": 5000, "B300": 4500, "GB300": 5000, "MI300X": 2614, "5090": 419, "RTX-PRO-6000": 1007,
    "RTX-6000-Ada": 728.5, "L4": 242, "L40S": 733, "4090": 330,
}  # fmt: skip
FP4_TFLOPS = {
    "B200": 9000, "GB200": 10_000, "B300": 13_500, "GB300": 15_000, "5090": 1676, "RTX-PRO-6000": 2015,
}  # fmt: skip
PRECISIONS = ("bf16", "fp8", "mxfp8", "nvfp4")
USUAL_LINK = "ethernet-100g"
#: GPUs that one NVLink joins, where it is more than a board of eight.
HOST_GPUS = {"GB200": 72, "GB300": 72}
#: Bytes/s of one direction between a GPU and its host's memory: NVLink-C2C of Grace; else 16 lanes of PCIe by
#: generation (16, 32, 64 GB/s), 0.8 of it.
C2C_BYTES_PER_S = 450e9
PCIE_BYTES_PER_S = {3: 12.8e9, 4: 25.6e9, 5: 51.2e9}
_PCIE_3 = {"T4", "V100"}
_PCIE_4 = {"A800-80GB", "A100-80GB", "A100-40GB", "A6000", "3090", "4090", "A10G", "L4", "L40S", "RTX-6000-Ada"}


def host_bytes_per_s(gpu: Gpu) -> float:
    """Bytes/s of one direction to the host's memory."""
    if gpu.name in HOST_GPUS:
        return C2C_BYTES_PER_S
    return PCIE_BYTES_PER_S[3 if gpu.name in _PCIE_3 else 4 if gpu.name in _PCIE_4 else 5]


def host_gpus(gpu: Gpu, gpus: int | None = None) -> int:
    """GPUs that one NVLink joins: of a board, or of a rack; of several racks the most that each of them then has."""
    most = HOST_GPUS.get(gpu.name, 8)
    if gpus is None or gpus <= most or gpu.name not in HOST_GPUS:
        return most
    return next((each for each in range(most, most // 2, -1) if gpus % each == 0), most)


def usual_link(gpu: Gpu, each: int) -> tuple[str, float]:
    """What links hosts of ``each`` GPUs where nothing is said: a name, and bytes/s of a host's adapters together.

    A rack has an adapter for each GPU, ConnectX-7 (GB200) or 8 (GB300); of other hosts the least is taken.
    """
    if gpu.name in HOST_GPUS:
        gigabits = {"GB200": 400, "GB300": 800}[gpu.name]
        return f"{each} adapters of {gigabits} Gbit/s", each * gigabits * 1e9 / 8
    return USUAL_LINK, LINKS[USUAL_LINK]


#: What recipes call a precision, and which of ours it is.
_RECIPES = {
    "bfloat16": "bf16", "fp8-cs": "fp8", "fp8-ds": "fp8", "fp8-sc": "fp8", "float8": "fp8", "fp8-mx": "mxfp8",
    "fp8_cs": "fp8", "fp8_ds": "fp8", "fp8_sc": "fp8", "fp8_mx": "mxfp8", "fp4": "nvfp4",
}  # fmt: skip


def precision(name: str) -> str:
    """One of :data:`PRECISIONS` by any of its names: FP8-CS, NVFP4, bfloat16.

    Raises:
        ValueError: there is none.
    """
    plain = _RECIPES.get(name.lower(), name.lower())
    if plain not in PRECISIONS:
        near = difflib.get_close_matches(plain, PRECISIONS, 1, 0.4)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PRECISIONS)}"
        raise ValueError(f"no precision {name!r}; {hint}")
    return plain


def peak(gpu: Gpu, precision: str) -> float:
    """Operations/s of dense products in that precision.

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
    "pro-6000-blackwell": "RTX-PRO-6000",
    "pro-6000-blackwell-workstation": "RTX-PRO-6000",
}


def _plain(name: str) -> str:
    """``NVIDIA GeForce RTX 4090`` or ``rtx4090`` -> ``4090``."""
    words = re.sub(r"\brtx(?=a?\d)", "", re.sub(r"[^a-z0-9.]+", " ", name.lower())).split()
    return "-".join(word for word in words if word not in _COMMON)


def gpu(name: str) -> Gpu:
    """The GPU of that name: the table's, nvidia-smi's, or as people say it (``NVIDIA H100 80GB HBM3``, ``rtx4090``).

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
        own = "another's rates can be given in a file, which pardemo plan --measure FILE writes on it"
        raise ValueError(f"no GPU {name!r}; there are {', '.join(GPUS)}; {own}")
    raise ValueError(f"no GPU {name!r}; did you mean {' or '.join(offered)}?")


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
        near = difflib.get_close_matches(name, LINKS, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(LINKS)}, or Gbit/s as a number"
        raise ValueError(f"no link {name!r}{hint}") from None
    if not 0 < value < float("inf"):
        raise ValueError(f"a link's rate must be above 0 Gbit/s, not {name}")
    return value * 1e9 / 8
