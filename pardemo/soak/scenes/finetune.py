"""Faults of the fine-tune: killed while it trains or saves, damaged checkpoints, another job, two runs, a full disk."""

import contextlib
import hashlib
import os
import re
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil

from pardemo import RankError, project, seals
from pardemo.deadline import Deadline
from pardemo.finetune import checkpoints
from pardemo.finetune.launch import launch
from pardemo.finetune.recipe import Recipe
from pardemo.soak.scene import Lost, NotReached, Scene, Wrong, scene
from pardemo.soak.scenes.finetune_job import FIRST, LAST, adapter_of, base_of, job_in, seconds_of
from pardemo.soak.scenes.parts import LONG_S, nothing_below, small_disk
from pardemo.world import nursery


def _goes_on(scene: Scene, base: Path, run: Path) -> str:
    """Resumes a run to its end: from its newest whole checkpoint, and to the weights of the undisturbed one.

    A run that ended within its first save has half a checkpoint and no whole one: that is refused, and ``overwrite``
    begins anew, as the refusal says.
    """
    limit = Deadline(10.0, [os.getpid()])
    while _ranks():  # one that is a zombie may have threads that still end, and the run's lock with them
        scene.expect(limit.left_s() > 0, f"ranks that never end: {_ranks()}")
        time.sleep(0.01)
    # not as resume itself looks for it: the seal is written last
    sealed = [path.parent.name for path in run.glob(f"checkpoint-*/{seals.SEAL}")]
    begun = [path.name for path in run.glob("checkpoint-*")]
    if begun and not sealed:
        _refused_with_half_a_checkpoint(scene, job_in(base, run), begun[0])
        result = launch(job_in(base, run), overwrite=True)
    else:
        try:
            result = launch(job_in(base, run), resume=True)
        except ValueError as error:
            if not sealed:
                raise
            raise Lost(f"{len(sealed)} whole checkpoints, and none is gone on from: {error}") from None
    expected = max(sealed, key=lambda name: int(name.removeprefix("checkpoint-")), default=None)
    scene.keeps(result.resumed_from == expected, f"resumed from {result.resumed_from}, the newest is {expected}")
    scene.expect(adapter_of(run) == adapter_of(base / "run"), "the weights are not those of the undisturbed run")
    nothing_below()
    return f"resumed from {expected}"


def _refused_with_half_a_checkpoint(scene: Scene, job: Recipe, name: str) -> None:
    """Nothing was lost that had been whole; but whose work lies there is not known, and ``resume`` removes nothing."""
    try:
        launch(job, resume=True)
    except ValueError as error:
        due = rf"no checkpoint that can be read \({name} is passed over: it was never finished\): --overwrite removes"
        scene.expect(re.search(due, str(error)) is not None, f"half a checkpoint is told as: {error}")
    else:
        raise Wrong(f"went on from half a checkpoint, {name}")


@scene("finetune/rank killed")
def _rank_killed(scene: Scene) -> str:
    """A rank is killed at any moment: an error; the run goes on from its newest checkpoint to the same weights."""
    base, run = base_of(scene), scene.folder / "run"
    over, killed = threading.Event(), threading.Event()
    delay_s = 0.8 * seconds_of(base) * scene.chance.random()
    whom = scene.chance.randrange(2)

    def kill() -> None:
        if over.wait(delay_s):
            return
        while len(ranks := _ranks()) < 2:  # they have not started yet, or have ended
            if over.wait(0.01):
                return
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[-1 - whom], signal.SIGKILL)
            killed.set()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        launch(job_in(base, run))
        told = None
    except RankError as error:
        told = str(error).splitlines()[0]
    finally:
        over.set()
        killer.join(LONG_S)
    nothing_below()
    if told is None:
        scene.expect(adapter_of(run) == adapter_of(base / "run"), "the weights are not those of the undisturbed run")
        raise NotReached("the run was over before a rank was killed")
    due = killed.is_set() and "died: killed by SIGKILL" in told
    scene.expect(due, f"killed: {killed.is_set()}; told as: {told}")
    return f"{told}; {_goes_on(scene, base, run)}"


