"""Checks, before any rank starts, that DeepSpeed would honour a configuration of its own.

DeepSpeed ignores a misspelt key of its older sections without a word; what it does refuse, it refuses on every rank,
with a traceback. So its own classes are asked for the sections that have one, and for the others which keys it reads.
"""

import importlib
import inspect
import typing
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ValidationError

from pardemo import argument_checks, compat, project

_CLASSES = {
    "zero_optimization": "deepspeed.runtime.zero.config:DeepSpeedZeroConfig",
    "fp16": "deepspeed.runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "bfloat16": "deepspeed.runtime.precision_config:DeepSpeedBF16Config",
    "comms_logger": "deepspeed.comm.config:CommsLoggerConfig",
    "compile": "deepspeed.compile.config:CompileConfig",
    "hybrid_engine": "deepspeed.runtime.config:HybridEngineConfig",
    "tensor_parallel": "deepspeed.runtime.tensor_parallel.config:TPTrainingConfig",
    "tensorboard": "deepspeed.monitor.config:TensorBoardConfig",
    "wandb": "deepspeed.monitor.config:WandbConfig",
    "csv_monitor": "deepspeed.monitor.config:CSVConfig",
    "comet": "deepspeed.monitor.config:CometConfig",
}
#: Sections without a class, every key of which DeepSpeed looks for when it reads them.
_READ_BY_KEY = ("activation_checkpointing", "aio", "checkpoint", "data_types", "flops_profiler")
_KEYS = {
    "optimizer": {"type", "params", "legacy_fusion"},
    "scheduler": {"type", "params"},
    "pipeline": {"stages", "partition", "seed_layers", "activation_checkpoint_interval", "pipe_partitioned",
                 "grad_partitioned", "use_reentrant"},
    "torch_autocast": {"enabled", "dtype", "lower_precision_safe_modules"},
    "timers": {"throughput"},
}  # fmt: skip


def check_settings(settings: Mapping[str, Any], world_size: int, on_cpu: bool = True) -> None:
    """Raises ValueError, in one line that names the key, for settings that DeepSpeed would ignore or refuse.

    A key that does not exist or has been removed, a value that its class refuses, a stage other than 0 to 3, batch
    sizes that contradict one another, fp16 on a CPU. ``"auto"`` is left to whoever fills it in.
    """
    import pardemo.peers.deepspeed.engine  # noqa: F401, DeepSpeed, without a word about the device that it would guess

    _refuse_removed(settings)
    refuse_unknown(settings, _keys_read()[""], "the configuration")
    for name in (*_CLASSES, *_READ_BY_KEY, *_KEYS):
        if not isinstance(settings.get(name, {}), Mapping):
            raise ValueError(f"{name} must be a section in braces, not {settings[name]!r}")
    stage = settings.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise ValueError(f"zero_optimization.stage is 0, 1, 2 or 3, not {stage!r}")
    for name, section in settings.items():
        if name in _CLASSES:
            _validate(_CLASSES[name], section, name)
        elif known := _keys_read().get(name) or _KEYS.get(name):
            refuse_unknown(section, known, name)
    _check_adam(settings.get("optimizer", {}))
    _check_scalars(settings)
    _check_batch(settings, world_size)
    if on_cpu and settings.get("fp16", {}).get("enabled") is True:
        raise ValueError("fp16.enabled: DeepSpeed refuses fp16 on a CPU; use bf16")


def refuse_unknown(given: Iterable[str], known: Collection[str], section: str) -> None:
    """Raises ValueError for a key that nobody knows, with the nearest that somebody does."""
    for key in given:
        if key not in known:
            raise ValueError(f"{section} has no key {key!r}{argument_checks.nearest(key, known, '')}")


def _refuse_removed(settings: Mapping[str, Any]) -> None:
    from deepspeed.runtime import config

    try:
        compat.refuse_removed_keys(config, settings)
    except config.DeepSpeedConfigError as error:
        raise ValueError(project.one_line(error)) from None


