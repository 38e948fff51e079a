"""Writes the files of a plan: DeepSpeed's and Accelerate's configuration, the recipe, and ways to launch it."""

import json
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pardemo import extras, project
from pardemo.baichuan2 import Baichuan2Config
from pardemo.finetune import recipe, strict_yaml
from pardemo.finetune.recipe import Recipe
from pardemo.peers.accelerate import job_settings
from pardemo.planner.dry_run.engines import layers_of, lora_config, outline
from pardemo.planner.fine_tune.plan_table import PlanRow, Request
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.fine_tune_step import overlaps
from pardemo.planner.layouts.job import BUCKET_ELEMENTS
from pardemo.planner.layouts.launch import job_scripts

with extras.needed_by(__name__):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING


_RUN = "pardemo.finetune recipe.yaml"
SCRIPT, SETTINGS, ARGUMENTS = "train.py", "ds_config.json", "training_arguments.yaml"
_SOURCE = Path(__file__).parent / "scripts" / SCRIPT
_PLAN = re.compile(r"# --- the plan\n.*?# --- end of the plan\n", re.DOTALL)
_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
#: As Transformers' Trainer resolves DeepSpeed's "auto": its AdamW.
ADAMW = {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
#: Dynamic loss scaling, as the article's recipe has it: fp16 has no gradients below 6e-8 without.
FP16 = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


def refuse_unwritable(request: Request, base: Recipe) -> None:
    """Raises ValueError for a job that no files are written for.

    Baichuan2 with LoRA under DeepSpeed is ``pardemo finetune``'s; any other is for Transformers' Trainer.
    """
    job, tuning = request.job, request.job.tuning
    if request.tp * request.pp > 1:
        raise ValueError(f"--write: pardemo finetune and Transformers' Trainer run ZeRO and FSDP2 alone; Megatron-LM "
                         f"would run --tp {request.tp} --pp {request.pp}")  # fmt: skip
    if tuning.base != "bf16":
        four = (
            "; write it without --base, and start its train.py with --four-bit" if tuning.base.startswith("nf4") else ""
        )
        raise ValueError(f"--write: the files are for weights in bf16, not in {tuning.base}{four}")
    if tuning.optimizer != "adamw" or tuning.fused_loss or tuning.embeddings:
        other = "--fused-loss" if tuning.fused_loss else f"--optimizer {tuning.optimizer}"
        other = "--embeddings" if tuning.embeddings else other
        raise ValueError(f"--write: the files are for AdamW, whole logits and adapters alone; leave out {other}")
    if recipe.locate(base.model.path).is_file():
        raise ValueError(f"--write: what trains needs the model's folder, not a file: {base.model.path}")
    if type(job.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--write: Transformers has no causal language model {job.config.model_type}")


def write_plan(folder: str | Path, request: Request, row: PlanRow, base: Recipe) -> list[str]:
    """Writes the files of ``row`` into ``folder`` and returns their names.

    Each is written whole or not at all. What runs is ``pardemo finetune`` for Baichuan2 with LoRA under DeepSpeed, by a
    recipe, and ``train.py`` with Transformers' Trainer for all else; ``ds_config.json`` and Accelerate's configuration
    stand alone.

    Args:
        base: what the plan does not decide: the model's folder, the learning rate and how it changes, when to save.

    Raises:
        OSError: the folder cannot be written.
        ValueError: see :func:`refuse_unwritable`; or no module of the model has a name that LoRA was asked for.
    """
    refuse_unwritable(request, base)
    job, hosts, host_gpus = request.job, request.machine.hosts, request.machine.host_gpus
    texts: dict[str, str] = {}
    notes: list[str] = []
    head, config = "", "accelerate.yaml"
    started = job_settings.settings("FSDP" if row.stage is None else "DEEPSPEED", request.machine.gpus, hosts)
    if row.stage is not None:
        texts[SETTINGS] = json.dumps(deepspeed_configuration(request, row, base), indent=1) + "\n"
        launched = job_settings.deepspeed(started, SETTINGS, row.stage)
    if row.stage is not None and isinstance(job.config, Baichuan2Config) and job.tuning.lora:
        texts["recipe.yaml"] = strict_yaml.dump(recipe.to_dict(as_recipe(request, row, base)))
        script, name, usage = f"-m {_RUN}", "pardemo", "[option …]"
        deepspeed_script: str | None = f"--module {_RUN}"
        shell_notes = slurm_notes = notes
    else:
        model = outline(RankJob(job.config, sequence=job.sequence))
        sharding: dict[str, Any] | None = None
        if row.stage is None:
            sharding = fsdp_configuration(type(layers_of(model)[0]).__name__)
            config, launched = "accelerate_fsdp.yaml", job_settings.fsdp(started, sharding, job.precision)
        notes = [_about(request, row), f"for {_versions(row)}"]
        head = "".join(f"# {note}\n" for note in notes)
        script, deepspeed_script, name = SCRIPT, None if sharding else f"--no_local_rank {SCRIPT}", "fine-tune"
        usage, about_data = f"--data FILE [{SCRIPT}'s other options]", "FILE is absolute, or seen from this folder"
        shell_notes, slurm_notes = [*notes, about_data], [*notes, f"sbatch job.slurm {usage}; {about_data}"]
        texts[SCRIPT] = f"{head}{_script(request, row, base, model)}"
        texts[ARGUMENTS] = head + strict_yaml.dump(training_arguments(request, row, base, sharding))
    torchrun = f"torchrun --nproc_per_node {host_gpus} {job_scripts.torchrun(hosts, 'SLURM_NODEID')} {script}"
    texts |= {
        config: head + strict_yaml.dump(launched),
        "hostfile": head + job_scripts.hostfile(hosts, host_gpus),
        "launch.sh": job_scripts.shell(hosts, host_gpus, script, config, deepspeed_script, usage, shell_notes),
        "job.slurm": job_scripts.slurm(hosts, host_gpus, name, f'{torchrun} "$@"', slurm_notes, file="job.slurm"),
    }
    for file, text in texts.items():
        project.write_text(Path(folder) / file, text)
    return list(texts)


def deepspeed_configuration(request: Request, row: PlanRow, base: Recipe) -> dict[str, Any]:
    """Returns DeepSpeed's configuration: every size as a number, and DeepSpeed's own defaults written out."""
    job = request.job.but(engine=row.engine)
    zero: dict[str, Any] = {
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "use_multi_rank_bucket_allreduce": True,
        **dict(job.zero),
        "stage": row.stage,
        "overlap_comm": overlaps(row.job.program, row.layout),
    }
    if row.layout.host_states != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if row.layout.host_states == "optimizer+parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if row.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    base_settings = {key: value for key, value in (base.deepspeed or {}).items() if key not in ("bf16", "fp16")}
    settings = {
        **base_settings,
        "train_batch_size": row.layout.micro_batch * row.layout.accumulation * request.dp,
        "train_micro_batch_size_per_gpu": row.layout.micro_batch,
        "gradient_accumulation_steps": row.layout.accumulation,
        "gradient_clipping": base.train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        job.precision: {"enabled": True, **(FP16 if job.precision == "fp16" else {})},
        "zero_optimization": zero,
    }
    # the Trainer's own AdamW is refused where states are offloaded
    if row.layout.host_states != "none" or "optimizer" in base_settings:
        settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "lr": base.train.learning_rate}}
    return settings