def _ranks() -> list[int]:
    """This process's ranks: what runs below it, but for the processes that ranks start from."""
    nurseries = {handle.pid for handle in nursery.living()}
    return sorted(process.pid for process in psutil.Process().children(recursive=True) if process.pid not in nurseries)


def _resume(scene: Scene) -> str:
    base, run = base_of(scene), scene.folder / "run"
    whole = checkpoints.newest(run)[0] if run.exists() else None
    if whole is None and (run / "adapter").exists():
        raise Wrong("an adapter without a checkpoint")
    return _goes_on(scene, base, run)


ENDS = {"SIGKILL": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT}


@scene("finetune/ends", ENDS, ENDS, within_s=3.0, after=_resume)
def _ends(scene: Scene) -> str:
    """The command is interrupted or killed at any moment; another one resumes to the same weights."""
    base, run = base_of(scene), scene.folder / "run"
    try:
        scene.begin()
        launch(job_in(base, run))
    except KeyboardInterrupt:
        return "interrupted"
    raise NotReached("the run was over before its signal")


def _damage(scene: Scene, folder: Path) -> str:
    path = scene.chance.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    whole = path.read_bytes()
    place = scene.chance.randrange(max(1, len(whole)))
    if scene.way == "truncated":
        path.write_bytes(whole[:place] if whole else b"x")
    elif scene.way == "changed":
        bit = bytes([whole[place] ^ 1 << scene.chance.randrange(8)]) if whole else b"x"
        path.write_bytes(whole[:place] + bit + whole[place + 1 :])
    elif scene.way == "missing":
        path.unlink()
    elif scene.way == "one more file":
        path = folder / "more.pt"
        path.write_bytes(whole)
    return path.relative_to(folder).as_posix()


DAMAGES = ("truncated", "changed", "missing", "one more file", "the first save cut off")


@scene("finetune/damaged", DAMAGES, weight=2)
def _damaged(scene: Scene) -> str:
    """A file of the newest checkpoint is damaged: the run says which, and goes on from the checkpoint before."""
    base, run = base_of(scene), scene.folder / "run"
    if scene.way == "the first save cut off":
        shutil.copytree(base / "run" / FIRST, run / FIRST)
        for path in (run / FIRST / seals.SEAL, scene.chance.choice(sorted((run / FIRST).glob("*.*")))):
            path.unlink(missing_ok=True)
        return _goes_on(scene, base, run)
    shutil.copytree(base / "run", run)
    name = _damage(scene, run / LAST)
    result = launch(job_in(base, run), resume=True)
    told = " ".join(result.notes)
    sealed = name == seals.SEAL
    says = (name,) if not sealed else ("seal", "never finished", "another user", "not what was written", "missing")
    if result.resumed_from == LAST and sealed and scene.way == "changed":
        return "what the seal says has not changed"
    scene.expect(result.resumed_from == FIRST, f"resumed from {result.resumed_from} in spite of {name}")
    scene.expect(any(word in told for word in says), f"{name} {scene.way} is told as: {told}")
    scene.expect(adapter_of(run) == adapter_of(base / "run"), "the weights are not those of the undisturbed run")
    nothing_below()
    return told


@scene("finetune/another job", ("model", "data", "rank", "occupied"))
def _another_job(scene: Scene) -> str:
    """To go on with another model, other data or another adapter, or to begin in an occupied folder, is refused."""
    base, run = base_of(scene), scene.folder / "run"
    shutil.copytree(base / "run", run)
    before = _state(run)
    changes = {
        "model": f"model.path={base / 'other'}", "data": "data.max_samples=50", "rank": "lora.r=4",
        "occupied": "train.seed=1",
    }  # fmt: skip
    job = job_in(base, run, changes[scene.way])
    try:
        launch(job, resume=scene.way != "occupied")
    except ValueError as error:
        told = str(error)
    else:
        raise Wrong(f"another {scene.way} was taken")
    scene.expect("\n" not in told, f"more than one line: {told}")
    scene.expect(_state(run) == before, "the refused run has changed the folder")
    nothing_below()
    return told


