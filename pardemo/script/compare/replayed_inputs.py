"""Records the inputs of a layout of a script, replays them in others, and reports what was replayed."""

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.script.compare import run_layouts, runs
from pardemo.script.compare.comparison import LayoutComparison
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import ProveError, Run, RunOptions
from pardemo.script.record.input_replayer import InputReplayer
from pardemo.script.record.model_outputs import REFERENCE, SAMPLES, samples_name
from pardemo.script.record.rank_record import ReplayReport
from pardemo.script.record.recorded_inputs import (
    BATCH,
    CALL,
    DRAW,
    INDEX,
    LOSS,
    ROUTE,
    SCORES,
    InputRecorder,
    RecordedInputs,
)
from pardemo.script.words import count_text, first_of

#: How the name of the temporary folder begins that a recording is written to first.
_WRITTEN = ".recorded-"
#: Names of the files of a recording, which a new recording replaces.
_FILES = re.compile(rf"{INDEX}|{REFERENCE}|{SAMPLES}|step\d+\.rank\d+\.safetensors")


def recording_folder(path: str) -> Path:
    """Makes a folder for recorded inputs, or checks that an existing one has nothing but an earlier recording.

    Raises:
        ValueError: the folder has other files, is a file itself, or cannot be written to; one line.
    """
    folder = project.writable_folder(path, "--record", "takes a folder")
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith(_WRITTEN))
    if others := [name for name in names if not _FILES.fullmatch(name)]:
        raise ValueError(f"--record: {path} has other things in it, as {others[0]}: say a folder of its own")
    return folder


def record_inputs(layout: RunLayout, options: RunOptions, folder: Path) -> RecordedInputs:
    """Runs a script in a layout, and writes what its steps train on to a folder, once the run is complete.

    Raises:
        ProveError: the layout has pipeline stages, or the script could not be run, or took no step.
    """
    if layout.size("pp") > 1:
        raise ProveError("inputs are recorded in a layout without pipeline stages: choose one with pp=1")
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WRITTEN) as temporary, runs.scratch_folder() as scratch:
        new = Path(temporary, "new")
        new.mkdir()
        follow = partial(InputRecorder, folder=str(new))
        run = runs.run_layout(layout, replace(options, follow=follow, sketched=True), Path(scratch))
        runs.require_steps(run)
        steps = min(len(record.steps) for record in run.records)
        recorded = RecordedInputs(str(new), dict(layout.values), layout.ranks, layout.size("dp"), steps, options.double)
        recorded.write()
        for entry in folder.iterdir():
            if _FILES.fullmatch(entry.name):
                entry.unlink()
        names = sorted(entry.name for entry in new.iterdir())
        for name in sorted(names, key=lambda name: name == INDEX):  # where an index is, all that it names is there
            os.replace(new / name, folder / name)
    return replace(recorded, folder=str(folder))


def recorded_text(recorded: RecordedInputs) -> str:
    """Describes a recording: its steps, samples, tensors of the loss, draws and routes."""
    step = recorded.step(0)
    slots = [slot for slot in step.slots if not slot.endswith(SCORES)]

    given = {slot: step.parts(slot)[0] for slot in slots if slot.startswith((f"{BATCH}/", f"{CALL}/0/"))}
    samples = count_text(sum(map(len, step.parts(samples_name(given)))), "sample")
    lines = [f"recorded  {recorded.name}: {count_text(recorded.steps, 'step')}, {samples} in each"]
    kinds = {
        LOSS: "what the loss reads beside the model's output", DRAW: "random numbers", ROUTE: "routes of tokens"
    }  # fmt: skip
    for kind, words in kinds.items():
        if places := dict.fromkeys(slot.split("/")[1] for slot in slots if slot.startswith(f"{kind}/")):
            lines.append(f"   {words}: {first_of(places, 4)}")
    return "\n".join([*lines, f"→ {recorded.folder}"])


def replayed_layouts(recorded: RecordedInputs, texts: Sequence[Any], line: Sequence[str]) -> list[RunLayout]:
    """Returns the recorded layout, which is the reference, and the layouts to compare with it.

    Raises:
        ValueError: a layout cannot be read, is the reference, or has what cannot be replayed; one line.
    """
    layouts = run_layouts.from_texts([recorded.layout, *texts], line)
    for layout in layouts:
        if layout.size("pp") > 1:
            raise ValueError(f"{layout.name}: inputs are not replayed over pipeline stages: choose pp=1")
    return layouts


