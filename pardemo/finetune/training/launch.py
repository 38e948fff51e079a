"""Starting a fine-tune: ranks of our own, or the rank of a job that torchrun, DeepSpeed or Accelerate has started."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NoReturn

from pardemo import options
from pardemo.closed_pipe import work_goes_on
from pardemo.world import launched
from pardemo.world.loading import no_garbage

if TYPE_CHECKING:  # each is imported where it is needed: the command line's --help loads none of it
    from pardemo.finetune.recipes.recipe_schema import Recipe
    from pardemo.finetune.training.train import TrainingResult

#: A run may take weeks. A hang inside it ends with the process group's own limit: half an hour, ten minutes in a
#: launcher's job.
LONGEST_S = 3.0e7
PRELOAD = ("pardemo.peers.deepspeed.engine", "pardemo.finetune.training.train")


def launch(job: "Recipe", resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> "TrainingResult":
    """Trains on ``job.world.ranks`` ranks of this machine. What rank 0 prints appears here.

    Args:
        resume, overwrite, allow: as in :func:`pardemo.finetune.training.train.train`.

    Raises:
        ValueError, FileNotFoundError: recipe, model or data are not what they should be; before any rank starts.
        RankError: a rank failed or died; nothing is left running, and ``resume`` goes on from the last checkpoint.
    """
    from pardemo import World
    from pardemo.finetune.recipes import recipe
    from pardemo.project import available_cores

    on_cpu = check(job, resume, overwrite, allow)
    threads = max(1, available_cores() // job.world.ranks)
    env = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"} if on_cpu else {}
    with World(job.world.ranks, preload=PRELOAD, threads=threads, timeout_s=LONGEST_S, env=env) as world:
        return world.run(_rank, recipe.to_dict(job), resume, overwrite, allow)[0]


def check(job: "Recipe", resume: bool = False, overwrite: bool = False, allow: Sequence[str] = ()) -> bool:
    """What can be known without a rank: settings, folders, data, checkpoints, GPUs. Returns whether ranks will run on
    the CPU.

    They do where there is no GPU; in fp32 also where there are fewer GPUs than ranks.
    """
    import torch

    from pardemo import headlines
    from pardemo.baichuan2 import load_tokenizer
    from pardemo.baichuan2.checkpoints import find_shards, read_config
    from pardemo.finetune.recipes import recipe
    from pardemo.finetune.training.resume import choose, refuse_in_use

    gpus = torch.cuda.device_count()
    on_cpu = not gpus or (gpus < job.world.ranks and job.train.precision == "fp32")
    recipe.preflight(job, on_cpu)
    if not on_cpu and gpus < job.world.ranks:
        raise ValueError(f"world.ranks is {job.world.ranks}, this machine has {gpus} GPUs: give --ranks {gpus}"
                         ", or use a launcher for several hosts")  # fmt: skip
    folder = recipe.locate(job.model.path)
    read_config(folder)
    if job.model.init == "pretrained":
        find_shards(folder)
    load_tokenizer(folder)
    for path in filter(None, (job.data.train, job.data.valid)):
        if not recipe.locate(path).is_file():
            raise FileNotFoundError(f"data: there is no file {recipe.locate(path)}")
        headlines.read(recipe.locate(path))
    refuse_in_use(recipe.locate(job.output_dir))
    choose(recipe.locate(job.output_dir), job, resume, overwrite, job.world.ranks, allow)
    return on_cpu


def _rank(values: dict, resume: bool, overwrite: bool, allow: Sequence[str]) -> "TrainingResult":
    from pardemo.finetune.recipes import recipe
    from pardemo.finetune.training.train import train

    return train(recipe.from_dict(values), resume, overwrite, allow=allow)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe's name, or a .yaml file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
                        help="change a key of it, as train.learning_rate=2e-4 (may be repeated)")  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to launch (default: the recipe's)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    parser.add_argument(
        "--allow",
        action="append",
        default=[],
        metavar="KEY",
        help="with --resume: a key that may differ from what the run began with, as train.max_steps",
    )
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier run left in the output folder")
    parser.add_argument("--on-cpu", action="store_true", help="run a recipe for GPUs on this machine's CPU")
    parser.add_argument("--list", action="store_true", help="list the recipes, and stop")
    parser.add_argument("--show", action="store_true", help="print the recipe's file with its comments, and stop")
    parser.add_argument("--json", action="store_true", help="print the outcome (or the list) as JSON")


def chosen(arguments: argparse.Namespace) -> "Recipe":
    """The recipe of a command line."""
    options.at_least(arguments, 1, "ranks")
    from pardemo.finetune.recipes import recipe

    if arguments.recipe is None:
        raise ValueError(f"name a recipe: {', '.join(recipe.names())}, or a .yaml file")
    job = recipe.override(recipe.load(arguments.recipe), arguments.changes)
    if arguments.ranks is not None:
        job = _on(job, arguments.ranks)
    if arguments.on_cpu:
        job = replace(job, world=replace(job.world, device="any"))
    return job


@work_goes_on()
def command(arguments: argparse.Namespace) -> int:
    """``pardemo finetune``."""
    options.at_least(arguments, 1, "ranks")
    from pardemo import RankError
    from pardemo.finetune.recipes import recipe
    from pardemo.tables import text_table

    if arguments.list:
        rows = recipe.listing()
        print(
            json.dumps(rows, indent=1)
            if arguments.json
            else text_table([list(rows[0]), *([str(v) for v in row.values()] for row in rows)])
        )
        return 0
    job = chosen(arguments)
    if arguments.show:
        print(recipe.source(arguments.recipe), end="")
        return 0
    try:
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            outcome = launch(job, arguments.resume, arguments.overwrite, arguments.allow)
    except RankError as error:
        print(f"pardemo finetune: {str(error).splitlines()[0]}", file=sys.stderr)
        return 1
    _tell(outcome, arguments.json)
    return 0


@work_goes_on()
def main(argv: list[str] | None = None) -> int:
    """``python -m pardemo.finetune RECIPE``: as a rank where a launcher says so, else as ``pardemo finetune``."""
    parser = argparse.ArgumentParser(prog="pardemo.finetune", description="Fine-tune by a recipe.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        if "RANK" not in os.environ or arguments.list or arguments.show:
            return command(arguments)
        _as_rank(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        if "RANK" not in os.environ or launched.first_to_say(str(error)):
            print(f"pardemo finetune: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _as_rank(arguments: argparse.Namespace) -> NoReturn:
    from pardemo.project import available_cores

    job = chosen(arguments)
    if missing := [name for name in launched.NEEDED if name not in os.environ]:
        raise ValueError(
            f"RANK is set, {', '.join(missing)} is not: start it by torchrun, deepspeed or accelerate launch"
        )
    size = int(os.environ["WORLD_SIZE"])
    job = _on(job, size)  # the launcher's number counts
    with no_garbage():
        import pardemo.peers.deepspeed.engine  # noqa: F401, before the group: DeepSpeed chooses its device
        from pardemo.finetune.training.train import train

    beside = next((os.environ[name] for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in os.environ), size)
    launched.join(threads=max(1, available_cores() // int(beside)))
    from pardemo.world.rank import end

    outcome = train(job, arguments.resume, arguments.overwrite, allow=arguments.allow)
    if int(os.environ["RANK"]) == 0:
        _tell(outcome, arguments.json)
    end()


def _on(job: "Recipe", ranks: int) -> "Recipe":
    return replace(job, world=replace(job.world, ranks=ranks))


def _tell(outcome: "TrainingResult", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(outcome), indent=1))
        return
    print(f"{outcome.steps} steps, mean loss {outcome.loss:.4f}, {outcome.seconds:.1f} s, {outcome.engine}"
          + (f" (ZeRO-{outcome.zero_stage})" if outcome.zero_stage is not None else "")
          + f" on {outcome.ranks} ranks; adapter: {os.path.relpath(outcome.adapter)}")  # fmt: skip
