"""Accelerate's configurations of one script: what their files say, and what then has to be running."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from pardemo import project
from pardemo.peers.accelerate import config_checks, job_settings

KINDS = {  # kind -> distributed_type of the file, class of the prepared model
    "one": ("NO", "GPT"),
    "ddp": ("MULTI_GPU", "DistributedDataParallel"),
    "fsdp2": ("FSDP", "FSDPModule"),
    "zero1": ("DEEPSPEED", "DeepSpeedEngine"),
    "zero2": ("DEEPSPEED", "DeepSpeedEngine"),
    "zero3": ("DEEPSPEED", "DeepSpeedEngine"),
}
FSDP2 = {
    "version": 2,
    "reshard_after_forward": True,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "transformer_layer_cls_to_wrap": "Block",
    "cpu_ram_efficient_loading": False,
    "state_dict_type": "SHARDED_STATE_DICT",
}


@dataclass(frozen=True)
class Configuration:
    """One way to run the script; its file is the same on GPUs and on CPU ranks.

    Args:
        kind: one of :data:`KINDS`.
        processes: over all machines.
        precision: ``"no"`` (fp32) or ``"bf16"``.
        clip: what DeepSpeed clips gradients at; the others go by the script's ``clip_grad_norm_``.
        zero: further keys of DeepSpeed's ``zero_optimization``.
        replicas: of the model, each in the shards of ``processes / replicas`` ranks: HSDP, a configuration of FSDP2.

    Raises:
        ValueError: no such kind; replicas of another kind than FSDP2, or that the processes do not divide into.
    """

    kind: str
    processes: int = 1
    precision: str = "no"
    machines: int = 1
    clip: float = 0.5
    zero: dict[str, Any] = field(default_factory=dict)
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no configuration {self.kind!r}; there are: {', '.join(KINDS)}")
        if self.replicas != 1 and (self.kind != "fsdp2" or self.replicas < 1 or self.processes % self.replicas):
            raise ValueError(f"{self.replicas} replicas of {self.kind} on {self.processes} processes: only fsdp2 has "
                             "replicas, and they divide the processes")  # fmt: skip

    @property
    def name(self) -> str:
        """``zero2-4``, ``ddp-2-bf16``, two replicas ``hsdp-2x2``, on two machines ``fsdp2-2-on-2``: its files' name."""
        ranks = f"{self.processes // self.replicas}x{self.replicas}" if self.replicas > 1 else str(self.processes)
        parts = ["hsdp" if self.replicas > 1 else self.kind, ranks, "" if self.precision == "no" else self.precision]
        return "-".join(filter(None, [*parts, f"on-{self.machines}" if self.machines > 1 else ""]))

    @property
    def stage(self) -> int | None:
        """The ZeRO stage of a DeepSpeed configuration."""
        return int(self.kind[-1]) if self.kind.startswith("zero") else None

    def config(self) -> dict[str, Any]:
        """The content of its configuration file."""
        job = job_settings.settings(KINDS[self.kind][0], self.processes, self.machines, address="127.0.0.1")
        if self.stage is not None:  # its file has its own precision, and Accelerate refuses it in both
            return job_settings.deepspeed(job, f"{self.name}.json", self.stage)
        if self.kind != "fsdp2":
            return {**job, "mixed_precision": self.precision}
        settings = job_settings.fsdp(job, FSDP2, self.precision)
        if self.replicas > 1:
            settings["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": self.replicas,
                "parallelism_config_dp_shard_size": self.processes // self.replicas,
            }
        return settings

    def deepspeed(self) -> dict[str, Any]:
        """The content of DeepSpeed's own file, in which Accelerate fills in what is ``"auto"``.

        ``gradient_clipping`` has to be a number: the script's ``clip_grad_norm_`` does nothing under DeepSpeed, and
        left out, or ``"auto"``, it is 1.0 whatever the script says.
        """
        return {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": self.clip,
            "bf16": {"enabled": self.precision == "bf16"},
            "zero_optimization": {"stage": self.stage, **self.zero},
        }

    def expected(self) -> dict[str, Any]:
        """Returns what has to be running, for :func:`pardemo.peers.accelerate.training.assert_runs`."""
        kind, wrapped = KINDS[self.kind]
        if kind == "MULTI_GPU" and not torch.cuda.is_available():
            kind = "MULTI_CPU"
        return {
            "distributed_type": kind,
            "num_processes": self.processes,
            "wrapped": wrapped,
            "zero_stage": self.stage,
            "mixed_precision": self.precision,
        }

    def write(self, folder: Path) -> Path:
        """Writes ``folder/NAME.yaml`` and a DeepSpeed form's ``NAME.json`` beside it; both are checked first.

        Raises:
            ValueError: what :func:`pardemo.peers.accelerate.config_checks.check` says.
        """
        if self.stage is not None:
            config_checks.check_deepspeed(self.deepspeed(), self.processes)
            project.write_json(folder / f"{self.name}.json", self.deepspeed())
        return write(folder / f"{self.name}.yaml", self.config())


def megatron_lm(processes: int, tp: int, pp: int, micro_batches: int) -> dict[str, Any]:
    """The file for Accelerate's Megatron-LM plugin, which needs GPUs and Megatron-LM itself, not only its core."""
    return {
        **job_settings.settings("MEGATRON_LM", processes),
        "mixed_precision": "bf16",
        "megatron_lm_config": {
            "megatron_lm_tp_degree": tp,
            "megatron_lm_pp_degree": pp,
            "megatron_lm_num_micro_batches": micro_batches,
            "megatron_lm_gradient_clipping": 1.0,
            "megatron_lm_sequence_parallelism": False,
            "megatron_lm_recompute_activations": True,
            "megatron_lm_use_distributed_optimizer": True,
        },
    }


def write(path: Path, config: dict[str, Any]) -> Path:
    """A configuration as a YAML file, checked first; returns its path."""
    config_checks.check(config, path.parent)
    text = yaml.safe_dump(config, sort_keys=False)
    project.write_text(path, text)
    return path