def as_recipe(request: Request, row: PlanRow, base: Recipe) -> Recipe:
    """Returns ``base`` with the planned job and the row's batch, stage and ranks, for ``pardemo finetune``."""
    job, settings = request.job, deepspeed_configuration(request, row, base)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings[key] = "auto"
    settings["gradient_clipping"] = "auto"
    settings[job.precision]["enabled"] = "auto"
    if "optimizer" in settings:
        settings["optimizer"]["params"]["lr"] = "auto"
    values, tuning = recipe.to_dict(base), job.tuning
    values["data"]["cutoff_len"] = job.sequence
    values["lora"] = {"r": tuning.rank, "lora_alpha": tuning.alpha, "lora_dropout": tuning.dropout,
                      "target_modules": list(tuning.target)}  # fmt: skip
    values["train"] |= {
        "per_device_train_batch_size": row.layout.micro_batch,
        "gradient_accumulation_steps": row.layout.accumulation,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "activation_checkpointing": row.layout.recompute == "full",
    }
    values["deepspeed"] = settings
    values["world"]["ranks"] = request.dp
    return recipe.from_dict(values)


def fsdp_configuration(layer: str) -> dict[str, Any]:
    """Returns the Trainer's settings for FSDP2 layer by layer; Accelerate's have ``fsdp_`` before each of them.

    The state is saved whole: of one in shards the Trainer's ``save_model`` writes nothing, and says nothing.
    """
    return {
        "version": 2, "reshard_after_forward": True, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": layer, "cpu_ram_efficient_loading": True, "state_dict_type": "FULL_STATE_DICT",
    }  # fmt: skip


