"""Stops and resumes a script in trials; a launcher of its own, which can be killed, runs it on ranks."""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pardemo.deadline import Deadline
from pardemo.script.compare import proof, run_layouts, runs
from pardemo.script.compare.differences import Finding
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import ProveError, Run, RunOptions
from pardemo.script.resume import GRACE_S, STEPS, judge
from pardemo.script.resume.results import StopVerdict, Trial
from pardemo.script.resume.stop_follower import StopFollower, complete_saves
from pardemo.script.resume.stops import KINDS, NEVER, Stop, draw_stops

#: What stands for the folder of a run in the script's line, until each run has one of its own.
FOLDER = "\x02folder\x02"


def run_and_kill(layout: RunLayout, options: RunOptions, folder: Path, stop: Stop, saves: Path) -> str:
    """Runs the script in a process of its own and kills that at a given moment; returns an error's text, or none."""
    folder.mkdir(parents=True, exist_ok=True)
    marker, request = folder / "stop", folder / "request"
    request.write_bytes(pickle.dumps((layout, options, folder, stop, saves)))
    words = [sys.executable, "-m", "pardemo.script.resume.trials", str(request)]
    paths = os.pathsep.join(entry for entry in sys.path if entry)  # it is to find what this process finds
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as launcher:  # fmt: skip
        ranks: list[psutil.Process] = []
        try:
            limit = Deadline(options.timeout_s, [launcher.pid])
            while not marker.exists() and launcher.poll() is None and limit.left_s():
                time.sleep(0.01)
            with contextlib.suppress(psutil.NoSuchProcess):
                ranks = psutil.Process(launcher.pid).children(recursive=True)
        finally:
            launcher.kill()  # SIGKILL: the stop itself; or the end of one that never came
    limit, left = Deadline(10.0, [process.pid for process in ranks]), ranks
    while left and limit.left_s():
        left = psutil.wait_procs(left, timeout=0.1)[1]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)
    if not marker.exists():
        error = folder / "error"
        return f"before the stop, {error.read_text('utf-8')}" if error.exists() else NEVER
    return f"{len(left)} processes outlived their launcher by 10 s" if left else ""


