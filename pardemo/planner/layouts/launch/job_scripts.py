"""Writes what starts a program on many hosts: Slurm and Kubernetes jobs, a shell script for other launchers.

Slurm: one task a host, which starts one process a GPU. Kubernetes: Kubeflow's PyTorchJob, v1 (training-operator), in
whose pods the operator sets ``MASTER_ADDR``, ``MASTER_PORT`` and ``RANK``, the host's; Kueue queues it by a label.
"""

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pardemo.peers.accelerate.job_settings import PORT
from pardemo.planner.layouts.launch import settings

SLURM, KUBERNETES = "slurm.sbatch", "kubernetes.yaml"


def torchrun(hosts: int, rank: str) -> str:
    """torchrun's options where the environment has the first host's address, and the host's own place in ``rank``.

    Places are given, not drawn by lot: neighbours in the layout are then neighbours in the network.
    """
    if hosts == 1:
        return "--standalone"
    address = '--master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"'
    return f'--nnodes {hosts} --node_rank "${rank}" {address}'


def slurm(
    hosts: int,
    host_gpus: int,
    name: str,
    command: str,
    notes: Iterable[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    file: str = SLURM,
    whole_hosts: bool = False,
) -> str:
    """Returns a batch script that runs ``command`` once on each host; ``"$@"`` in it is what follows the script's name.

    Args:
        host_gpus: GPUs of a host. name: of the job. notes: comments. environment: paths from where it is submitted.
        file: the script's name. whole_hosts: whether no other job may run there.
    """
    return settings.script(
        "slurm.txt", hosts=hosts, host_gpus=host_gpus, cpus=4 * host_gpus, name=label(name), command=command,
        file=file, port=PORT,
        exclusive="#SBATCH --exclusive\n" if whole_hosts else "", comments=_comments(notes),
        paths="".join(f'export {key}="${{{key}:-$PWD/{path}}}"\n' for key, path in environment.items()),
    )  # fmt: skip


def _comments(notes: Iterable[str]) -> str:
    return "".join(f"# {note}\n" for note in notes)


def hostfile(hosts: int, host_gpus: int) -> str:
    """DeepSpeed's: a line for each host with its GPUs; the names are to be replaced."""
    return "".join(f"host{number} slots={host_gpus}\n" for number in range(hosts))


def shell(
    hosts: int,
    host_gpus: int,
    script: str,
    accelerate: str,
    deepspeed: str | None,
    usage: str,
    notes: Iterable[str] = (),
) -> str:
    """Returns a script with a line for each launcher, any of which starts the same job; it is started on every host.

    Args:
        host_gpus: GPUs of a host.
        script: what torchrun and Accelerate's launcher run.
        accelerate: the name of Accelerate's configuration.
        deepspeed: what DeepSpeed's launcher runs, None where the job is not DeepSpeed's.
        usage: what may follow the launcher's name.
        notes: comments.
    """
    meet = f"--nnodes {hosts} --rdzv_backend c10d --rdzv_endpoint host0:{PORT}" if hosts > 1 else "--standalone"
    rank = '--machine_rank "${MACHINE_RANK:-0}"'
    lines = {
        "torchrun": f"torchrun {meet} --nproc_per_node {host_gpus} {script}",
        "accelerate": f"accelerate launch --config_file {accelerate} {rank} {script}",
    }
    if deepspeed is not None:
        several = "--hostfile hostfile " if hosts > 1 else ""
        lines["deepspeed"] = f"deepspeed {several}--num_gpus {host_gpus} {deepspeed}"
    cases = "\n".join(f'{name}) {line} "$@" ;;' for name, line in lines.items())
    usage = f"launch.sh {' | '.join(lines)} {usage}"
    return settings.script("launch.sh.txt", comments=_comments(notes), usage=usage, cases=cases)


def kubernetes(
    hosts: int, host_gpus: int, gpu: str, name: str, command: str, notes: Iterable[str], environment: Mapping[str, str]
) -> str:
    """A PyTorchJob that runs ``command`` in a pod on each host, as :func:`slurm`; ``environment`` are paths in its
    volume."""
    import yaml  # of what writes alone: a browser plans without it

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:  # of what stands in two places: people edit these files
            return True

    manifest = settings.fill(settings.table("kubernetes.yaml"), {
        "name": label(name), "host_gpus": str(host_gpus), "command": command, "limits": {resource(gpu): host_gpus},
        "environment": [{"name": key, "value": f"/workspace/{path}"} for key, path in environment.items()],
    })  # fmt: skip
    roles = manifest["spec"]["pytorchReplicaSpecs"]
    if hosts > 1:
        roles["Worker"] = roles["Master"] | {"replicas": hosts - 1}
    return f"""{_comments(notes)}\
# the cluster's: IMAGE, its adapters (rdma/... in limits), a claim "workspace" that has these files
# in a queue of Kueue: metadata.labels, kueue.x-k8s.io/queue-name: QUEUE
{yaml.dump(manifest, Dumper=Plain, sort_keys=False, width=200)}"""


def resource(gpu: str) -> str:
    """Returns what a device plugin calls such a GPU."""
    makers = {"MI": "amd.com/gpu", "Ascend": "huawei.com/Ascend910"}
    return next((name for begin, name in makers.items() if gpu.startswith(begin)), "nvidia.com/gpu")


def label(name: str) -> str:
    """Returns a name that Kubernetes takes: small letters, digits and hyphens, at most 50."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "pardemo"
