"""A planned fine-tune of any causal language model, for Transformers' Trainer: script, settings, launchers.

The script is ``scripts/train.py`` with the plan written into it. DeepSpeed's configuration comes from
:mod:`pardemo.planner.files`; FSDP2 is set by Accelerate's and the Trainer's own words. Each file says in its first
lines for which releases it is, those that are installed here: JSON, which has no comments, leaves that to the others.
"""

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pardemo.baichuan2 import Baichuan2Config
from pardemo.finetune import lora
from pardemo.finetune.recipes import recipe, strict_yaml
from pardemo.finetune.recipes.recipe_schema import Recipe
from pardemo.planner.engines import layers_of, outline
from pardemo.planner.job import RankJob
from pardemo.planner.table import PlanRow, Request

SCRIPT, SETTINGS, ARGUMENTS = "train.py", "ds_config.json", "training_arguments.yaml"
_SOURCE = Path(__file__).parent / "scripts" / SCRIPT
_PLAN = re.compile(r"# --- the plan\n.*?# --- end of the plan\n", re.DOTALL)
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}


def texts(request: Request, row: PlanRow, base: Recipe, deepspeed: Mapping[str, Any]) -> dict[str, str]:
    """The files of ``row`` by name.

    Args:
        base: what the plan does not decide: the model, the learning rate and how it changes, when to save.
        deepspeed: DeepSpeed's configuration of the row; without meaning where the row is FSDP2's.

    Raises:
        ValueError: no module of the model has a name that LoRA was asked for.
    """
    head = f"{_about(request, row)}\n# for {_versions(row)}\n"
    model = outline(RankJob(request.job.config, sequence=request.job.sequence))
    sharding = fsdp(type(layers_of(model)[0]).__name__) if row.stage is None else None
    launched = accelerate(request, row, sharding)
    files = {
        SCRIPT: f"{head}{_script(request, row, base, model)}",
        ARGUMENTS: head + strict_yaml.dump(arguments(request, row, base, sharding)),
        "accelerate.yaml" if sharding is None else "accelerate_fsdp.yaml": head + strict_yaml.dump(launched),
        "hostfile": head + _hostfile(request),
        "launch.sh": f"#!/bin/sh\n{head}{_launch(request, row)}",
        "job.slurm": f"#!/bin/bash\n{_slurm(request, head)}",
    }
    return files if sharding is not None else {SETTINGS: json.dumps(deepspeed, indent=1) + "\n", **files}


def fsdp(layer: str) -> dict[str, Any]:
    """FSDP2 layer by layer, in the Trainer's words; Accelerate's have ``fsdp_`` before each of them.

    The state is saved whole: of one in shards the Trainer's ``save_model`` writes nothing, and says nothing.
    """
    return {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": layer, "cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT",
    }  # fmt: skip


def arguments(request: Request, row: PlanRow, base: Recipe, sharding: Mapping[str, Any] | None) -> dict[str, Any]:
    """Transformers' TrainingArguments but for the folder."""
    job, train = request.job, base.train
    again = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    saving = {"save_strategy": "steps", "save_steps": train.save_steps, "save_total_limit": train.save_limit}
    return {
        "max_steps": request.steps,
        "per_device_train_batch_size": row.batch,
        "gradient_accumulation_steps": row.accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.scheduler,
        "warmup_steps": train.warmup_steps,
        "max_grad_norm": job.clipping,
        job.precision: True,
        **(again if row.checkpointing else {}),
        **(saving if train.save_steps else {"save_strategy": "no"}),
        "logging_steps": train.logging_steps,
        "logging_first_step": True,
        "report_to": "none",
        "remove_unused_columns": False,
        "seed": train.seed,
        **({"deepspeed": SETTINGS} if sharding is None else {"fsdp": True, "fsdp_config": dict(sharding)}),
    }


def accelerate(request: Request, row: PlanRow, sharding: Mapping[str, Any] | None) -> dict[str, Any]:
    """Accelerate's configuration: one machine's, to be started on each with its own ``--machine_rank``."""
    cluster = request.cluster
    several = {"main_process_ip": "HOST0", "main_process_port": 29500, "rdzv_backend": "static"}
    settings: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": "DEEPSPEED" if sharding is None else "FSDP",
        "machine_rank": 0, "main_training_function": "main", "num_machines": cluster.hosts,
        "num_processes": cluster.gpus, "use_cpu": False, **(several if cluster.hosts > 1 else {}),
    }  # fmt: skip
    if sharding is not None:
        named = {f"fsdp_{key}": value for key, value in sharding.items()}
        return {**settings, "mixed_precision": request.job.precision, "fsdp_config": named}
    standard = {"deepspeed_multinode_launcher": "standard"} if cluster.hosts > 1 else {}
    stage_3 = row.stage == 3
    return {
        **settings,
        "deepspeed_config": {"deepspeed_config_file": SETTINGS, "zero3_init_flag": stage_3, **standard},
    }


