"""What libraries need on CPU ranks in GPUs' place, and what cannot be had there, told in one line."""

import contextlib
import functools
import importlib.util
import os
import re
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from pardemo import project

#: Modules whose kernels run on GPUs only, and what a script chooses instead.
GPU_ONLY = {
    "apex": "torch.optim.AdamW, torch.nn.LayerNorm",
    "bitsandbytes": "torch.optim.AdamW, and weights that are not quantized",
    "deep_ep": "torch.distributed.all_to_all_single",
    "flash_attn": 'torch.nn.functional.scaled_dot_product_attention, or attn_implementation="sdpa"',
    "flash_attn_interface": 'torch.nn.functional.scaled_dot_product_attention, or attn_implementation="sdpa"',
    "liger_kernel": "the model's own layers and torch.nn.functional.cross_entropy",
    "transformer_engine": "layers of torch.nn; in Megatron-core get_gpt_layer_local_spec()",
    "triton": "operations of torch",
    "xformers": "torch.nn.functional.scaled_dot_product_attention",
}
#: What libraries say where they miss a GPU, and what a script chooses instead.
SAID = (
    (r"FlashAttention|flash_attention", 'FlashAttention runs on GPUs only: choose attn_implementation="sdpa"'),
    (r"No available kernel", "this attention runs on GPUs only: choose SDPBackend.FLASH_ATTENTION or SDPBackend.MATH"),
    (r"PREMUL_SUM", "gloo does not scale in a reduction: call set_force_sum_reduction_for_comms(True)"),
    (r"active drivers", "kernels of triton run on GPUs only: choose operations of torch"),
    (r"fp16.*(requires a GPU|not supported)|FP16 .*CUDA", "this library has fp16 on GPUs only: choose bf16"),
    (
        r"not compiled with CUDA|dummy base class|ATen_cuda|support for cuda|accelerator device|NVIDIA driver"
        r"|type torch\.cuda\.",
        "this exists on GPUs only",
    ),
)
#: Functions of libraries that decide whether a script may go its way; what they ask is answered as a GPU's.
BELIEVED = {"is_torch_bf16_gpu_available"}

#: Folders and files of a script that lies among the libraries, as one that runs as ``-m`` may.
_own: list[str] = []


class NeedsGpu(RuntimeError):
    """A script asked for what exists on GPUs only; one line, with what to choose instead."""


@functools.cache
def is_script(file: str) -> bool:
    """Whether code of this file is the script's: none of torch, of an installed library, of Python or of ours."""
    real = os.path.realpath(file)
    if file.startswith("<") or real.startswith(tuple(_own)):
        return not file.startswith("<")
    homes = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values(), str(project.PACKAGE)}
    return not real.startswith(tuple(os.path.realpath(home) + os.sep for home in homes))


def environment() -> dict[str, str]:
    """Variables that have to be set before a library is imported; what is set already stays."""
    ours = {"DS_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in ours.items() if name not in os.environ}


@contextlib.contextmanager
def told(notes: list[str], own: str = "") -> Iterator[None]:
    """Within the block an import of :data:`GPU_ONLY`, or an error of :data:`SAID`, is told in one line."""
    finder = _Finder(notes)
    sys.meta_path.append(finder)
    if own:
        _own.append(os.path.realpath(own))
    is_script.cache_clear()
    try:
        yield
    except Exception as error:
        if (said := _advice(error)) is None:
            raise
        raise NeedsGpu(said) from error
    finally:
        sys.meta_path.remove(finder)
        if own:
            _own.remove(os.path.realpath(own))
        is_script.cache_clear()


class _Finder:
    """Asked last, for a module that nobody has."""

    def __init__(self, notes: list[str]):
        self.notes = notes

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        frame: Any = sys._getframe(1)
        if name not in GPU_ONLY:
            return
        while frame is not None and "importlib" in frame.f_code.co_filename:
            if frame.f_code is importlib.util.find_spec.__code__:
                return  # somebody asks whether it is there
            frame = frame.f_back
        if frame is not None and is_script(frame.f_code.co_filename):
            line = f"{name} runs on GPUs only: choose {GPU_ONLY[name]}"
            if line not in self.notes:
                self.notes.append(line)  # the script may have caught the error, and gone another way
            raise ModuleNotFoundError(line, name=name)


def _advice(error: BaseException) -> str | None:
    """What to say of an error, by its text or that of one that led to it; None of an error of another kind."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NeedsGpu):
            return str(cause)
        if isinstance(cause, ModuleNotFoundError) and cause.name in GPU_ONLY:
            return f"{cause.name} runs on GPUs only: choose {GPU_ONLY[cause.name]}{_where(error)}"
        for pattern, line in SAID:
            if re.search(pattern, str(cause)):
                first = " ".join(str(cause).split())[:120]
                return f"{line}{_where(error)}: {first}"
        cause = cause.__cause__ or cause.__context__
    return None


def _where(error: BaseException) -> str:
    lines = [f for f in traceback.extract_tb(error.__traceback__) if is_script(f.filename)]
    return f" ({os.path.basename(lines[-1].filename)}:{lines[-1].lineno})" if lines else ""
