"""DeepSpeed's own ZeRO inside a World: no launcher, no mpi4py; on CPU ranks in bf16 with torch's AdamW.

Importing this loads DeepSpeed and changes nothing of the process; :func:`prepare` does, where an engine is made.
"""

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pardemo import compat, extras, project
from pardemo.groups import Groups
from pardemo.world.imports import compile_at_first_call

# it chooses its device while it is imported, once for the process; what is not said to it, it guesses and tells
_device = os.environ.get("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
with (
    project.environment({"DS_ACCELERATOR": _device}),
    warnings.catch_warnings(),
    compile_at_first_call(),
    extras.needed_by(__name__),
):
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.utils import logger

    # DeepSpeed does without it, too. Every engine asks for it, and thus for torch's compiler: here once, not per rank
    with contextlib.suppress(ImportError):
        import deepspeed.runtime.zero.muon.muon_optimizer

#: What keeps DeepSpeed's ZeRO-3 from holding small parameters, and parameters that are used again soon, gathered.
ALWAYS_SHARDED = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 0,
}


def prepare() -> None:
    """Sets DeepSpeed up in this process: quiet, and without a compiler. A second call changes nothing.

    What makes an engine here calls it; who lets another library make one (Accelerate, the Trainer) calls it before.
    """
    logger.setLevel(logging.ERROR)
    # torch has new names for two collectives, which DeepSpeed calls by the old ones in every step
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated")
    # Which of its operators can be compiled here is asked by one function alone, its communication's, for the
    # shared-memory operator. That serves inference, takes half a minute to build, and a build that was killed leaves a
    # lock behind which every later start waits. Training goes through torch.distributed either way. None is the answer:
    # else the first one who asks waits for compilers, and reads in a notebook what a linker says of a library that is
    # not there.
    deepspeed.ops.__compatible_ops__ = {}


def zero_settings(stage: int, batch: int = 8, lr: float = 1e-3, micro_batches: int = 1, **zero: Any) -> dict[str, Any]:
    """A configuration for bf16 training under ``stage``; ``zero`` are further keys of ``zero_optimization``.

    The reduce bucket is small (DeepSpeed's default of 5e8 elements is 1 GB that stays allocated), everything else
    as DeepSpeed has it by default.
    """
    return {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 0.0,  # left out, this release clips at 1.0, in silence
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1 << 20, **zero},
    }


def engine(module: nn.Module, settings: dict[str, Any], groups: Any = None) -> "deepspeed.DeepSpeedEngine":
    """A DeepSpeed engine over all ranks; with ``groups`` over the data-parallel ones of a tensor-parallel model.

    ``groups`` are a :class:`~pardemo.groups.Groups`, or anything with process groups ``tp`` and ``dp``.

    Raises:
        RuntimeError: the engine does not run the stage, or the number of ranks, that it was asked for.
    """
    prepare()
    made, *_ = deepspeed.initialize(
        model=module,
        model_parameters=[p for p in module.parameters() if p.requires_grad],
        config=settings,
        mpu=None if groups is None else model_parallel_unit(groups),
    )
    ranks = torch.distributed.get_world_size(None if groups is None else groups.dp)
    assert_runs(made, settings["zero_optimization"]["stage"], ranks)
    return made


def assert_runs(running: "deepspeed.DeepSpeedEngine", stage: int, ranks: int) -> None:
    """Raises RuntimeError where an engine runs another ZeRO stage, or on other ranks, than it was asked for."""
    if (actual := running.zero_optimization_stage()) != stage or running.dp_world_size != ranks:
        raise RuntimeError(f"asked for stage {stage} on {ranks} ranks, DeepSpeed runs stage {actual} on "
                           f"{running.dp_world_size}")  # fmt: skip


def close(running: "deepspeed.DeepSpeedEngine") -> None:
    """Ends an engine, and what it changed for the whole process: :func:`give_back_linear`."""
    running.destroy()
    give_back_linear()
    compat.forget_hpz(deepspeed.utils.groups)