def _state(run: Path) -> dict[str, str]:
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in run.rglob("*") if p.is_file()}


@scene("finetune/two runs", ("at once", "while it trains"))
def _two_runs(scene: Scene) -> str:
    """Of two runs with the same output_dir one is refused, in words, and the other has the weights as if alone."""
    run, begun, told = (scene.folder / name for name in ("run", "begun", "told"))
    resume, part = scene.chance.choice((False, True)), scene.chance.random()
    pid = os.fork()
    if pid == 0:  # a process of its own, before this one has threads: locks belong to processes
        base = base_of(scene)
        nursery.fork_here()
        begun.touch()
        told.write_text(_outcome(job_in(base, run), False))
        os._exit(0)
    signs = {"at once": begun, "while it trains": run / project.LOCK}
    limit = Deadline(LONG_S, [pid])
    while not signs[scene.way].exists() and not told.exists():
        scene.expect(limit.left_s() > 0, "the first run did not begin")
        time.sleep(0.01)
    base = base_of(scene)
    time.sleep(0.5 * part * seconds_of(base))
    second = _outcome(job_in(base, run), resume)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    scene.expect(code == 0, f"the first run's process ended with {code}")
    refused = [outcome for outcome in (told.read_text(), second) if outcome]
    scene.expect(len(refused) < 2, f"both failed: {refused}")
    scene.expect(adapter_of(run) == adapter_of(base / "run"), "the weights are not those of the undisturbed run")
    scene.keeps(checkpoints.newest(run)[0] == run / LAST, f"{LAST} is not whole: {checkpoints.newest(run)}")
    scene.expect(not (run / project.LOCK).exists(), "the lock is left")
    nothing_below()
    if not refused or "holds an earlier run" in refused[0]:
        raise NotReached("the first run was over before the second began")
    due = rf"another run \(process \d+\) writes to {re.escape(str(run))}: wait for it, or give another output_dir"
    scene.expect(re.search(due, refused[0]) is not None, f"told as: {refused[0]}")
    return refused[0]


def _outcome(job: Recipe, resume: bool) -> str:
    """Trains; empty where it did, else the first line of the error."""
    try:
        launch(job, resume=resume)
    except (RankError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""


@scene("finetune/full disk", ("a small disk", "a limit of files"))
def _full_disk(scene: Scene) -> str:
    """The disk is full at some moment of the run: an error that says so; what was whole before stays, and is read."""
    base, run = base_of(scene), scene.folder / "run"
    if scene.way == "a limit of files":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        shutil.copytree(base / "run" / FIRST, run / FIRST)
        largest = max(path.stat().st_size for path in (run / FIRST).rglob("*"))
        _limit_files(int(largest * (0.2 + 0.7 * scene.chance.random())), hard)
        try:
            told = _fails(scene, job_in(base, run), resume=True)
        finally:
            _limit_files(soft, hard)
        scene.keeps(checkpoints.newest(run)[0] == run / FIRST, "the checkpoint from before")
    else:
        need = sum(path.stat().st_size for path in (base / "run").rglob("*") if path.is_file())
        with small_disk(scene.folder / "disk", int(need * (0.1 + 0.6 * scene.chance.random()))) as disk:
            told = _fails(scene, job_in(base, disk / "run"), resume=False)
            if (disk / "run").exists():
                newest, _ = checkpoints.newest(disk / "run")
                if newest is not None:
                    shutil.copytree(newest, run / newest.name)
    nothing_below()
    return f"{told}; {_goes_on(scene, base, run)}"


def _limit_files(soft: int, hard: int) -> None:
    """For ranks to come: they have the limits of the processes that they are forked from."""
    for warm in nursery.living():
        resource.prlimit(warm.pid, resource.RLIMIT_FSIZE, (soft, hard))


def _fails(scene: Scene, job: Recipe, resume: bool) -> str:
    try:
        result = launch(job, resume=resume)
    except (RankError, OSError, ValueError) as error:
        scene.expect(
            re.search("could not be written|No space left|File too large", str(error)) is not None, f"told as: {error}"
        )
        return str(error).splitlines()[0]
    raise Wrong(f"trained on a full disk: {result}")
