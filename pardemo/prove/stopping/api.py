"""A script that is stopped and resumed, from Python."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from pardemo.measure.launch_lines import read
from pardemo.prove import layouts as of_layouts
from pardemo.prove import runner
from pardemo.prove.runner import Options
from pardemo.prove.stopping import trials
from pardemo.prove.stopping.launched import FOLDER
from pardemo.prove.stopping.stops import GRACE_S, KINDS, STEPS
from pardemo.prove.stopping.trials import Verdict


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
) -> Verdict:
    """Runs a training script undisturbed, stops it, resumes it, and says what is not as without the stop.

    >>> stopped("train.py --out {folder}", ["ranks=2"]).equal    # doctest: +SKIP
    True

    Args:
        line: the script and its arguments. ``{folder}`` is where it saves; each run gets a new one, and the one that
            goes on that of the run that was stopped. Other ``{names}`` are the layouts'.
        layouts: as ``"ranks=2 batch=4"``. The script is stopped in the first, and resumed in each.
        resume: the line that goes on; the same where it is None.
        stops: kinds of :data:`~pardemo.prove.stopping.stops.KINDS`; all where it is None. One stop of each.
        seed: of the steps, moments and ranks that are drawn.
        steps: of the undisturbed run. grace_s: between SIGTERM and SIGKILL. timeout_s: for each run.

    Raises:
        ValueError: a line, a layout or a kind cannot be read; the line has no ``{folder}``.
        ProveError: the undisturbed run could not be run, is not the same twice, or saves nothing before its last steps.
    """
    words = _words(line)
    again = words if resume is None else _words(resume)
    for which, of in (("the script's line", words), ("--resume", again)):
        if not any("{folder}" in word for word in of):
            raise ValueError(f"{which} has no {{folder}}: say with it where the script saves, as --out {{folder}}")
    kinds = tuple(KINDS) if stops is None else tuple(stops)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise ValueError(f"{unknown[0]!r} is no kind of stop: {', '.join(KINDS)}")
    if not kinds:
        raise ValueError(f"say a kind of stop: {', '.join(KINDS)}")
    begun, resumed = (of_layouts.one_or_more(layouts, _marked(of)) for of in (words, again))
    for layout in resumed:  # the line that goes on is needed last, and what it lacks is told first
        launch = read(list(layout.line), layout.ranks)
        if not launch.module:
            runner.found(launch.script, os.getcwd())
    options = Options(steps=steps, double=double, timeout_s=timeout_s)
    return trials.run(begun, resumed, options, kinds, seed, grace_s)


def _words(line: str | Sequence[str]) -> list[str]:
    return of_layouts.words_of(line) if isinstance(line, str) else list(line)


def _marked(words: Sequence[str]) -> list[str]:
    return [word.replace("{folder}", FOLDER) for word in words]
