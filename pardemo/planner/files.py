"""Writing a plan down: DeepSpeed's and Accelerate's configuration, the recipe, and ways to launch it."""

import json
from pathlib import Path
from typing import Any

from pardemo import extras, project

with extras.needed_by(__name__):
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from pardemo.baichuan2 import Baichuan2Config
from pardemo.finetune import recipe, strict_yaml
from pardemo.finetune.recipe import Recipe
from pardemo.peers.accelerate import job_settings
from pardemo.planner import trainer_files
from pardemo.planner.layouts.launch import cluster
from pardemo.planner.layouts.price import engine_rules
from pardemo.planner.table import PlanRow, Request

_RUN = "pardemo.finetune recipe.yaml"
#: As Transformers' Trainer resolves DeepSpeed's "auto": its AdamW.
ADAMW = {"lr": "auto", "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
#: Dynamic loss scaling, as the article's recipe has it: fp16 has no gradients below 6e-8 without.
FP16 = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}


def check(request: Request, base: Recipe) -> None:
    """Raises ValueError, in one line, for a job of which no files are written.

    Baichuan2 with LoRA under DeepSpeed is ``pardemo finetune``'s; any other is for Transformers' Trainer.
    """
    job = request.job
    if request.tp * request.pp > 1:
        raise ValueError(f"--write: pardemo finetune and Transformers' Trainer run ZeRO and FSDP2 alone; Megatron-LM "
                         f"would run --tp {request.tp} --pp {request.pp}")  # fmt: skip
    if job.base != "bf16":
        four = "; write it without --base, and start its train.py with --four-bit" if job.base.startswith("nf4") else ""
        raise ValueError(f"--write: the files are for weights in bf16, not in {job.base}{four}")
    if job.optimizer != "adamw" or job.fused_loss or job.embeddings:
        other = "--fused-loss" if job.fused_loss else f"--optimizer {job.optimizer}"
        other = "--embeddings" if job.embeddings else other
        raise ValueError(f"--write: the files are for AdamW, whole logits and adapters alone; leave out {other}")
    if recipe.locate(base.model.path).is_file():
        raise ValueError(f"--write: what trains needs the model's folder, not a file: {base.model.path}")
    if type(job.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"--write: Transformers has no causal language model {job.config.model_type}")


def write(folder: str | Path, request: Request, row: PlanRow, base: Recipe) -> list[str]:
    """Writes the files of ``row`` into ``folder`` and returns their names.

    Each is written whole or not at all. Of Baichuan2 with LoRA under DeepSpeed they are a recipe with the same settings
    beside ``ds_config.json`` and ``accelerate.yaml``, which stand alone; else those of
    :mod:`pardemo.planner.trainer_files`.

    Args:
        base: what the plan does not decide, and the model's folder.

    Raises:
        OSError: the folder cannot be written.
        ValueError: see :func:`check`.
    """
    check(request, base)
    out = Path(folder)
    if not (isinstance(request.job.config, Baichuan2Config) and request.job.adapter and row.stage is not None):
        texts = trainer_files.texts(request, row, base, {} if row.stage is None else deepspeed(request, row, base))
    else:
        hosts = request.cluster.hosts
        each = request.cluster.gpus // hosts
        started = job_settings.settings("DEEPSPEED", request.cluster.gpus, hosts)
        accelerate = job_settings.deepspeed(started, "ds_config.json", row.stage)
        torchrun = f"torchrun --nproc_per_node {each} {cluster.torchrun(hosts, 'SLURM_NODEID')}"
        texts = {
            "ds_config.json": json.dumps(deepspeed(request, row, base), indent=1) + "\n",
            "recipe.yaml": strict_yaml.dump(recipe.to_dict(as_recipe(request, row, base))),
            "accelerate.yaml": strict_yaml.dump(accelerate),
            "hostfile": cluster.hostfile(hosts, each),
            "launch.sh": cluster.shell(hosts, each, f"-m {_RUN}", "accelerate.yaml", f"--module {_RUN}", "[option …]"),
            "job.slurm": cluster.slurm(hosts, each, "pardemo", f'{torchrun} -m {_RUN} "$@"', file="job.slurm"),
        }
    for name, text in texts.items():
        project.write_atomically(out / name, lambda path, text=text: path.write_text(text, encoding="utf-8"))
    return list(texts)


def deepspeed(request: Request, row: PlanRow, base: Recipe) -> dict[str, Any]:
    """DeepSpeed's configuration with every size as a number, and what it would choose by itself said aloud."""
    job = request.job.but(engine=row.engine)
    zero: dict[str, Any] = {
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
        **dict(job.zero),
        "stage": row.stage,
        "overlap_comm": engine_rules.overlaps(job.engine, job.zero.get("overlap_comm")),
    }
    if row.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if row.offload == "optimizer+parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    if row.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    base_settings = {key: value for key, value in (base.deepspeed or {}).items() if key not in ("bf16", "fp16")}
    settings = {
        **base_settings,
        "train_batch_size": row.batch * row.accumulation * request.dp,
        "train_micro_batch_size_per_gpu": row.batch,
        "gradient_accumulation_steps": row.accumulation,
        "gradient_clipping": base.train.max_grad_norm,
        "zero_allow_untested_optimizer": True,
        job.precision: {"enabled": True, **(FP16 if job.precision == "fp16" else {})},
        "zero_optimization": zero,
    }
    if (
        row.offload != "none" or "optimizer" in base_settings
    ):  # the Trainer's own AdamW is refused where states are offloaded
        settings["optimizer"] = {"type": "AdamW", "params": {**ADAMW, "lr": base.train.learning_rate}}
    return settings


def as_recipe(request: Request, row: PlanRow, base: Recipe) -> Recipe:
    """``base`` with the planned job and the row's batch, stage and ranks: what ``pardemo finetune`` runs."""
    job, settings = request.job, deepspeed(request, row, base)
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        settings[key] = "auto"
    settings["gradient_clipping"] = "auto"
    settings[job.precision]["enabled"] = "auto"
    if "optimizer" in settings:
        settings["optimizer"]["params"]["lr"] = "auto"
    values = recipe.to_dict(base)
    values["data"]["cutoff_len"] = job.sequence
    values["lora"] = {"r": job.adapter.rank, "lora_alpha": job.adapter.alpha, "lora_dropout": job.adapter.dropout,
                      "target_modules": list(job.adapter.target)}  # fmt: skip
    values["train"] |= {
        "per_device_train_batch_size": row.batch,
        "gradient_accumulation_steps": row.accumulation,
        "bf16": job.precision == "bf16",
        "fp16": job.precision == "fp16",
        "activation_checkpointing": row.checkpointing,
    }
    values["deepspeed"] = settings
    values["world"]["ranks"] = request.dp
    return recipe.from_dict(values)
