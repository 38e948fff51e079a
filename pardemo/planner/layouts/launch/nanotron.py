"""nanotron's configuration for a layout: ``nanotron.yaml``.

Names are those of ``src/nanotron/config/`` in huggingface/nanotron: ``config.py`` at
00708b80c88ee7c05c89502e80c3201df916d774, ``parallelism_config.py`` at
19f88fbe454691f9bfcf98d6e3433dd7bcb82389, ``models_config.py`` at 025f31413c6ea6a0fb6a5e35063b780ee91aba79. nanotron
refuses a key that it does not know.
"""

from dataclasses import replace
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch.facts import Model
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.stacks import NANOTRON
from pardemo.planner.layouts.step import idle_stages

FILE = "nanotron.yaml"
ENVIRONMENT = {"NANOTRON": "nanotron"}


def why_not(job: Job, layout: Layout, model: Model) -> str | None:
    """Why nanotron's Llama cannot run the layout; None where it can.

    Its 1F1B asks for as many micro-batches as stages, less one (``parallel/pipeline_parallel/engine.py`` at
    1cc9cb31ea09e6be1efb1cf5466b98b18a3bf947).
    """
    if not model.like_llama or model.factor:
        return f"nanotron's Llama is not {model.name} ({model.kind})"
    for name in ("cp", "ep", "etp", "chunks"):
        if (value := getattr(layout, name)) > 1:
            return f"nanotron.yaml has no {name} {value}"
    if layout.offload:
        return "nanotron.yaml has no offload of activations, layer by layer"
    if layout.sharding not in ("none", "zero1"):
        return f"nanotron has no {layout.sharding}"
    if layout.shard_group and layout.shard_group < layout.replicas:
        return "nanotron shares states among all data-parallel ranks"
    if layout.schedule != "1f1b":
        return f"nanotron has no {layout.schedule} schedule"
    if layout.recompute == "selective":
        return "nanotron recomputes whole layers or nothing"
    if layout.accumulation < layout.pp - 1:
        return f"nanotron's 1F1B takes at least {layout.pp - 1} micro-batches, not {layout.accumulation}"
    if idle := idle_stages(replace(job, stack=NANOTRON), layout):
        return f"nanotron would leave {idle} of PP {layout.pp} stages without anything"
    if job.shape.groups % layout.tp:
        return f"{job.shape.groups} key-value heads do not divide by TP {layout.tp}"
    if job.rate > 1 or not job.fused:
        return "nanotron's products are bf16's, its attention is fused"
    return None


def config(job: Job, layout: Layout, model: Model) -> dict[str, Any]:
    """The file's content."""
    shape = job.shape
    return {
        "general": {"project": "pardemo", "run": f"{model.name}_%date_%jobid", "seed": 42},
        "parallelism": {
            "dp": layout.dp, "pp": layout.pp, "tp": layout.tp, "pp_engine": "1f1b",
            "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
            "tp_linear_async_communication": layout.sequence_parallel,
            "recompute_layer": layout.recompute == "full", "expert_parallel_size": 1,
        },
        "model": {
            "model_config": {
                "is_llama_config": True, "num_hidden_layers": shape.layers, "hidden_size": shape.hidden,
                "num_attention_heads": shape.heads, "num_key_value_heads": shape.groups,
                "intermediate_size": shape.middle, "vocab_size": shape.vocabulary,
                "max_position_embeddings": max(model.longest, job.sequence), "rope_theta": float(model.theta),
                "rms_norm_eps": float(model.epsilon), "tie_word_embeddings": shape.tied, "hidden_act": "silu",
                "initializer_range": model.std,
            },
            "init_method": {"std": model.std}, "dtype": "bfloat16", "make_vocab_size_divisible_by": 1,
            "ddp_bucket_cap_mb": 25,
        },
        "tokens": {
            "micro_batch_size": layout.micro_batch, "batch_accumulation_per_replica": layout.accumulation,
            "sequence_length": job.sequence, "train_steps": 100, "val_check_interval": -1, "limit_val_batches": 0,
            "limit_test_batches": 0,
        },
        "optimizer": {
            "zero_stage": 1 if layout.sharding == "zero1" else 0, "accumulate_grad_in_fp32": job.stack.gradient == 4,
            "weight_decay": 0.1, "clip_grad": 1.0,
            "optimizer_factory": {"name": "adamW", "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": 1e-8,
                                  "torch_adam_is_fused": True},
            "learning_rate_scheduler": {"learning_rate": 1.5e-4, "min_decay_lr": 1.5e-5, "lr_warmup_steps": 10,
                                        "lr_warmup_style": "linear", "lr_decay_style": "cosine"},
        },
        "data_stages": [
            {"name": "invented", "start_training_step": 1,
             "data": {"dataset": None, "seed": 42, "num_loading_workers": 1}}
        ],
        "checkpoints": {"checkpoints_path": "checkpoints", "checkpoint_interval": 1000},
        "logging": {"log_level": "info", "log_level_replica": "warning", "iteration_step_info_interval": 1},
        "tokenizer": {"tokenizer_name_or_path": None},
    }  # fmt: skip


def texts(job: Job, layout: Layout, model: Model) -> dict[str, str]:
    """``nanotron.yaml``; without a data set nanotron invents tokens."""
    import yaml

    return {FILE: (
        f"# {model.name}: {layout}, {layout.gpus} GPUs, {layout.batch} samples of {job.sequence} tokens a step\n"
        "# for nanotron's main branch of 2025 (its config.py at 00708b8)\n"
        "# learning rate, steps, data set and tokenizer are not the plan's: put in your own\n"
        + yaml.safe_dump(config(job, layout, model), sort_keys=False)
    )}  # fmt: skip


def command(job: Job, torchrun: str) -> str:
    """What a host runs, as nanotron's README has it."""
    each = min(job.machine.host_gpus, job.machine.gpus)
    script = f'"${{NANOTRON:-.}}/run_train.py" --config-file {FILE}'
    return f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node {each} {torchrun} {script}"
