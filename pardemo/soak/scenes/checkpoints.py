"""Faults of the ZeRO engines' checkpoints: writers that die, files that are damaged, a disk that is full.

Whatever happens to a writer, the checkpoint that was whole before, or the new one, can be read, bit by bit.
"""

import hashlib
import json
import os
import pickle
import re
import resource
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from pardemo import RankDied, RankFailed, World
from pardemo.small_models import gpt
from pardemo.soak.layouts.run import first_line
from pardemo.soak.scene import Lost, NotReached, Scene, Wrong, scene
from pardemo.soak.scenes.parts import LONG_S, ends_in, nothing_below, small_disk, works
from pardemo.zero import Zero1, Zero2, Zero3, checkpoint_folder, load, save
from pardemo.zero.engine import Engine

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
WIDTH = 160  # a checkpoint of some 300 kB a rank: writing it takes milliseconds


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
    with engine.whole() as net:
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


def _again(job: Job, arm: Callable[[], object]) -> str:
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


def _same(told: list[str]) -> str:
    return told[0] if len(set(told)) == 1 else f"ranks that differ: {told}"


def _check_kept(world: World, job: Job, saved: Saved, scene: Scene) -> None:
    """The old checkpoint, or the new one, is whole; and what the writer left is in nobody's way."""
    try:
        digest = _same(world.run(_read, job, timeout_s=LONG_S))
    except RankFailed as error:
        raise Lost(f"no checkpoint can be read: {first_line(error)}") from None
    scene.keeps(digest in (saved.old, saved.new), "the checkpoint is neither the old one nor the new one")
    if digest == saved.old:
        digest = _same(world.run(_again, job, int, timeout_s=LONG_S))
        scene.expect(digest == saved.new, "the step from the old checkpoint is another one than before")
        digest = _same(world.run(_read, job, timeout_s=LONG_S))
    scene.expect(digest == saved.new, "the checkpoint that was written afterwards is not the new one")


def _draw(scene: Scene) -> tuple[int, Job]:
    ranks, stage = scene.chance.choice((1, 2, 2, 3)), scene.chance.choice((1, 2, 3))
    return ranks, Job(stage, WIDTH, scene.folder / "at")


def _kill_within(delay_s: float, who: int) -> None:
    """Rank ``who`` is killed so much later, whatever it does then; none of a negative number is: all ranks are."""
    if who in (-1, dist.get_rank()):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


#: The moments of a writer, by the function of the folder that it calls.
MOMENTS = ("begin", "write_tensors", "write_manifest", "give_name", "partial_of", "checksum", "_sync")