def give_back_linear() -> None:
    """Gives torch its own linear function back.

    Stage 3 replaces ``torch.nn.functional.linear`` and leaves it so. What the process runs later, without DeepSpeed,
    would keep the inputs of frozen weights and compute their gradients.
    """
    replacing = deepspeed.zero.partition_parameters.InsertPostInitMethodToModuleSubClasses
    if (linear := getattr(replacing, "linear_bk", None)) is not None:
        nn.functional.linear = linear


def computes_on(device: torch.device) -> bool:
    """Whether DeepSpeed, which chooses its devices once for a process, computes on this one's kind."""
    return deepspeed.accelerator.get_accelerator().device_name() == device.type


def second_copy(parameter: Any) -> tuple[float, list[int]] | None:
    """Into how many parts hpZ cuts the second copy of a parameter of ZeRO-3, and over which ranks; None without one."""
    if (copy := parameter.ds_secondary_tensor) is None:
        return None
    group = parameter.ds_zero_param_process_group
    return parameter.ds_numel / copy.numel(), torch.distributed.get_process_group_ranks(group)


def states(running: "deepspeed.DeepSpeedEngine") -> dict[str, list[torch.Tensor]]:
    """The tensors of each kind of model state that this rank's engine keeps, between backward and step."""
    optimizer, parameters = running.optimizer, list(running.module.parameters())
    fields = vars(optimizer)  # each stage's optimizer has others
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    groups += [fields.get(name, []) for name in ("fp32_groups_flat_partition", "fp32_partitioned_groups_flat")]
    groups += fields.get("fp32_groups", [])
    shards = [p.ds_tensor for p in parameters if hasattr(p, "ds_tensor")]
    gradients = [p.grad for p in parameters] + [fields.get("grad_partitions_flat_buffer")]
    gradients += [gradient for group in fields.get("averaged_gradients", {}).values() for gradient in group or ()]
    return {
        "parameters": [*parameters, *shards, *filter(torch.is_tensor, fields.get("fp16_partitioned_groups_flat", []))],
        "gradients": [*filter(torch.is_tensor, gradients)],
        "optimizer states": [p for group in groups for p in group]
        + [v for state in optimizer.optimizer.state.values() for v in state.values() if torch.is_tensor(v) and v.dim()],
    }


def make_states(running: "deepspeed.DeepSpeedEngine") -> None:
    """Makes the optimizer's states of stages 1 and 2, which else the first step makes; stage 0 has them from the start.

    Before any training: the update is by gradients of 0.
    """
    parts = vars(running.optimizer).get("single_partition_of_fp32_groups", [])
    for part in parts:
        part.grad = torch.zeros_like(part)
    if parts:
        running.optimizer.optimizer.step()
    for part in parts:
        part.grad = None


@contextlib.contextmanager
def gathered_parameters(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The parameters of a module under ZeRO-3, gathered within the block. Collective."""
    parameters = list(module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        yield parameters


def model_parallel_unit(groups: Any) -> SimpleNamespace:
    """Groups ``tp`` and ``dp`` in the form that ``deepspeed.initialize(mpu=…)`` takes."""
    unit = {}
    for name, group in (("model", groups.tp), ("data", groups.dp)):
        unit[f"get_{name}_parallel_group"] = lambda group=group: group
        unit[f"get_{name}_parallel_rank"] = partial(torch.distributed.get_rank, group)
        unit[f"get_{name}_parallel_world_size"] = partial(torch.distributed.get_world_size, group)
    return SimpleNamespace(**unit)


def checkpointing(groups: Groups, partition: bool) -> Any:
    """DeepSpeed's activation checkpointing over a tensor-parallel group; ``partition`` is its P_a.

    Its settings live in module globals. Run ``checkpoint(block, x)`` of what is returned, and ``reset()`` when done.
    """
    prepare()
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False)
    deepspeed.checkpointing.configure(
        model_parallel_unit(groups),
        partition_activations=partition,
        contiguous_checkpointing=False,
        checkpoint_in_cpu=False,
        synchronize=False,
        profile=False,
    )
    return deepspeed.checkpointing
