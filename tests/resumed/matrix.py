"""What frameworks restore: each is stopped and resumed by ``pardemo.prove``, and a table says what came back.

All ranks are killed at a step and a moment that a seed draws, and the script is resumed in each layout. Runs of their
own are killed while they save, and resumed in the layout that they had.

``python tests/resumed/matrix.py`` prints the table; with ``--write`` it goes into docs/records/resumed.md. ``--only
WORD`` runs the rows whose framework has the word in its name.
"""

import argparse
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from pardemo import prove
from pardemo.script.resume.results import StopVerdict, Trial
from pardemo.tables import text_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "records" / "resumed.md"
BEGIN, END = "<!-- made by tests/resumed/matrix.py --write -->\n", "<!-- end of the table -->\n"
HEAD = ("framework", "saved on", "resumed on the same layout", "resumed on other layouts", "killed in a save")


@dataclass(frozen=True)
class Framework:
    """A script of this folder with its options, the layouts that it is stopped (the first) and resumed in.

    ``resume``: options of the line that goes on, where it has others.
    """

    name: str
    script: str
    layouts: tuple[str, ...]
    options: str = ""
    resume: str | None = None

    def line(self, options: str) -> str:
        return f"{Path(__file__).parent / self.script} --out {{folder}} {options}"


FRAMEWORKS = (
    Framework("torch DDP, torch.save", "ddp.py",
              ("ranks=2 batch=6", "ranks=4 batch=3", "ranks=3 batch=4", "ranks=1 batch=12"), "--batch {batch}"),
    Framework("torch DDP, torch.save, from four ranks", "ddp.py", ("ranks=4 batch=3", "ranks=2 batch=6"),
              "--batch {batch}"),
    Framework("torch FSDP2, DCP", "fsdp2.py", ("ranks=4", "ranks=2", "ranks=3")),
    Framework("torch FSDP2, DCP, from two ranks", "fsdp2.py", ("ranks=2", "ranks=3")),
    Framework("torch FSDP2, DCP, generators saved too", "fsdp2.py", ("ranks=2", "ranks=3"), "--generators"),
    Framework("Accelerate, save_state", "accelerated.py", ("ranks=2", "ranks=1")),
    Framework("Accelerate, save_state, one process", "accelerated.py", ("ranks=1", "ranks=2")),
    Framework("Accelerate, seedable sampler", "accelerated.py", ("ranks=2", "ranks=1"), "--seedable"),
    Framework("Accelerate, seedable sampler, one process", "accelerated.py", ("ranks=1", "ranks=2"), "--seedable"),
    Framework("Transformers' Trainer", "trainer.py", ("ranks=2", "ranks=1")),
    *(Framework(f"DeepSpeed ZeRO-{stage}", "sharded_by_deepspeed.py", ("ranks=2", "ranks=1"), f"--stage {stage}")
      for stage in (1, 2, 3)),
    *(Framework(f"DeepSpeed ZeRO-{stage}, universal", "sharded_by_deepspeed.py", ("ranks=2", "ranks=1", "ranks=3"),
                f"--stage {stage}", f"--stage {stage} --universal") for stage in (1, 2, 3)),
    *(Framework(f"DeepSpeed ZeRO-{stage}, generators saved too", "sharded_by_deepspeed.py", ("ranks=2",),
                f"--stage {stage} --generators") for stage in (1, 2, 3)),
    *(Framework(f"DeepSpeed ZeRO-{stage}, universal, generators saved too", "sharded_by_deepspeed.py",
                ("ranks=2", "ranks=1"), f"--stage {stage} --generators", f"--stage {stage} --generators --universal")
      for stage in (1, 2, 3)),
    Framework("Megatron-core", "sharded_by_megatron.py",
              ("ranks=4 tp=2 pp=2", "ranks=4 tp=4 pp=1", "ranks=4 tp=2 pp=1", "ranks=2 tp=1 pp=2"),
              "--tp {tp} --pp {pp}"),
    Framework("Megatron-core, distributed optimizer", "sharded_by_megatron.py",
              ("ranks=4 tp=2 pp=1", "ranks=4 tp=4 pp=1", "ranks=2 tp=1 pp=1"),
              "--tp {tp} --pp {pp} --distributed 1"),
    *(Framework(f"pardemo's ZeRO-{stage}", "own_zero.py", ("ranks=2", "ranks=3", "ranks=1"), f"--stage {stage}")
      for stage in (1, 2, 3)),
)  # fmt: skip
#: What a run that goes on may lack, and the causes of findings that say so.
LOST = {
    "samples": ("data",),
    "rate": ("learning-rate",),
    "moments": ("optimizer-state",),
    "masks": ("random-state",),
}


