"""Adapts libraries to CPU ranks in place of GPUs, and says in one line what cannot be had there."""

import contextlib
import functools
import importlib.machinery
import importlib.util
import logging
import os
import re
import site
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from pardemo import compat, project

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
ERRORS = (
    (
        r"FlashAttention|flash_attn|flash_attention_[23]",
        'FlashAttention runs on GPUs only: choose attn_implementation="sdpa"',
    ),
    (r"No available kernel", "this attention runs on GPUs only: choose SDPBackend.FLASH_ATTENTION or SDPBackend.MATH"),
    (r"PREMUL_SUM", "gloo does not scale in a reduction: call set_force_sum_reduction_for_comms(True)"),
    (r"active drivers", "kernels of triton run on GPUs only: choose operations of torch"),
    (r"fp16.*(requires a GPU|not supported)|FP16 .*CUDA", "this library has fp16 on GPUs only: choose bf16"),
    (
        r"sequence parallel not supported by torch",
        "Megatron-core cuts sequences with Apex's norms, which run on GPUs only: choose sequence_parallel=False",
    ),
    (
        r"not compiled with CUDA|dummy base class|ATen_cuda|support for cuda|accelerator device|NVIDIA driver"
        r"|type torch\.cuda\.",
        "this exists on GPUs only",
    ),
)
#: Libraries that are told of GPUs as the script is: they choose devices and the backend for it. Without a GPU
#: Accelerate takes each rank to be alone, in silence, and Lightning and timm refuse a script that asks for one.
TOLD_OF_GPUS = {"accelerate", "lightning", "lightning_fabric", "litgpt", "pytorch_lightning", "timm"}
#: Functions of libraries that decide whether a script may go its way; what they ask is answered as a GPU's.
TOLD_OF_GPUS_IN = {
    "is_torch_bf16_gpu_available",  # Transformers: bf16=True
    "_check_module_states_for_sync_module_states",  # FSDP1: sync_module_states=True
}

#: Folders and files of a script that lies among the libraries, as one that runs as ``-m`` may.
_own_folders: list[str] = []


class NeedsGpu(RuntimeError):
    """Raised where a script asks for what exists on GPUs only; says in one line what to choose instead."""


@functools.cache
def is_script(file: str) -> bool:
    """Whether a file is the script's: not torch's, an installed library's, Python's or ours."""
    real = os.path.realpath(file)
    if file.startswith("<") or real.startswith(tuple(_own_folders)):
        return not file.startswith("<")
    return not real.startswith(library_folders())


@functools.cache
def library_folders() -> tuple[str, ...]:
    """Returns the folders of libraries: the environment's, torch's own, and those that pip has filled.

    A module that is installed to be edited lies elsewhere, and is the reader's own.
    """
    installed = {*site.getsitepackages(), site.getusersitepackages(), *sysconfig.get_paths().values()}
    filled = {path for path in sys.path if next(Path(path or ".").glob("*.dist-info"), None)}
    torch = os.path.dirname(sys.modules["torch"].__file__ or "") if "torch" in sys.modules else ""
    folders = {*installed, *filled, torch, str(project.PACKAGE)}
    return tuple(os.path.realpath(path) + os.sep for path in folders if path)


@contextlib.contextmanager
def own_folder(path: str) -> Iterator[None]:
    """Treats code below this folder as the script's within the block, also where it lies among the libraries."""

    def forget() -> None:
        is_script.cache_clear()
        library_folders.cache_clear()

    forget()
    folder = f"{os.path.realpath(path)}{os.sep}"
    if path and folder.startswith(library_folders()):  # a folder around an environment is not meant
        _own_folders.append(folder)
    try:
        yield
    finally:
        _own_folders.clear()
        forget()


