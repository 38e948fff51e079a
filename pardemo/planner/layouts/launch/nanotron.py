"""Writes nanotron's configuration for a layout: ``nanotron.yaml``.

Names are those of ``src/nanotron/config/`` in huggingface/nanotron: ``config.py`` at
00708b80c88ee7c05c89502e80c3201df916d774, ``parallelism_config.py`` at
19f88fbe454691f9bfcf98d6e3433dd7bcb82389, ``models_config.py`` at 025f31413c6ea6a0fb6a5e35063b780ee91aba79. nanotron
refuses a key that it does not know.
"""

from dataclasses import replace
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import settings
from pardemo.planner.layouts.launch.facts import ModelFacts
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.programs import NANOTRON
from pardemo.planner.layouts.step import idle_stages

FILE = "nanotron.yaml"
ENVIRONMENT = {"NANOTRON": "nanotron"}


def why_not(job: Job, layout: Layout, model: ModelFacts) -> str | None:
    """Returns why nanotron's Llama cannot run the layout; None where it can.

    Its 1F1B asks for as many micro-batches as stages, less one (``parallel/pipeline_parallel/engine.py`` at
    1cc9cb31ea09e6be1efb1cf5466b98b18a3bf947).
    """
    degree = next((name for name in ("cp", "ep", "etp", "chunks") if getattr(layout, name) > 1), "")
    idle = idle_stages(replace(job, program=NANOTRON), layout) if layout.pp > 1 else 0
    kv_heads, tp = job.shape.kv_heads, layout.tp
    return settings.refusal(
        (not model.like_llama or model.factor, "nanotron's Llama is not {model.name} ({model.kind})"),
        (degree, f"nanotron.yaml has no {degree} {{layout.{degree}}}"),
        (layout.offloaded_layers, "nanotron.yaml has no offload of activations, layer by layer"),
        (layout.sharding not in ("none", "zero1"), "nanotron has no {layout.sharding}"),
        (0 < layout.shard_group < layout.replicas, "nanotron shares states among all data-parallel ranks"),
        (layout.schedule != "1f1b", "nanotron has no {layout.schedule} schedule"),
        (layout.recompute == "selective", "nanotron recomputes whole layers or nothing"),
        (layout.accumulation < layout.pp - 1,
         "nanotron's 1F1B takes at least {least} micro-batches, not {layout.accumulation}"),
        (idle, "nanotron would leave {idle} of PP {layout.pp} stages without anything"),
        (kv_heads % tp, "{kv_heads} key-value heads do not divide by TP {layout.tp}"),
        (job.matmul_speedup > 1 or not job.fused, "nanotron's products are bf16's, its attention is fused"),
        layout=layout, model=model, least=layout.pp - 1, idle=idle, kv_heads=kv_heads,
    )  # fmt: skip


def config(job: Job, layout: Layout, model: ModelFacts) -> dict[str, Any]:
    """Returns the file's content."""
    return settings.fill(settings.table("nanotron.yaml"), {
        "job": job, "layout": layout, "shape": job.shape, "model": model, "run": f"{model.name}_%date_%jobid",
        "tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        "recomputed": layout.recompute == "full", "longest": max(model.longest, job.sequence),
        "theta": float(model.theta), "epsilon": float(model.epsilon),
        "stage": 1 if layout.sharding == "zero1" else 0, "sums_in_fp32": job.program.gradient_bytes == 4,
    })  # fmt: skip


def texts(job: Job, layout: Layout, model: ModelFacts) -> dict[str, str]:
    """``nanotron.yaml``; without a data set nanotron invents tokens."""
    import yaml

    return {FILE: (
        settings.about(job, layout, model)
        + "# for nanotron's main branch of 2025 (its config.py at 00708b8)\n"
        "# learning rate, steps, data set and tokenizer are not the plan's: put in your own\n"
        + yaml.safe_dump(config(job, layout, model), sort_keys=False)
    )}  # fmt: skip


def command(job: Job, torchrun: str) -> str:
    """Returns what a host runs, as nanotron's README has it."""
    host_gpus = min(job.machine.host_gpus, job.machine.gpus)
    script = f'"${{NANOTRON:-.}}/run_train.py" --config-file {FILE}'
    return f"CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node {host_gpus} {torchrun} {script}"
