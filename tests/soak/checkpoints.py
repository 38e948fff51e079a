"""Faults of the ZeRO engines' checkpoints: writers that die, files that are damaged, a disk that is full.

Whatever happens to a writer, the checkpoint that was whole before, or the new one, can be read, bit by bit.
"""

import hashlib
import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pardemo import RankDied, RankFailed, World
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, checkpoint, load, save
from pardemo.zero.engine import Engine
from soak.case import Case, Lost, NotReached, fault
from soak.common import LONG_S, damaged, ends_in, first_line, small_disk, works

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
WIDTH = 160  # a checkpoint of some 300 kB a rank: writing it takes milliseconds
ROOM = 2 * (WIDTH * WIDTH + WIDTH) * 3 * 4  # bytes of a checkpoint: parameters and two moments, in fp32


class Job(NamedTuple):
    """What is trained: ZeRO's stage, the layer's width, the folder of its checkpoint."""

    stage: int
    width: int
    folder: Path


class Saved(NamedTuple):
    """What the first writer says: the parameters at its checkpoint and one step later, and what saving took."""

    old: str
    new: str
    seconds: float


def _engine(job: Job) -> Engine:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(job.width, job.width), nn.Tanh(), nn.Linear(job.width, job.width))

    return STAGES[job.stage](gpt.seeded(make), partial(torch.optim.AdamW, lr=0.1))


def _step(engine: Engine, job: Job, number: int) -> None:
    engine(gpt.numbers(4, job.width, seed=10 * number + dist.get_rank())).square().sum().backward()
    engine.step()


def _digest(engine: Engine) -> str:
    digest = hashlib.sha256()
    with engine.full_parameters() as net:
        for parameter in net.parameters():
            digest.update(parameter.detach().clone().numpy().tobytes())
    return digest.hexdigest()


def _first(job: Job) -> Saved:
    """On every rank: a step, a checkpoint, and what a second step would make of it."""
    engine = _engine(job)
    _step(engine, job, 0)
    begin = time.monotonic()
    save(engine, job.folder)
    seconds, old = time.monotonic() - begin, _digest(engine)
    _step(engine, job, 1)
    return Saved(old, _digest(engine), seconds)


def _again(job: Job, arm: Callable[[], object] = int) -> str:
    """On every rank: goes on from the checkpoint, and writes the next one while ``arm`` does its work."""
    engine = _engine(job)
    load(engine, job.folder)
    _step(engine, job, 1)
    arm()
    save(engine, job.folder)
    return _digest(engine)


def _read(job: Job) -> str:
    """On every rank: the parameters of the checkpoint."""
    engine = _engine(job)
    load(engine, job.folder)
    return _digest(engine)


def _on(world: World, run: Callable[..., str], job: Job, *more: object) -> str:
    """What all ranks say alike."""
    told = world.run(run, job, *more, timeout_s=LONG_S)
    return told[0] if len(set(told)) == 1 else f"ranks that differ: {told}"


def _check_kept(world: World, job: Job, saved: Saved, case: Case) -> None:
    """The old checkpoint, or the new one, is whole; and what the writer left is in nobody's way."""
    try:
        digest = _on(world, _read, job)
    except RankFailed as error:
        raise Lost(f"no checkpoint can be read: {first_line(error)}") from None
    case.keeps(digest in (saved.old, saved.new), "the checkpoint is neither the old one nor the new one")
    if digest == saved.old:
        digest = _on(world, _again, job)
        case.expect(digest == saved.new, "the step from the old checkpoint is another one than before")
        digest = _on(world, _read, job)
    case.expect(digest == saved.new, "the checkpoint that was written afterwards is not the new one")


def _draw(case: Case) -> tuple[int, Job]:
    ranks, stage = case.rng.choice((1, 2, 2, 3)), case.rng.choice((1, 2, 3))
    return ranks, Job(stage, WIDTH, case.folder / "at")


def _kill_within(delay_s: float, who: int) -> None:
    """Rank ``who`` is killed so much later, whatever it does then; of a negative number all ranks are."""
    if who in (-1, dist.get_rank()):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