def _kill_at(moment: str, who: int) -> None:
    if who == dist.get_rank():

        def end(*_: object, **__: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(checkpoint_folder, moment, end)


@scene("checkpoints/killed while saving", ("one rank", "all ranks", "at a moment"), weight=3)
def _killed_while_saving(scene: Scene) -> str:
    """Ranks are killed while they write the second checkpoint: one, all, or one at a chosen call."""
    ranks, job = _draw(scene)
    with World(ranks) as world:
        saved = world.run(_first, job, timeout_s=LONG_S)[0]
        pids, who = world.pids, scene.chance.randrange(ranks)
        if scene.way == "at a moment":
            moment = scene.chance.choice(MOMENTS)
            arm = partial(_kill_at, moment, who if moment in ("write_tensors", "checksum", "_sync") else 0)
        else:
            delay_s = 1.3 * saved.seconds * scene.chance.random()
            arm = partial(_kill_within, delay_s, -1 if scene.way == "all ranks" else who)
        told = None
        try:
            world.run(_again, job, arm, timeout_s=LONG_S)
            scene.expect(scene.way != "at a moment", f"none was killed, since none comes to that moment: {arm}")
        except RankDied as error:
            told = str(error).splitlines()[0]
            works(world, pids)
    with World(ranks) as world:  # fresh: a killing that comes late hits nobody
        _check_kept(world, job, saved, scene)
    nothing_below()
    if told is None:
        raise NotReached("the save was quicker than its killing")
    return told


KILLED = {"SIGKILL": signal.SIGKILL}


def _look_after(scene: Scene) -> str:
    """In another process: what was whole is whole, and the next save works."""
    ranks, job = _draw(scene)
    if not (scene.folder / "saved.json").exists():
        return "killed before its first checkpoint"
    with World(ranks) as world:
        _check_kept(world, job, Saved(*json.loads((scene.folder / "saved.json").read_text())), scene)
    nothing_below()
    return "kept"


@scene("checkpoints/parent killed", KILLED, KILLED, within_s=0.5, after=_look_after)
def _parent_killed(scene: Scene) -> None:
    """The process of the World is killed while its ranks write one checkpoint after the other."""
    ranks, job = _draw(scene)
    with World(ranks) as world:
        saved = world.run(_first, job, timeout_s=LONG_S)[0]
        part = scene.folder / "saved.json.part"
        part.write_text(json.dumps(saved))
        part.rename(scene.folder / "saved.json")
        scene.begin()
        world.run(_over_and_over, job, timeout_s=LONG_S)


def _over_and_over(job: Job) -> None:
    engine = _engine(job)
    load(engine, job.folder)
    _step(engine, job, 1)
    while True:
        save(engine, job.folder)


class Canary:
    """A pickle of it makes a folder where it is read."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (self.path,)


def _damage(scene: Scene, folder: Path) -> tuple[Path, str]:
    """Damages a file of the checkpoint; which one, and what was done to it."""
    path = scene.chance.choice(sorted(folder.iterdir()))
    whole = path.read_bytes()
    place = scene.chance.randrange(len(whole))
    if scene.way == "truncated":
        path.write_bytes(whole[:place])
    elif scene.way == "changed":
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << scene.chance.randrange(8)]) + whole[place + 1 :])
    elif scene.way == "longer":
        path.write_bytes(whole + bytes(scene.chance.randrange(1, 100)))
    elif scene.way == "missing":
        path.unlink()
    elif scene.way == "a pickle":
        path.write_bytes(pickle.dumps(Canary(str(scene.folder / "canary"))))
    elif scene.way == "newer":
        path = folder / checkpoint_folder.MANIFEST
        path.write_text(json.dumps(json.loads(path.read_text()) | {"format": checkpoint_folder.FORMAT + 1}))
    return path, f"{path.name} {scene.way} at {place} of {len(whole)}"


DAMAGES = ("truncated", "changed", "longer", "missing", "a pickle", "newer", "another model", "another stage")


@scene("checkpoints/damaged", DAMAGES, weight=3)
def _damaged(scene: Scene) -> str:
    """A file is cut off, changed by one bit, longer, gone, a pickle; or the checkpoint is of another model: refused."""
    ranks, job = _draw(scene)
    with World(ranks) as world:
        saved = world.run(_first, job, timeout_s=LONG_S)[0]
        other, says, what = job, "", scene.way
        if scene.way == "another model":
            other, says = job._replace(width=WIDTH + 1), "checkpoint at"
        elif scene.way == "another stage":
            other, says = job._replace(stage=job.stage % 3 + 1), "checkpoint at"
        else:
            path, what = _damage(scene, job.folder)
            says = path.name.replace(".", r"\.")
        told = _refused(world, other, saved, says, what)
        scene.expect(not (scene.folder / "canary").exists(), f"code of a checkpoint ran: {what}")
    nothing_below()
    return told


def _refused(world: World, job: Job, saved: Saved, says: str, what: str) -> str:
    """The error of reading a damaged checkpoint.

    A changed bit of a manifest may lie between two values, as a space that becomes another one: it says what it said.
    """
    try:
        results = world.run(_read, job, timeout_s=LONG_S)
    except RankFailed as error:
        told = first_line(error)
        if re.search(says, told) and error.first[1].type in ("ValueError", "FileNotFoundError"):
            return told
        raise Wrong(f"the error does not name the file ({what}): {told}") from None
    if says.endswith("json") and " changed at " in what and set(results) == {saved.old}:
        return "what the manifest says has not changed"
    raise Wrong(f"no error, but a result: {what}")


def _limit_files(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))


@scene("checkpoints/full disk", ("a small disk", "a limit of files"), weight=2)
def _full_disk(scene: Scene) -> str:
    """There is room for the first checkpoint, not for the second: an error that names the file, and the first stays."""
    ranks, job = _draw(scene)
    with World(ranks) as world:
        if scene.way == "a limit of files":
            saved = world.run(_first, job, timeout_s=LONG_S)[0]
            largest = max(path.stat().st_size for path in job.folder.glob("rank-*"))
            arm = partial(_limit_files, int(largest * scene.chance.random() * 0.99))
            told = ends_in(RankFailed, r"rank-\d+\.safetensors", partial(world.run, _again, job, arm, timeout_s=LONG_S))
            _check_kept(world, job, saved, scene)
        else:
            elements = 2 * (WIDTH * WIDTH + WIDTH) * 3 * 4  # parameters and two moments, in fp32
            room = int(elements * (1.15 + 0.7 * scene.chance.random()))
            with small_disk(scene.folder / "disk", room) as disk:
                job = job._replace(folder=disk / "at")
                saved = world.run(_first, job, timeout_s=LONG_S)[0]
                says = r"rank-\d+\.safetensors|pardemo\.json|No space left"
                told = ends_in(RankFailed, says, partial(world.run, _again, job, int, timeout_s=LONG_S))
                digest = _same(world.run(_read, job, timeout_s=LONG_S))
                scene.keeps(digest == saved.old, "the checkpoint from before the full disk")
    nothing_below()
    return told