def library_environment() -> dict[str, str]:
    """Returns variables that have to be set before a library is imported; keeps those that are set."""
    ours = {"DS_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return {name: value for name, value in ours.items() if name not in os.environ}


@contextlib.contextmanager
def adjusted_libraries(notes: list[str]) -> Iterator[None]:
    """Within the block an import of :data:`GPU_ONLY`, or an error of :data:`ERRORS`, is told in one line."""
    changes = contextlib.ExitStack()
    first, last = _AdjustingFinder(changes, notes), _RefusingFinder(notes)
    sys.meta_path.insert(0, first)
    sys.meta_path.append(last)
    quiet = logging.getLogger("megatron.core.tensor_parallel.random")  # wonders that the CPU's generator is used
    changes.callback(quiet.setLevel, quiet.level)
    quiet.setLevel(logging.ERROR)
    with changes, warnings.catch_warnings():
        # torch has new names for two collectives, and says so at each call of a library by the old ones
        warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated")
        try:
            for name in ADJUSTED.keys() & set(sys.modules):
                ADJUSTED[name](sys.modules[name], changes, notes)
            yield
        except Exception as error:
            if (advice := _advice(error)) is None:
                raise
            raise NeedsGpu(advice) from error
        finally:
            sys.meta_path.remove(first)
            sys.meta_path.remove(last)


def _deepspeed(deepspeed: Any, changes: contextlib.ExitStack, notes: list[str]) -> None:
    """Gives DeepSpeed torch's Adam in place of one compiled for a GPU, and compiles no operator for inference."""
    import torch

    begin = deepspeed.initialize

    def initialize(*args: Any, **kwargs: Any) -> Any:
        note_once(notes, "DeepSpeed on GPUs → its own accelerator for CPUs, over gloo")
        return begin(*args, **kwargs)

    changes.enter_context(compat.replaced(deepspeed, "initialize", initialize))

    def fused_adam(params: Any, *, bias_correction: bool = True, adam_w_mode: bool = True, set_grad_none: bool = True,
                   **options: Any) -> Any:  # fmt: skip
        if not bias_correction:
            raise NeedsGpu("FusedAdam without bias_correction runs on GPUs only")
        note_once(notes, "DeepSpeed's FusedAdam → torch.optim.AdamW, fused: it has no kernel of its own for CPUs")
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(params, fused=True, **options)

    changes.enter_context(compat.replaced(deepspeed.ops.adam, "FusedAdam", fused_adam))
    changes.enter_context(compat.replaced(deepspeed.ops, "__compatible_ops__", {}))


def _fsdp2(fsdp: Any, changes: contextlib.ExitStack, notes: list[str]) -> None:
    """A factor of the script's own is nccl's to apply within a reduction; gloo's sum is divided after it."""
    real = fsdp.FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        note_once(notes, "FSDP2's set_gradient_divide_factor → gradients are divided after they are summed, not within")
        real(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    changes.enter_context(compat.replaced(fsdp.FSDPModule, real.__name__, set_gradient_divide_factor))


def _context_parallel(attention: Any, changes: contextlib.ExitStack, notes: list[str]) -> None:
    """torch's ring attention knows kernels of GPUs: here it goes round with the CPU's, and sends the same."""
    from torch.distributed.tensor import DTensor

    forward, backward = compat.attention_cpu.default, compat.attention_cpu_backward.default
    ring, back = (getattr(attention, f"_templated_ring_attention{part}") for part in ("", "_backward"))

    def attend(op: Any, args: Any, kwargs: Any) -> Any:
        mesh, placements = args[0].device_mesh, args[0].placements
        local = [compat.local_tensor(value) if isinstance(value, DTensor) else value for value in args]
        names = [argument.name for argument in compat.op_schema(op).arguments]
        given = {"dropout_p": 0.0, "is_causal": False, **dict(zip(names, local, strict=False)), **kwargs}
        if given.pop("attn_mask", None) is not None:
            raise ValueError("context_parallel takes no attention mask")
        options = {} if op is forward else {"grad_out_name": "grad_out"}
        note_once(notes, "context_parallel's flash attention → the ring of torch with the CPU's flash attention")
        results = (ring if op is forward else back)(mesh.get_group(), 2, op, **given, **options)
        return tuple(DTensor.from_local(result, mesh, placements, run_check=False) for result in results)

    for op in (forward, backward):
        attention.custom_ops[op] = attend
        changes.callback(attention.custom_ops.pop, op)


def _experts(dispatcher: Any, changes: contextlib.ExitStack, notes: list[str]) -> None:
    """Megatron-core's experts: how many tokens go where leaves a GPU as numbers, and on a CPU would stay tensors."""
    utils = sys.modules["megatron.core.transformer.moe.moe_utils"]
    move = utils.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        tensor = move(tensor, as_numpy, record_stream)
        return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor

    changes.enter_context(compat.replaced(dispatcher, move.__name__, moved))
    if not hasattr(utils, "te_general_gemm"):  # 0.16 asks whether it is None where Transformer Engine is not there
        changes.enter_context(compat.replaced(utils, "te_general_gemm", None))


def note_once(notes: list[str], line: str) -> None:
    """Adds a line to a run's notes, unless it is there."""
    if line not in notes:
        notes.append(line)


#: What is changed in libraries once they are imported.
ADJUSTED = {
    "deepspeed": _deepspeed,
    "megatron.core.transformer.moe.token_dispatcher": _experts,
    "torch.distributed.fsdp": _fsdp2,
    "torch.distributed.tensor.experimental._context_parallel._attention": _context_parallel,
}


class _AdjustingFinder:
    """Finds libraries before others do, to change them once they are imported."""

    def __init__(self, changes: contextlib.ExitStack, notes: list[str]):
        self.changes, self.notes = changes, notes

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        spec: Any = importlib.machinery.PathFinder.find_spec(name, path) if name in ADJUSTED else None
        if spec is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                ADJUSTED[name](module, self.changes, self.notes)

            spec.loader.exec_module = exec_module
        return spec


class _RefusingFinder:
    """Refuses, after all other finders, a module that nobody has."""

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
            note_once(self.notes, line)  # the script may catch the error, and go another way
            raise ModuleNotFoundError(line, name=name)


def _advice(error: BaseException) -> str | None:
    """Returns advice on an error by its text or that of one that led to it; None for errors of another kind."""
    cause: BaseException | None = error
    at_line = f" ({line})" if (line := script_line(error)) else ""
    while cause is not None:
        if isinstance(cause, NeedsGpu):
            return str(cause)
        if isinstance(cause, ModuleNotFoundError) and cause.name in GPU_ONLY:
            return f"{cause.name} runs on GPUs only: choose {GPU_ONLY[cause.name]}{at_line}"
        for pattern, advice in ERRORS:
            if re.search(pattern, str(cause)):
                first = " ".join(str(cause).split())[:120]
                return f"{advice}{at_line}: {first}"
        cause = cause.__cause__ or cause.__context__
    return None


def script_line(error: BaseException) -> str:
    """Returns the script's innermost line that an exception came through, as ``train.py:7``; empty without one."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if is_script(frame.filename)]
    return f"{os.path.basename(lines[-1].filename)}:{lines[-1].lineno}" if lines else ""