#: The moments of a writer, by the function that it calls there; the first ones on any rank.
MOMENTS: dict[str, Any] = {
    "_size_and_digest": checkpoint, "_saved": checkpoint, "fsync": os, "_digest": checkpoint, "rename": Path,
    "dump": json,
}  # fmt: skip


def _kill_at(moment: str, who: int) -> None:
    if who == dist.get_rank():

        def end(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(MOMENTS[moment], moment, end)


@fault("checkpoints/killed while saving", ("one rank", "all ranks", "at a moment"), weight=3)
def _killed_while_saving(case: Case) -> str:
    """Ranks are killed while they write the second checkpoint: one, all, or one at a chosen call."""
    ranks, job = _draw(case)
    with World(ranks) as world:
        saved = world.run(_first, job, timeout_s=LONG_S)[0]
        pids, who = world.pids, case.rng.randrange(ranks)
        if case.way == "at a moment":
            moment = case.rng.choice(list(MOMENTS))
            arm = partial(_kill_at, moment, who if moment in list(MOMENTS)[:3] else 0)
        else:
            delay_s = 1.3 * saved.seconds * case.rng.random()
            arm = partial(_kill_within, delay_s, -1 if case.way == "all ranks" else who)
        told = None
        try:
            world.run(_again, job, arm, timeout_s=LONG_S)
            case.expect(case.way != "at a moment", f"none was killed, since none comes to that moment: {arm}")
        except RankDied as error:
            told = first_line(error)
            works(world, pids)
    with World(ranks) as world:  # fresh: a killing that comes late hits nobody
        _check_kept(world, job, saved, case)
    if told is None:
        raise NotReached("the save was quicker than its killing")
    return told


@fault("checkpoints/damaged", ("truncated", "changed", "longer", "missing"), weight=3)
def _damaged(case: Case) -> str:
    """A file of the checkpoint is cut off, changed by one bit, longer, or gone: refused by its name.

    A changed bit of a manifest may lie between two values, as a space that becomes another one: it says what it said.
    """
    ranks, job = _draw(case)
    with World(ranks) as world:
        saved = world.run(_first, job, timeout_s=LONG_S)[0]
        path = case.rng.choice(sorted(job.folder.iterdir()))
        place = damaged(case, path)
        try:
            digest = _on(world, _read, job)
        except RankFailed as error:
            told = first_line(error)
            named = path.name in told and error.first[1].type in ("ValueError", "FileNotFoundError")
            case.expect(named, f"the error does not name {path.name}, {case.way} at {place}: {told}")
            return told
    same = digest == saved.old and case.way == "changed" and path.suffix == ".json"
    case.expect(same, f"no error, but a result: {path.name} is {case.way} at {place}")
    return "what the manifest says has not changed"


def _limit_files(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


@fault("checkpoints/full disk", ("a small disk", "a limit of files"), weight=2)
def _full_disk(case: Case) -> str:
    """There is room for the first checkpoint, not for the second: an error that names the file, and the first stays."""
    ranks, job = _draw(case)
    with World(ranks) as world:
        if case.way == "a limit of files":
            saved = world.run(_first, job, timeout_s=LONG_S)[0]
            largest = max(path.stat().st_size for path in job.folder.glob("shard-*"))
            arm = partial(_limit_files, int(largest * case.rng.random() * 0.99))
            says = r"at cannot be written: rank \d: .*|pardemo\.json|File too large"
            told = ends_in(RankFailed, says, partial(_on, world, _again, job, arm))
            _check_kept(world, job, saved, case)
        else:
            with small_disk(case.folder / "disk", int(ROOM * (1.15 + 0.7 * case.rng.random()))) as disk:
                job = job._replace(folder=disk / "at")
                saved = world.run(_first, job, timeout_s=LONG_S)[0]
                says = r"at cannot be written: rank \d: .*|pardemo\.json|No space left"
                told = ends_in(RankFailed, says, partial(_on, world, _again, job))
                case.keeps(_on(world, _read, job) == saved.old, "the checkpoint from before the full disk")
    return told
