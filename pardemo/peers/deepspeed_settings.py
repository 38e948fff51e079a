"""Is a DeepSpeed configuration one that DeepSpeed would honour? Asked before any rank starts.

DeepSpeed ignores a misspelt section without a word; what it does refuse, it refuses on every rank, with a traceback.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_SECTIONS = {
    "activation_checkpointing", "aio", "autotuning", "bf16", "checkpoint", "comet", "comms_logger", "compile",
    "compression_training", "csv_monitor", "data_efficiency", "data_types", "elasticity", "flops_profiler", "fp16",
    "hybrid_engine", "optimizer", "pipeline", "scheduler", "tensor_parallel", "tensorboard", "torch_autocast",
    "wall_clock_breakdown", "wandb", "zero_optimization",
}  # fmt: skip


def check(settings: Mapping[str, Any], world_size: int, on_cpu: bool = True) -> None:
    """Raises ValueError, in one line that names the key, for settings that DeepSpeed would ignore or refuse.

    A key that does not exist, a stage other than 0 to 3, batch sizes that contradict one another, fp16 on a CPU.
    """
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    known = {value for value in vars(constants).values() if isinstance(value, str) and value.isidentifier()}
    refuse_unknown(settings, known | _SECTIONS, "the configuration")
    zero = settings.get("zero_optimization", {})
    if not isinstance(zero, Mapping):
        raise ValueError(f"zero_optimization must be a section in braces, not {zero!r}")
    fields = DeepSpeedZeroConfig.model_fields
    refuse_unknown(zero, {*fields, *(f.alias for f in fields.values() if f.alias)}, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"zero_optimization.stage is 0, 1, 2 or 3, not {stage!r}")
    _check_batch(settings, world_size)
    for name in ("fp16", "bf16", "optimizer"):
        if not isinstance(settings.get(name, {}), Mapping):
            raise ValueError(f"{name} must be a section in braces, not {settings[name]!r}")
    if "optimizer" in settings:
        refuse_unknown(settings["optimizer"], {"type", "params", constants.LEGACY_FUSION}, "optimizer")
    if on_cpu and settings.get("fp16", {}).get("enabled") is True:
        raise ValueError("fp16.enabled: DeepSpeed refuses fp16 on a CPU; use bf16")


def refuse_unknown(given: Iterable[str], known: set[str], where: str) -> None:
    """Raises ValueError for a key that nobody knows, with the nearest that somebody does."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            raise ValueError(f"{where} has no key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))


def _check_batch(settings: Mapping[str, Any], world_size: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (settings.get(name) for name in names)
    for name, value in zip(names, (whole, micro, steps), strict=True):
        if value not in (None, "auto") and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    numbers = [value for value in (whole, micro) if isinstance(value, int)]
    if not numbers and "auto" not in (whole, micro):
        raise ValueError("train_batch_size or train_micro_batch_size_per_gpu has to be given")
    if isinstance(whole, int) and isinstance(micro, int):
        steps = steps if isinstance(steps, int) else max(1, whole // (micro * world_size))
        if whole != micro * steps * world_size:
            raise ValueError(
                f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} × gradient_accumulation_steps "
                f"{steps} × {world_size} ranks = {micro * steps * world_size}"
            )
