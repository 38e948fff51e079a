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
from pardemo.finetune import lora, recipe, strict_yaml
from pardemo.finetune.recipe import Recipe
from pardemo.peers.accelerate import job_settings
from pardemo.planner.engines import layers_of, outline
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.launch import cluster
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
    notes = (_about(request, row), f"for {_versions(row)}")
    head = "".join(f"# {note}\n" for note in notes)
    hosts = request.cluster.hosts
    each = request.cluster.gpus // hosts
    model = outline(RankJob(request.job.config, sequence=request.job.sequence))
    sharding = None
    started = job_settings.settings("DEEPSPEED" if row.stage is not None else "FSDP", request.cluster.gpus, hosts)
    if row.stage is not None:
        config, launched = "accelerate.yaml", job_settings.deepspeed(started, SETTINGS, row.stage)
    else:
        sharding = fsdp(type(layers_of(model)[0]).__name__)
        config, launched = "accelerate_fsdp.yaml", job_settings.fsdp(started, sharding, request.job.precision)
    usage = f"--data FILE [{SCRIPT}'s other options]"
    about_data = "FILE is absolute, or seen from this folder"
    theirs = None if sharding else f"--no_local_rank {SCRIPT}"
    torchrun = f"torchrun --nproc_per_node {each} {cluster.torchrun(hosts, 'SLURM_NODEID')}"
    submitted = f"sbatch job.slurm {usage}; {about_data}"
    files = {
        SCRIPT: f"{head}{_script(request, row, base, model)}",
        ARGUMENTS: head + strict_yaml.dump(arguments(request, row, base, sharding)),
        config: head + strict_yaml.dump(launched),
        "hostfile": head + cluster.hostfile(hosts, each),
        "launch.sh": cluster.shell(hosts, each, SCRIPT, config, theirs, usage, [*notes, about_data]),
        "job.slurm": cluster.slurm(
            hosts, each, "fine-tune", f'{torchrun} {SCRIPT} "$@"', [*notes, submitted], file="job.slurm"
        ),
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
    saving = {"save_strategy": "steps", "save_steps": train.save_steps, "save_total_limit": train.save_total_limit}
    return {
        "max_steps": request.steps,
        "per_device_train_batch_size": row.batch,
        "gradient_accumulation_steps": row.accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
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


def _script(request: Request, row: PlanRow, base: Recipe, model: Any) -> str:
    """``scripts/train.py`` with the plan in its place."""
    job = request.job
    # of FSDP2's shards the optimizer has the model's own type: fp32, where all parameters are trained
    dtype = "torch.float32" if row.stage is None and job.adapter is None else _DTYPES[job.precision]
    adapter = None
    if job.adapter is not None:
        of = job.adapter
        found = lora.config(model, of.target, r=of.rank, lora_alpha=of.alpha, lora_dropout=of.dropout)
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
    """What was planned."""
    job, cluster = request.job, request.cluster
    trained = "all parameters" if job.adapter is None else f"LoRA of rank {job.adapter.rank}"
    engine = "FSDP2" if row.stage is None else f"ZeRO {row.stage}, offload {row.offload}"
    samples = f"{row.batch} × {row.accumulation} samples of up to {job.sequence} tokens each"
    return (f"{job.config.model_type}, {trained}, {engine}: {cluster.gpus} × {cluster.gpu.name}, {samples}, "
            f"{request.samples_per_step} a step")  # fmt: skip


def _versions(row: PlanRow) -> str:
    names = {"torch": "torch", "transformers": "Transformers", "accelerate": "Accelerate", "peft": "PEFT"}
    names |= {} if row.stage is None else {"deepspeed": "DeepSpeed"}
    return ", ".join(f"{name} {metadata.version(library).partition('+')[0]}" for library, name in names.items())