def run_request(request: str) -> None:
    """Runs a request until it is killed, or until its standard input closes because its parent is gone."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    run = _recorded(*pickle.loads(Path(request).read_bytes()))
    if run.error:  # it ended before it was killed, and nobody else has heard why
        Path(request).with_name("error").write_text(run.error, "utf-8")


def _end_with_input() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGKILL)


#: What two layouts' rounding makes of parameters in some steps, relative to each tensor's largest number.
ROUNDED = 1e-3


def run_trials(
    layouts: Sequence[RunLayout],
    resumed: Sequence[RunLayout],
    options: RunOptions,
    kinds: Sequence[str],
    seed: int,
    grace_s: float = GRACE_S,
) -> StopVerdict:
    """Stops the script in the first layout, and resumes it in each.

    Args:
        layouts: with the line that begins. resumed: the same, with the line that goes on.

    Raises:
        ProveError: the undisturbed run could not be run, is not the same twice, or saves nothing in time.
    """
    with runs.scratch_folder() as folder:
        return _verdict(layouts, resumed, options, kinds, seed, grace_s, Path(folder))


def _verdict(
    layouts: Sequence[RunLayout], resumed: Sequence[RunLayout], options: RunOptions, kinds: Sequence[str], seed: int,
    grace_s: float, scratch: Path,
) -> StopVerdict:  # fmt: skip
    first, again, tolerance, options = proof.run_twice(
        lambda options, name: _recorded(layouts[0], options, scratch / name), options
    )
    exact = not proof.difference_between(first, again, 0.0, options.sketched)  # to the last bit
    masks = any(step.masks for record in first.records for step in record.steps)
    verdict = StopVerdict(layouts[0], masks, first.steps)
    records = [record.steps for record in first.records]
    verdict.saved, asynchronous = _saved(first)
    saves_s = {number: max((steps[number].saves for steps in records), key=sum) for number in range(first.steps)}
    try:
        drawn = draw_stops(
            kinds, first.steps, verdict.saved, {n: s for n, s in saves_s.items() if s}, layouts[0].ranks, seed
        )
    except ValueError as error:
        raise ProveError(str(error)) from None
    if "save" in kinds and not any(stop.kind == "save" for stop in drawn):
        verdict.notes.append(
            "no stop during a save: none by torch.save, safetensors or torch.distributed.checkpoint was seen behind a "
            "step that has an earlier save to go back to"
        )
    if not drawn:
        raise ProveError(f"{verdict.notes[-1]}: there is nothing to stop; say other --stops")
    verdict.notes += first.records[0].notes
    if options.sketched:
        verdict.notes.append(f"{sum(runs.elements(first).values()):,} elements: parameters are compared by sketches")
    pairs = [(stop, layouts[0], resumed[0]) for stop in drawn]
    others = zip(layouts[1:], resumed[1:], strict=True)
    pairs += [(drawn[number % len(drawn)], begun, layout) for number, (begun, layout) in enumerate(others)]
    for number, (stop, resumed_on, layout) in enumerate(pairs):
        folder = scratch / f"trial{number}"
        expected = max(step for step in verdict.saved if 0 < step < stop.done + (stop.kind != "save"))
        trial = Trial(replace(stop, grace_s=grace_s), layout, expected, asynchronous, stop.kind == "save")
        resumed_run = _stop_and_resume(trial, layouts[0], first, options, folder, verdict.saved)
        if resumed_run is not None:
            there = partial(_undisturbed_there, resumed_on, options, folder) if resumed_on is not layouts[0] else None
            try:
                _judge(trial, _compare_resumed(trial, first, resumed_run, tolerance, exact, there), there)
            except ProveError as error:
                trial.error = str(error)
        verdict.trials.append(trial)
        shutil.rmtree(folder, ignore_errors=True)
    return verdict


def _saved(first: Run) -> tuple[list[int], bool]:
    """Returns the steps after which the script saves, and whether it goes on meanwhile.

    Files change there; where calls that save were seen, a file that changes after other steps is a log.
    """
    records = [record.steps for record in first.records]
    changed = [number for number, step in enumerate(records[0]) if step.saved]
    called = [number for number in changed if any(steps[number].saves for steps in records if number < len(steps))]
    asynchronous = any(step.asynchronous for steps in records for step in steps)
    return (changed if asynchronous else called or changed), asynchronous


def _recorded(
    layout: RunLayout, options: RunOptions, folder: Path, stop: Stop | None = None, saves: Path | None = None
) -> Run:
    """Runs the script with its saves in ``saves``; in a folder of its own where that is None."""
    saves = saves or folder / "saves"
    saves.mkdir(parents=True, exist_ok=True)
    layout = replace(layout, line=tuple(word.replace(FOLDER, str(saves)) for word in layout.line))
    follow = partial(StopFollower, folder=str(saves), stop=stop, marker=str(folder / "stop"))
    return runs.run_layout(layout, replace(options, follow=follow), folder / "recorded")


def _stop_and_resume(
    trial: Trial, begun: RunLayout, first: Run, options: RunOptions, folder: Path, saved: Sequence[int]
) -> Run | None:
    """Stops a run and resumes it; the run that went on, where it took a step."""
    stop, saves, marker = trial.stop, folder / "saves", folder / "stopped" / "stop"
    asked = replace(options, steps=first.steps)
    if stop.kind == "launcher":
        trial.error = run_and_kill(begun, asked, marker.parent, stop, saves)
    else:
        stopped = _recorded(begun, asked, marker.parent, stop, saves)
        trial.error = _not_stopped(stop, stopped, marker.exists(), first)
        trial.overdue = stop.kind == "term" and "killed by SIGALRM" in stopped.error
    if trial.error:
        return None
    if not trial.asynchronous and not _save_is_complete(first, trial.expected, str(marker)):
        trial.in_save = True
        trial.expected = max((number for number in saved if 0 < number < trial.expected), default=0)
        if not trial.expected:
            trial.error = "it cut off the only save: there is nothing to go back to"
            return None
    expected = trial.expected
    length = len(first.records[0].steps)
    more = length - expected + (first.records[0].ended == "end")
    resumed = _recorded(trial.layout, replace(options, steps=max(2, more)), folder / "resumed", None, saves)
    if resumed.timed_out:
        trial.error = f"the run that goes on: {resumed.error}"
        return None
    if resumed.error:
        why = "after a stop within a save, the script cannot go on" if trial.in_save else "it cannot go on"
        trial.findings.append(Finding(trial.name, expected + 1, "resume", "cannot-resume", f"{why}: {resumed.error}"))
        return None
    if not resumed.steps:
        why = f"it takes no step, and the undisturbed run takes {length - expected} more"
        trial.findings.append(Finding(trial.name, expected + 1, "length", "ends-elsewhere", why))
        return None
    return resumed


def _save_is_complete(first: Run, done: int, marker: str) -> bool:
    """Whether every rank had made its saves up to this step when a run was stopped, as far as calls were seen.

    A rank that saves makes no other wait where the script has no barrier, and ends soon after the one that is killed.
    """
    return all(
        complete_saves(marker, rank, done) >= len(record.steps[done].saves) for rank, record in enumerate(first.records)
    )


def _not_stopped(stop: Stop, stopped: Run, marked: bool, first: Run) -> str:
    """Says why a run was not stopped as it should have been; empty if it was. ``marked``: whether the stop began."""
    if not marked:
        return f"before the stop, {stopped.error}" if stopped.error else NEVER
    if stop.kind == "term" and not stopped.error and stopped.steps >= first.steps:
        return "after SIGTERM the script went on to its end, in its time of grace: nothing is left to resume"
    return NEVER if not stopped.error and stop.kind != "term" else ""


def _undisturbed_there(layout: RunLayout, options: RunOptions, folder: Path) -> Run:
    """Runs the script undisturbed in the layout in which a stopped run goes on."""
    undisturbed = _recorded(layout, options, folder / "own")
    runs.require_steps(undisturbed)
    return undisturbed


def _compare_resumed(
    trial: Trial, first: Run, resumed: Run, tolerance: float, exact: bool, there: Callable[[], Run] | None
) -> judge.ResumedRun:
    """Compares the run that goes on with the undisturbed one; ``there``: that one in the layout of the resumed run.

    On another layout the parameters are put together. Where nothing says how the undisturbed run's were cut, as
    Megatron's, it is held against the undisturbed run there, which has come to the same numbers but for rounding.
    """
    noise: judge.Noise = {}
    if there is not None:
        try:
            Reference(first, tolerance)
        except ProveError:
            first = there()
            noise, tolerance, exact = judge.rounding_only(first), max(ROUNDED, tolerance), False
        else:
            return judge.compare_full_parameters(trial.name, first, resumed, trial.expected, tolerance)
    begins = judge.resumed_after(first, resumed, trial.expected, 0.0 if exact else tolerance, noise)
    return judge.ResumedRun(trial.name, first, resumed, trial.expected, begins, tolerance, noise, exact)


def _judge(trial: Trial, resumed: judge.ResumedRun, there: Callable[[], Run] | None) -> None:
    trial.begins, trial.states = resumed.begins, resumed.states
    if _resumes_elsewhere(trial):
        return
    judge.judge_resumed(resumed)
    wrong_length = judge.length_difference(resumed.reference, resumed.run, resumed.last_step)
    if wrong_length and there and resumed.compared:  # other ranks may fill up, or leave out, an epoch's last batch
        wrong_length = judge.length_difference(there(), resumed.run, resumed.last_step)
    if wrong_length:
        resumed.add("length", "ends-elsewhere", wrong_length, step=resumed.reference.steps)
    trial.states, trial.findings = resumed.states, [*trial.findings, *resumed.findings]
    trial.exact = resumed.exact and resumed.repeats and not trial.findings


def _resumes_elsewhere(trial: Trial) -> bool:
    """Whether the run begins anew, of which all else follows; adds that, and that it goes on behind an older save."""
    if trial.begins is None or trial.begins >= trial.expected or (trial.begins and trial.asynchronous):
        return False
    if trial.asynchronous:
        trial.error = "it begins anew, and saves are made by another thread: perhaps none was whole at the stop"
        return True
    saved = f"the save after step {trial.expected}"
    if trial.begins == 0:
        why = f"it begins anew: nothing of {saved} is used"
        trial.findings.append(Finding(trial.name, 1, "resume", "begins-anew", why))
    elif trial.stop.kind != "save":
        why = f"it continues after step {trial.begins}, and the last whole save is the one after step {trial.expected}"
        trial.findings.append(Finding(trial.name, trial.begins + 1, "resume", "older-save", why))
    return trial.begins == 0


def stopped(
    line: str | Sequence[str],
    layouts: Sequence[Mapping[str, Any] | str],
    *,
    resume: str | Sequence[str] | None = None,
    stops: Sequence[str] | None = None,
    seed: int = 0,
    steps: int = STEPS,
    double: bool = False,
    grace_s: float = GRACE_S,
    timeout_s: float = 600.0,
) -> StopVerdict:
    """Runs a training script undisturbed, stops it, resumes it, and says what is not as without the stop.

    >>> stopped("train.py --out {folder}", ["ranks=2"]).equal    # doctest: +SKIP
    True

    Args:
        line: the script and its arguments. ``{folder}`` is where it saves; each run gets a new one, and the one that
            goes on that of the run that was stopped. Other ``{names}`` are the layouts'.
        layouts: as ``"ranks=2 batch=4"``. The script is stopped in the first, and resumed in each.
        resume: the line that goes on; the same where it is None.
        stops: kinds of :data:`~pardemo.script.resume.stops.KINDS`; all where it is None. One stop of each.
        seed: of the steps, moments and ranks that are drawn.
        steps: of the undisturbed run. grace_s: between SIGTERM and SIGKILL. timeout_s: for each run.

    Raises:
        ValueError: a line, a layout or a kind cannot be read; the line has no ``{folder}``.
        ProveError: the undisturbed run could not be run, is not the same twice, or saves nothing before its last steps.
    """
    words = _words(line)
    again = words if resume is None else _words(resume)
    for which, argv in (("the script's line", words), ("--resume", again)):
        if not any("{folder}" in word for word in argv):
            raise ValueError(f"{which} has no {{folder}}: say with it where the script saves, as --out {{folder}}")
    kinds = tuple(KINDS) if stops is None else tuple(stops)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"{unknown[0]!r} is no kind of stop: {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"say a kind of stop: {', '.join(KINDS)}")
    begun, resumed = (
        run_layouts.from_texts(layouts, [word.replace("{folder}", FOLDER) for word in argv], alone=True)
        for argv in (words, again)
    )
    for layout in resumed:  # the line that goes on is needed last, and what it lacks is told first
        runs.launch_of(layout)
    options = RunOptions(steps=steps, double=double, timeout_s=timeout_s)
    return run_trials(begun, resumed, options, kinds, seed, grace_s)


def _words(line: str | Sequence[str]) -> list[str]:
    return run_layouts.words_of(line) if isinstance(line, str) else list(line)


if __name__ == "__main__":
    run_request(sys.argv[1])