def _script(request: Request, row: PlanRow, base: Recipe, model: Any) -> str:
    """``scripts/train.py`` with the plan in its place."""
    job = request.job
    # of FSDP2's shards the optimizer has the model's own type: fp32, where all parameters are trained
    dtype = "torch.float32" if row.stage is None and job.adapter is None else _DTYPES[job.precision]
    adapter = None
    if job.adapter is not None:
        found = lora.settings(job.adapter, model)
        adapter = {
            "r": found.r, "lora_alpha": found.lora_alpha, "lora_dropout": found.lora_dropout,
            "target_modules": list(job.adapter.target), "fan_in_fan_out": found.fan_in_fan_out,
        }  # fmt: skip
    path = recipe.locate(base.model.path)
    known = not isinstance(job.config, Baichuan2Config) and "/" in base.model.path  # else a built-in model's short name
    named = str(path) if path.is_dir() else base.model.path if known else None
    own = "import pardemo.baichuan2  # noqa: E402, F401, which Transformers 5 does not have\n\n"
    plan = f"""# --- the plan
{own if isinstance(job.config, Baichuan2Config) else ""}MODEL: str | None = {named!r}
SEQUENCE = {job.sequence}
DTYPE = {dtype}
LORA: dict[str, Any] | None = {_lines(adapter)}
ENGINE, RANKS = "{row.engine}", {request.cluster.gpus}
# --- end of the plan
"""
    return _PLAN.sub(lambda _: plan, _SOURCE.read_text(encoding="utf-8"))


def _lines(values: Mapping[str, Any] | None) -> str:
    """Python's text of a dictionary, a key on each line."""
    if values is None:
        return "None"
    return "{\n" + "".join(f'    "{key}": {value!r},\n' for key, value in values.items()) + "}"


def _about(request: Request, row: PlanRow) -> str:
    """What was planned, as a comment."""
    job, cluster = request.job, request.cluster
    trained = "all parameters" if job.adapter is None else f"LoRA of rank {job.adapter.rank}"
    engine = "FSDP2" if row.stage is None else f"ZeRO {row.stage}, offload {row.offload}"
    samples = f"{row.batch} × {row.accumulation} samples of up to {job.sequence} tokens each"
    return (f"# {job.config.model_type}, {trained}, {engine}: {cluster.gpus} × {cluster.gpu.name}, {samples}, "
            f"{request.samples_per_step} a step")  # fmt: skip


def _versions(row: PlanRow) -> str:
    names = {"torch": "torch", "transformers": "Transformers", "accelerate": "Accelerate", "peft": "PEFT"}
    names |= {} if row.stage is None else {"deepspeed": "DeepSpeed"}
    return ", ".join(f"{name} {metadata.version(library).partition('+')[0]}" for library, name in names.items())


def _each(request: Request) -> int:
    return request.cluster.gpus // request.cluster.hosts


def _hostfile(request: Request) -> str:
    """DeepSpeed's: a line for each host with its GPUs; the names are to be replaced."""
    return "".join(f"host{number} slots={_each(request)}\n" for number in range(request.cluster.hosts))


def _launch(request: Request, row: PlanRow) -> str:
    """Launchers for the same job; each line works alone."""
    each, hosts = _each(request), request.cluster.hosts
    place = f" --nnodes {hosts} --rdzv_backend c10d --rdzv_endpoint host0:29500" if hosts > 1 else " --standalone"
    torchrun = f'torchrun{place} --nproc_per_node {each} {SCRIPT} "$@"'
    config = "accelerate_fsdp.yaml" if row.stage is None else "accelerate.yaml"
    other = f'accelerate launch --config_file {config} --machine_rank "${{MACHINE_RANK:-0}}" {SCRIPT} "$@"'
    lines = {"torchrun": torchrun, "accelerate": other}
    if row.stage is not None:
        file = "--hostfile hostfile " if hosts > 1 else ""
        lines["deepspeed"] = f'deepspeed {file}--num_gpus {each} --no_local_rank {SCRIPT} "$@"'
    cases = "\n".join(f"{name}) {line} ;;" for name, line in lines.items())
    usage = f"launch.sh {' | '.join(lines)} --data FILE [{SCRIPT}'s other options]"
    return f"""# sh {usage}
# FILE is absolute, or seen from this folder. torchrun and accelerate are started on every host, accelerate with the
# host's number in MACHINE_RANK.
set -e
cd "$(dirname "$0")"
launcher="${{1:-}}"
[ $# -eq 0 ] || shift
case "$launcher" in
{cases}
*) echo "{usage}" >&2; exit 2 ;;
esac
"""


def _slurm(request: Request, head: str) -> str:
    """A batch script: one torchrun on each host."""
    each = _each(request)
    return f"""#SBATCH --job-name=fine-tune
#SBATCH --nodes={request.cluster.hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --cpus-per-task={4 * each}
{head}# sbatch job.slurm --data FILE; partition, account and time are the cluster's
set -e
cd "$SLURM_SUBMIT_DIR"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc_per_node {each} \\
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:29500" \\
    {SCRIPT} "$@"
"""