def rows(framework: Framework) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
    """The table's line of a framework, and what was lost: where, and a sentence."""
    verdicts, said = resumed(framework)
    of_save, told = in_save(framework)
    known = {why for _, why in said}
    return table_line(framework, verdicts, of_save), said + [one for one in told if one[1] not in known]


def table_line(framework: Framework, verdicts: dict[str, str], of_save: str) -> tuple[str, ...]:
    """The table's line of a framework; of other layouts those with one verdict stand together."""
    first, *others = framework.layouts
    grouped: dict[str, list[str]] = {}
    for layout in others:
        grouped.setdefault(verdicts[layout], []).append(layout)
    told = "; ".join(f"{verdict}: {', '.join(layouts)}" for verdict, layouts in grouped.items())
    return framework.name, first, verdicts[first], told, of_save


def resumed(framework: Framework) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The verdict of each layout, and what was lost there: where, and a sentence."""
    made = _stopped(framework, framework.layouts, "all")
    verdicts, said = {}, []
    for trial in made.trials:
        name = trial.layout.name
        verdicts[name] = _verdict(trial, made.masks, name == made.layout.name)
        told = [finding.why for finding in trial.findings] + ([f"not compared, {trial.error}"] if trial.error else [])
        said += [(f"{framework.name}, {name}", _without_folders(one)) for one in told]
    return verdicts, list(dict.fromkeys(said))


def in_save(framework: Framework) -> tuple[str, list[tuple[str, str]]]:
    """What a run does that was killed in a save, and what was lost there: where, and a sentence."""
    (trial,) = _stopped(framework, framework.layouts[:1], "save").trials
    causes = {finding.cause for finding in trial.findings}
    cell = "raises" if "cannot-resume" in causes else "begins anew" if "begins-anew" in causes else "goes on"
    told = [trial.error] if trial.error else [finding.why for finding in trial.findings]
    where = f"{framework.name}, killed in a save"
    return "not compared" if trial.error else cell, [(where, _without_folders(one)) for one in dict.fromkeys(told)]


def listed(said: list[tuple[str, str]]) -> list[str]:
    """A line for each sentence about what was lost, with all places of which it holds."""
    places: dict[str, list[str]] = {}
    for where, sentence in said:
        places.setdefault(sentence, []).append(where)
    return [f"- {'; '.join(of)}: {sentence}" for sentence, of in places.items()]


def _stopped(framework: Framework, layouts: tuple[str, ...], kind: str) -> StopVerdict:
    resume = None if framework.resume is None else framework.line(framework.resume)
    return prove.stopped(framework.line(framework.options), layouts, resume=resume, stops=(kind,), timeout_s=300)


def _verdict(trial: Trial, drawn: bool, same: bool) -> str:
    """What goes on, and how exactly. ``drawn``: dropout draws masks; those of other layouts are others by right."""
    causes = {finding.cause for finding in trial.findings}
    if trial.error:
        return "not compared"
    if "cannot-resume" in causes:
        return "refuses"
    if "begins-anew" in causes:
        return "begins anew"
    lost = [name for name, of in LOST.items() if set(of) & causes and (name != "masks" or same)]
    said = " ".join(["✗", ", ".join(lost)]).strip() if causes else "to the last bit" if trial.exact else "to rounding"
    if not trial.states and "moments" not in lost:
        said += " (moments by the step)"
    if same and drawn and "data" in causes and "random-state" not in causes:
        said += " (masks not seen)"  # those of other samples say nothing
    return said


def _without_folders(text: str) -> str:
    """Messages name a folder that is another one in each run."""
    return re.sub(r"/[^\s'\"]*/trial\d+/", "", text)


def markdown(table: list[tuple[str, ...]], said: list[tuple[str, str]]) -> str:
    """The page's table, frameworks of equal lines in one, and what was lost."""
    grouped = itertools.groupby(table, key=lambda line: line[1:])
    shared = [("; ".join(name for name, *_ in lines), *cells) for cells, lines in grouped]
    lines = [f"| {' | '.join(line)} |" for line in (HEAD, ("---",) * len(HEAD), *shared)]
    return "\n".join([*lines, "", *listed(said)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    chosen = [one for one in FRAMEWORKS if given.only.lower() in one.name.lower()]
    if given.write and len(chosen) < len(FRAMEWORKS):
        parser.error("--write writes the whole table: leave out --only")
    table, said = [], []
    for one in chosen:
        made, told = rows(one)
        table.append(made)
        said += told
        print(text_table([HEAD, made]), *listed(told), sep="\n", file=sys.stderr, flush=True)
    text = markdown(table, said)
    if given.write:
        page = PAGE.read_text(encoding="utf-8")
        before, after = page[: page.index(BEGIN) + len(BEGIN)], page[page.index(END) :]
        PAGE.write_text(before + text + after, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