def training_arguments(
    request: Request, row: PlanRow, base: Recipe, sharding: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Returns Transformers' TrainingArguments but for the folder."""
    job, train = request.job, base.train
    again = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    saving = {"save_strategy": "steps", "save_steps": train.save_steps, "save_total_limit": train.save_total_limit}
    return {
        "max_steps": request.steps,
        "per_device_train_batch_size": row.layout.micro_batch,
        "gradient_accumulation_steps": row.layout.accumulation,
        "learning_rate": train.learning_rate,
        "lr_scheduler_type": train.lr_scheduler_type,
        "warmup_steps": train.warmup_steps,
        "max_grad_norm": job.clipping,
        job.precision: True,
        **(again if row.layout.recompute == "full" else {}),
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
    dtype = "torch.float32" if row.stage is None and not job.tuning.lora else _DTYPES[job.precision]
    adapter = "None"
    if job.tuning.lora:
        config = lora_config(model, job.tuning)
        values = {name: getattr(config, name) for name in ("r", "lora_alpha", "lora_dropout")}
        values |= {"target_modules": list(job.tuning.target), "fan_in_fan_out": config.fan_in_fan_out}
        adapter = "{\n" + "".join(f'    "{key}": {value!r},\n' for key, value in values.items()) + "}"
    path = recipe.locate(base.model.path)
    known = not isinstance(job.config, Baichuan2Config) and "/" in base.model.path  # else a built-in model's short name
    named = str(path) if path.is_dir() else base.model.path if known else None
    model_import = "import pardemo.baichuan2  # noqa: E402, F401, which Transformers 5 does not have\n\n"
    plan = f"""# --- the plan
{model_import if isinstance(job.config, Baichuan2Config) else ""}MODEL: str | None = {named!r}
SEQUENCE = {job.sequence}
DTYPE = {dtype}
LORA: dict[str, Any] | None = {adapter}
ENGINE, RANKS = "{row.engine}", {request.machine.gpus}
# --- end of the plan
"""
    return _PLAN.sub(lambda _: plan, _SOURCE.read_text(encoding="utf-8"))


def _about(request: Request, row: PlanRow) -> str:
    """Returns what was planned."""
    job, machine = request.job, request.machine
    trained = f"LoRA of rank {job.tuning.rank}" if job.tuning.lora else "all parameters"
    engine = "FSDP2" if row.stage is None else f"ZeRO {row.stage}, offload {row.layout.host_states}"
    samples = f"{row.layout.micro_batch} × {row.layout.accumulation} samples of up to {job.sequence} tokens each"
    return (f"{job.config.model_type}, {trained}, {engine}: {machine.gpus} × {machine.gpu.name}, {samples}, "
            f"{request.samples_per_step} a step")  # fmt: skip


def _versions(row: PlanRow) -> str:
    names = {"torch": "torch", "transformers": "Transformers", "accelerate": "Accelerate", "peft": "PEFT"}
    names |= {} if row.stage is None else {"deepspeed": "DeepSpeed"}
    return ", ".join(f"{name} {metadata.version(library).partition('+')[0]}" for library, name in names.items())
