"""Accelerate's configuration of a job, as ``accelerate launch --config_file`` reads it: one machine's.

The others are started with their own ``--machine_rank``.
"""

from collections.abc import Mapping
from typing import Any

PORT = 29500


def settings(kind: str, processes: int, machines: int = 1, address: str = "HOST0") -> dict[str, Any]:
    """Returns the settings of every job; :func:`deepspeed` and :func:`fsdp` add their sections.

    Args:
        kind: Accelerate's distributed_type. processes: over all machines. address: of the first of several machines,
            where they meet.
    """
    meet = {"main_process_ip": address, "main_process_port": PORT, "rdzv_backend": "static"}
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kind,
        "machine_rank": 0,
        "main_training_function": "main",
        "num_machines": machines,
        "num_processes": processes,
        "use_cpu": False,
        **(meet if machines > 1 else {}),
    }


def deepspeed(job: Mapping[str, Any], file: str, stage: int) -> dict[str, Any]:
    """The job under DeepSpeed, whose own settings stand in ``file``.

    ``zero3_init_flag`` is what Accelerate takes where the key is left out: whether the stage is 3. Where it is false
    under stage 3, Accelerate's ``GatheredParameters`` gathers nothing: a script that reads or sets weights within it
    finds empty ones.
    """
    section = {"deepspeed_config_file": file, "zero3_init_flag": stage == 3}
    if job["num_machines"] > 1:  # else it would start pdsh, on each machine, which starts all of them
        section["deepspeed_multinode_launcher"] = "standard"
    return {**job, "deepspeed_config": section}


def fsdp(job: Mapping[str, Any], sharding: Mapping[str, Any], precision: str) -> dict[str, Any]:
    """The job under FSDP; ``sharding`` are Accelerate's words without the ``fsdp_`` before each of them."""
    named = {f"fsdp_{key}": value for key, value in sharding.items()}
    return {**job, "mixed_precision": precision, "fsdp_config": named}
