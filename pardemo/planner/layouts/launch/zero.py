"""Writes DeepSpeed's and Accelerate's configurations of ZeRO alone: ``deepspeed.json``, ``accelerate.yaml``.

Keys are asked of the installed packages by :mod:`pardemo.peers.deepspeed.deepspeed_settings` and
:mod:`pardemo.peers.accelerate.config_checks`.
"""

import json
from typing import Any

from pardemo.peers.accelerate import job_settings
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import settings
from pardemo.planner.layouts.launch.facts import ModelFacts
from pardemo.planner.layouts.layout import SHARDING, Layout

FILE, SETTINGS = "accelerate.yaml", "deepspeed.json"
ENVIRONMENT = {"SCRIPT": "train.py"}


def why_not(job: Job, layout: Layout, model: ModelFacts) -> str | None:
    """Returns why DeepSpeed's ZeRO alone cannot run the layout; None where it can."""
    for name in ("tp", "pp", "cp", "ep", "etp"):
        if (value := getattr(layout, name)) > 1:
            return f"ZeRO alone has no {name.upper()} {value}"
    if layout.offloaded_layers:
        return "DeepSpeed has no offload of activations, layer by layer"
    if layout.shard_group and layout.shard_group < layout.replicas:
        return f"groups of {layout.shard_group} that share states are FSDP's, not DeepSpeed's"
    return "DeepSpeed's products are bf16's" if job.matmul_speedup > 1 else None


def deepspeed(job: Job, layout: Layout) -> dict[str, Any]:
    """DeepSpeed's configuration with every size as a number."""
    stage = SHARDING.index(layout.sharding)
    return settings.fill(settings.table("deepspeed.yaml"), {
        "layout": layout, "stage": stage, "overlaps": stage > 0, "gathers": True if stage == 3 else None,
        "data_types": {"grad_accum_dtype": "fp32"} if job.program.gradient_bytes == 4 else None,
    })  # fmt: skip


def texts(job: Job, layout: Layout, model: ModelFacts) -> dict[str, str]:
    """Returns both files; recomputation and the length of samples are the script's to set."""
    import yaml

    comments = [f"# {model.name}: {layout}, {layout.gpus} GPUs, {layout.batch} samples a step",
            "# for Accelerate 1 and DeepSpeed 0.1x",
            f"# the script's: samples of {job.sequence} tokens"]  # fmt: skip
    if layout.recompute == "full":
        comments.append("# the script's: model.gradient_checkpointing_enable()")
    elif layout.recompute == "selective":
        comments.append("# left out: selective recomputation, for which neither has a setting")
    started = job_settings.settings("DEEPSPEED", layout.gpus, job.machine.hosts)
    accelerate = job_settings.deepspeed(started, SETTINGS, SHARDING.index(layout.sharding))
    content = yaml.safe_dump(accelerate, sort_keys=False)
    return {FILE: "\n".join(comments) + "\n" + content, SETTINGS: json.dumps(deepspeed(job, layout), indent=1) + "\n"}


def command(job: Job, torchrun: str) -> str:
    """Accelerate's launcher; it has torchrun's options under names of its own."""
    options = torchrun.replace("--standalone", "")
    names = {"--nnodes": "--num_machines", "--node_rank": "--machine_rank", "--master_addr": "--main_process_ip",
             "--master_port": "--main_process_port"}  # fmt: skip
    for option, name in names.items():
        options = options.replace(option, name)
    return " ".join(f'accelerate launch --config_file {FILE} {options} "${{SCRIPT:-train.py}}"'.split())
