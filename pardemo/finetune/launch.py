"""Starting a fine-tune on ranks of this machine, when all is checked that can be known without them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pardemo import project
from pardemo.finetune import recipe
from pardemo.finetune.recipe import Recipe

if TYPE_CHECKING:
    from pardemo.finetune.train import TrainingResult

#: A run may take weeks. A hang inside it ends with the process group's own limit: half an hour, ten minutes in a
#: launcher's job.
LONGEST_S = 3.0e7
PRELOAD = ("pardemo.peers.deepspeed.engine", "pardemo.finetune.train")


def launch(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> "TrainingResult":
    """Trains on ``job.world.ranks`` ranks of this machine. What rank 0 prints appears here.

    Args:
        resume, overwrite, allow: as in :func:`pardemo.finetune.train.train`.

    Raises:
        ValueError, FileNotFoundError: recipe, model or data are not what they should be; before any rank starts.
        RankError: a rank failed or died; nothing is left running, and ``resume`` goes on from the last checkpoint.
    """
    from pardemo import World

    on_cpu = check(job, resume, overwrite, allow)
    threads = max(1, project.available_cores() // job.world.ranks)
    env = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
    with World(job.world.ranks, preload=PRELOAD, threads=threads, timeout_s=LONGEST_S, env=env) as world:
        return world.run(_rank, job, resume, overwrite, allow)[0]


def _rank(job: Recipe, resume: bool, overwrite: bool, allow: Sequence[str]) -> "TrainingResult":
    from pardemo.finetune.train import train

    return train(job, resume, overwrite, allow=allow)


def check(job: Recipe, resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> bool:
    """Checks what can be known without a rank: settings, folders, data, checkpoints, GPUs.

    Returns whether ranks will run on the CPU.

    They do where there is no GPU; in fp32 also where there are fewer GPUs than ranks.
    """
    import torch

    from pardemo import headlines
    from pardemo.baichuan2 import load_tokenizer
    from pardemo.baichuan2.checkpoints import find_shards, read_config
    from pardemo.finetune import checkpoints

    gpus = torch.cuda.device_count()
    on_cpu = not gpus or (gpus < job.world.ranks and job.train.precision == "fp32")
    recipe.preflight(job, on_cpu)
    if not on_cpu and gpus < job.world.ranks:
        raise ValueError(f"world.ranks is {job.world.ranks}, this machine has {gpus} GPUs: give --ranks {gpus}"
                         ", or use a launcher for several hosts")  # fmt: skip
    folder, run = recipe.locate(job.model.path), recipe.locate(job.output_dir)
    read_config(folder)
    find_shards(folder)
    load_tokenizer(folder)
    for path in filter(None, (job.data.train, job.data.valid)):
        if not recipe.locate(path).is_file():
            raise FileNotFoundError(f"data: there is no file {recipe.locate(path)}")
        headlines.read(recipe.locate(path))
    checkpoints.refuse_in_use(run)
    checkpoints.choose_checkpoint(run, job, resume, overwrite, allow)
    return on_cpu