def _validate(path: str, section: Mapping[str, Any], name: str) -> None:
    """Has DeepSpeed's class for the section read it, and tells its first objection in one line."""
    module, _, kind = path.partition(":")
    kind = getattr(importlib.import_module(module), kind)
    try:
        kind(**section)
        return
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
    except Exception as error:  # what its own checks of old keys raise
        raise ValueError(f"{name}: {project.one_line(error)}") from None
    *above, last = details["loc"] or ("",)
    if details["type"] == "extra_forbidden":
        refuse_unknown([str(last)], _names_at(kind, above), ".".join([name, *map(str, above)]))
    if details["type"] == "value_error":
        raise ValueError(details["msg"].removeprefix("Value error, "))
    key, message = ".".join(map(str, (name, *details["loc"]))), details["msg"].replace("Input should", "must", 1)
    raise ValueError(f"{key} {message}, not {details['input']!r}")


def _names_at(kind: type[BaseModel], above: Iterable[Any]) -> list[str]:
    """The keys of the section that lies so deep below a class's."""
    for part in above:
        field = next(f for name, f in kind.model_fields.items() if part in (name, f.alias))
        kind = next(k for k in (field.annotation, *typing.get_args(field.annotation)) if hasattr(k, "model_fields"))
    return [name for known, field in kind.model_fields.items() for name in (known, field.alias) if name]


class _RecordingDict(dict):
    """A section that records which keys DeepSpeed looks for in it."""

    def __init__(self, **values: Any):
        super().__init__(values)
        self.names: set[str] = set()

    def __contains__(self, key: Any) -> bool:
        self.names.add(key)
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def keys(self) -> "_RecordingDict":  # type: ignore[override] # DeepSpeed asks "in settings.keys()"
        return self

    def __copy__(self) -> "_RecordingDict":
        return self


@lru_cache
def _keys_read() -> dict[str, frozenset[str]]:
    """The keys that DeepSpeed reads: of the configuration (under ``""``), and of the sections that have no class."""
    from deepspeed.runtime.config import DeepSpeedConfig

    sections = {name: _RecordingDict() for name in _READ_BY_KEY}
    settings = _RecordingDict(train_micro_batch_size_per_gpu=1, **sections)
    DeepSpeedConfig(settings)
    settings.names.add("sequence_parallel_size")  # asked for only inside a job
    return {name: frozenset(section.names) for name, section in {"": settings, **sections}.items()}


def _check_adam(optimizer: Mapping[str, Any]) -> None:
    """The article's optimizer: what neither torch's nor DeepSpeed's form of it takes."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from torch.optim import AdamW

    if not isinstance(optimizer.get("params", {}), Mapping):
        raise ValueError(f"optimizer.params must be a section in braces, not {optimizer['params']!r}")
    if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        known = {name for kind in (AdamW, DeepSpeedCPUAdam, FusedAdam) for name in inspect.signature(kind).parameters}
        refuse_unknown(optimizer.get("params", {}), known | {"torch_adam", "adam_w_mode"}, "optimizer.params")


def _check_scalars(settings: Mapping[str, Any]) -> None:
    """DeepSpeed takes these as they come, and fails, or does something else, at the first step."""
    from deepspeed.runtime import constants

    defaults = {getattr(constants, name.removesuffix("_DEFAULT"), None): default
                for name, default in vars(constants).items() if name.endswith("_DEFAULT")}  # fmt: skip
    for name, value in settings.items():
        default = defaults.get(name)
        if value == "auto" or not isinstance(default, (bool, int, float)):
            continue
        if isinstance(default, bool) != isinstance(value, bool) or not isinstance(value, (bool, int, float)):
            kind = "true or false" if isinstance(default, bool) else "a number"
            raise ValueError(f"{name} must be {kind}, not {value!r}")


def _check_batch(settings: Mapping[str, Any], world_size: int) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    batch, micro, steps = (settings.get(name) for name in names)
    for name, value in zip(names, (batch, micro, steps), strict=True):
        if value not in (None, "auto"):
            argument_checks.whole_number(value, name)
    if batch is None and micro is None:
        raise ValueError("train_batch_size or train_micro_batch_size_per_gpu has to be given")
    if isinstance(batch, int) and isinstance(micro, int):
        steps = steps if isinstance(steps, int) else max(1, batch // (micro * world_size))
        if batch != micro * steps * world_size:
            raise ValueError(f"train_batch_size {batch} is not train_micro_batch_size_per_gpu {micro} × "
                             f"gradient_accumulation_steps {steps} × {world_size} ranks = "
                             f"{micro * steps * world_size}")  # fmt: skip