def on_recorded_inputs(options: RunOptions, recorded: RecordedInputs) -> RunOptions:
    """Returns options by which each layout trains on the recorded inputs, for at most as many steps as these have."""

    def replay(layout: RunLayout) -> Any:
        sizes = layout.sizes | {key: layout.size(key) for key in ("dp", "tp", "cp")} | {"ranks": layout.ranks}
        return partial(InputReplayer, recorded=recorded, sizes=sizes)

    return replace(options, steps=min(options.steps, recorded.steps), replay=replay)


def replay_notes(run: Run, steps: int) -> list[str]:
    """Reports what was replayed in the first steps of a layout, and what was not."""
    reports = _reports(run, steps)
    if not reports:
        return []
    kinds = {
        "tensors of the loss at": {text: "" for report in reports for text in sorted(report.loss_inputs)},
        "random numbers at": {text: "" for report in reports for text in sorted(report.draws)},
        "routes of": _routes(reports),
    }
    many, kept = sum(report.replayed for report in reports), sum(report.already_recorded for report in reports)
    parts = [f"the model's inputs ({count_text(many, 'micro-batch')})"] * (many > 0)
    parts += [f"{words} {_listed(places)}" for words, places in kinds.items() if places]
    kept_text = f"; {count_text(kept, 'micro-batch')} had recorded samples by themselves" * (kept > 0)
    notes = [f"{run.layout.name}: replayed: {'; '.join(parts) or 'nothing'}{kept_text}"]
    left = {
        text: kind for report in reports for text, kind in (report.not_replayed | report.without_counterpart).items()
    }
    return notes + ([f"{run.layout.name}: not replayed: {_listed(left)}"] if left else [])


def _reports(run: Run, steps: int) -> list[ReplayReport]:
    return [report for record in run.records for report in record.replays[:steps]]


def _listed(places: Mapping[str, str]) -> str:
    return first_of([f"{text}: {more}" if more else text for text, more in places.items()], 4)


def _routes(reports: Sequence[ReplayReport]) -> dict[str, str]:
    counts: dict[str, tuple[int, int]] = {}
    for text, (changed, rows) in (item for report in reports for item in report.routes.items()):
        before = counts.get(text, (0, 0))
        counts[text] = before[0] + changed, before[1] + rows
    return {text: f"{changed} of {rows} would be others" if changed else "" for text, (changed, rows) in counts.items()}


def judge_replay(run: Run, comparison: LayoutComparison) -> None:
    """Explains findings by inputs of the loss that differ from the recorded ones.

    Raises:
        ProveError: a finding says nothing, as ranks mixed recorded samples with their own order, or as the loss has
            read what the script computed from samples that were replaced.
    """
    if not comparison.findings:
        return
    first = comparison.findings[0]
    reports = _reports(run, first.step)
    if any(report.replayed for report in reports) and any(report.other_rows for report in reports):
        raise ProveError(
            f"step {first.step} differs in {first.what}, and ranks have other samples than each other's: some have "
            "recorded ones in an order of their own, and others were fed blocks of them; let all draw by their rank"
        )
    for text, kind in (item for report in reports for item in report.without_counterpart.items()):
        raise ProveError(
            f"step {first.step} differs in {first.what}, and the loss reads what the script made of its own samples, "
            f"at {text}: {kind}; make it behind the model's call, or draw samples from torch's own generator, whose "
            "numbers are replayed"
        )
    apart = [item for report in reports for item in report.differing.items()]
    if apart:
        text, off = apart[0]
        also = f"; what the loss reads at {text} is not what it was in the reference, by {off} of its largest number"
        explained = {finding: replace(finding, why=finding.why + also) for finding in comparison.findings
                if finding.cause in ("", "loss")}  # fmt: skip
        comparison.findings = [explained.get(finding, finding) for finding in comparison.findings]
        if (case := comparison.left_open) is not None:
            comparison.left_open = replace(case, finding=explained.get(case.finding, case.finding))
