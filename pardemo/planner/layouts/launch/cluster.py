"""What starts a program on many hosts: a Slurm batch script and a Kubernetes job.

Slurm: one task a host, which starts one process a GPU. Kubernetes: Kubeflow's PyTorchJob, v1 (training-operator), in
whose pods the operator sets ``MASTER_ADDR``, ``MASTER_PORT`` and ``RANK``, the host's; Kueue queues it by a label.
"""

import re
from typing import Any

from pardemo.planner.layouts.job.job import Job

SLURM, KUBERNETES = "slurm.sbatch", "kubernetes.yaml"
PORT = 29500


def torchrun(hosts: int, rank: str) -> str:
    """torchrun's options where the environment has the first host's address, and the host's own place in ``rank``.

    Places are given, not drawn by lot: neighbours in the layout are then neighbours in the network.
    """
    if hosts == 1:
        return "--standalone"
    address = '--master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT"'
    return f'--nnodes {hosts} --node_rank "${rank}" {address}'


def slurm(job: Job, name: str, command: str, environment: dict[str, str], notes: list[str]) -> str:
    """A batch script that runs ``command`` once on each host; ``environment`` are paths from where it is submitted."""
    hosts, each = job.machine.hosts, min(job.machine.host_gpus, job.machine.gpus)
    comments = "".join(f"# {note}\n" for note in notes)
    paths = "".join(f'export {key}="${{{key}:-$PWD/{path}}}"\n' for key, path in environment.items())
    return f"""#!/bin/bash
#SBATCH --job-name={label(name)}
#SBATCH --nodes={hosts}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --cpus-per-task={4 * each}
#SBATCH --exclusive
{comments}# partition, account and time are the cluster's: sbatch --partition ... {SLURM}
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT={PORT}
{paths}export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it from sbatch
srun --kill-on-bad-exit=1 bash -c '{command}'
"""


def kubernetes(job: Job, name: str, command: str, environment: dict[str, str], notes: list[str]) -> str:
    """A PyTorchJob that runs ``command`` in a pod on each host; ``environment`` are paths in its volume."""
    hosts, each = job.machine.hosts, min(job.machine.host_gpus, job.machine.gpus)
    container = {
        "name": "pytorch", "image": "IMAGE", "workingDir": "/workspace", "command": ["bash", "-c", command],
        "env": [{"name": key, "value": f"/workspace/{path}"} for key, path in environment.items()],
        "resources": {"limits": {resource(job.machine.gpu.name): each}},
        "volumeMounts": [{"name": "workspace", "mountPath": "/workspace"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }  # fmt: skip
    pod = {
        "containers": [container],
        "volumes": [
            {"name": "workspace", "persistentVolumeClaim": {"claimName": "workspace"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    replicas = {"Master": 1, "Worker": hosts - 1}
    manifest = {
        "apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": label(name)},
        "spec": {
            "nprocPerNode": str(each), "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                role: {"replicas": count, "restartPolicy": "Never", "template": {"spec": pod}}
                for role, count in replicas.items() if count
            },
        },
    }  # fmt: skip
    comments = "".join(f"# {note}\n" for note in notes)
    return f"""{comments}\
# the cluster's: IMAGE, its adapters (rdma/... in limits), a claim "workspace" that has these files
# in a queue of Kueue: metadata.labels, kueue.x-k8s.io/queue-name: QUEUE
{_yaml(manifest)}"""


def _yaml(manifest: dict[str, Any]) -> str:
    """Without anchors for what stands in two places: people edit these files."""
    import yaml  # of what writes alone: a browser plans without it

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump(manifest, Dumper=Plain, sort_keys=False, width=200)


def resource(gpu: str) -> str:
    """What a device plugin calls such a GPU."""
    makers = {"MI": "amd.com/gpu", "Ascend": "huawei.com/Ascend910"}
    return next((name for begin, name in makers.items() if gpu.startswith(begin)), "nvidia.com/gpu")


def label(name: str) -> str:
    """A name that Kubernetes takes: small letters, digits and hyphens, at most 50."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:50].strip("-") or "pardemo"
