"""What a proof says, and what came out of stops: on one screen, as JSON, and a proof as a page with the model's map."""

import json
import math
import os
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from pardemo.draw import page_parts
from pardemo.draw.page_parts import Section
from pardemo.draw.page_parts import words as _t
from pardemo.script.compare.compare import COLUMNS, DIFFERENT, EQUAL, NOT_COMPARED, Cell, ModelMap, ModuleRow
from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.runs import MOST_BYTES, Finding, Kept
from pardemo.script.report.page import folder as made_folder
from pardemo.script.resume.recorder import Stop
from pardemo.script.words import count_text, first_of
from pardemo.tables import amount


@dataclass
class Proof:
    """What came out.

    ``failed``: layouts that could not be run or compared, with one line each; ``details``: their ranks' tracebacks.
    ``maps``: of each layout its modules in the last step compared. ``kept``: tensors of findings that nobody explains;
    ``files``: where they were written, in the folder of ``--out``. ``asked``: how many steps were to be compared.
    ``rounded``: short types in which the reference computes, by whose rounding tolerances were found.
    """

    layouts: list[Layout]
    findings: list[Finding] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    parameters: int = 0
    tolerance: float = 0.0
    maps: dict[str, ModelMap] = field(default_factory=dict)
    kept: dict[Finding, Kept] = field(default_factory=dict)
    files: dict[Finding, str] = field(default_factory=dict)
    asked: int = 0
    rounded: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all layouts were run, and train as the reference does."""
        return not self.findings and not self.failed

    def __str__(self) -> str:
        return proof_screen(self)

    def as_json(self) -> dict[str, Any]:
        """As ``pardemo prove --json`` prints it."""
        different = {finding.layout for finding in self.findings}
        return {
            "equal": self.equal,
            "layouts": [
                {"layout": layout.name, "ranks": layout.ranks, "line": " ".join(layout.line),
                 "error": self.failed.get(layout.name), "equal": layout.name not in {*self.failed, *different}}
                for layout in self.layouts
            ],
            "findings": [
                json_row(asdict(finding)) | {"tensors": self.files.get(finding)} for finding in self.findings
            ],
            "steps": self.steps, "asked": self.asked, "parameters": self.parameters, "tolerance": self.tolerance,
            "notes": self.notes,
        }  # fmt: skip


def json_row(row: dict[str, Any]) -> dict[str, Any]:
    """No infinities and no tuples, which JSON has not."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else list(value) if isinstance(value, tuple)
        else value for key, value in row.items()
    }  # fmt: skip


@dataclass
class Trial:
    """A stop, and the run that goes on.

    ``expected``: behind how many steps the last whole save is; ``in_save``: whether the stop cut a later one off;
    ``overdue``: whether the script had not ended within the grace that SIGTERM leaves, and was killed;
    ``asynchronous``: whether the script goes on while it saves,
    so that nobody knows whether this one is whole. ``begins``: behind how many the run goes on, None where its
    parameters are those of no step. ``exact``: whether all compared is equal to the last bit. ``states``: whether
    the optimizer's states were compared themselves; if not, by what its step makes of them. ``error``: why nothing
    could be compared.
    """

    stop: Stop
    layout: Layout
    expected: int
    asynchronous: bool
    in_save: bool = False
    overdue: bool = False
    begins: int | None = None
    exact: bool = False
    states: bool = True
    error: str = ""
    findings: list[Finding] = field(default_factory=list)

    @property
    def name(self) -> str:
        within = ", within a save" * (self.in_save and self.stop.kind != "save")
        late = f", which had not ended it after {self.stop.grace_s:g} s" * self.overdue
        return f"{self.stop.text}{within}{late}, resumed with {self.layout.name}"

    @property
    def lost(self) -> int:
        """Steps that are made once more."""
        over = self.stop.done + (self.stop.moment == "step")
        return max(0, over - (self.expected if self.begins is None else self.begins))


@dataclass
class StopVerdict:
    """What came out of all trials. ``masks``: whether dropout draws any in the undisturbed run."""

    layout: Layout
    masks: bool = False
    steps: int = 0
    saved: list[int] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return stops_screen(self)

    @property
    def findings(self) -> list[Finding]:
        return [finding for trial in self.trials for finding in trial.findings]

    @property
    def equal(self) -> bool:
        """Whether all trials were run, and go on as if nothing had happened."""
        return not self.findings and not any(trial.error for trial in self.trials)


ALIKE = "trains as the reference does"
WIDTH = 100
#: A tolerance above that is not fp64's.
PRECISE = 1e-6


def proof_screen(proof: Proof) -> str:
    """All layouts, and what is wrong in each."""
    lines = []
    lines.append(f"reference  {reference_text(proof)}")
    for layout in proof.layouts[1:]:
        if layout.name in proof.failed:
            lines += [f"?  {layout.name}", *indented(proof.failed[layout.name])]
            continue
        found = [finding for finding in proof.findings if finding.layout == layout.name]
        lines.append(f"{'✗' if found else '✓'}  {layout.name}" + ("" if found else f": {ALIKE}"))
        for finding in found:
            lines += _finding(finding)
    for note in proof.notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH)
    lines.append(proof_verdict(proof))
    return "\n".join(lines)


def hints(proof: Proof) -> list[str]:
    """What to do next, a line each; the command prints them beside the verdict, on the error stream."""
    lines = []
    if any(finding.cause for finding in proof.findings):
        lines.append("what each name in brackets means, and what to change: docs/prove.md, Each cause")
    if any(finding.what == "forward" and not finding.cause for finding in proof.findings):
        lines.append("an output parts first: look at what goes in there; --out DIR keeps it beside the reference's")
    if proof.findings and proof.tolerance > PRECISE:
        lines.append("compared in the script's own precision: --double shows what is no rounding")
    return lines


def reference_text(proof: Proof) -> str:
    """What the others are held against."""
    few = f"{proof.steps} of " if proof.steps < proof.asked else ""
    steps = count_text(max(proof.asked, proof.steps), "step")
    return f"{proof.layouts[0].name}: {few}{steps}, {count_text(proof.parameters, 'parameter')}"


def proof_verdict(proof: Proof) -> str:
    """Of all layouts."""
    if proof.findings:
        return "different"
    if proof.failed:
        return "not compared: see what is said of each layout that has a ?"
    if proof.rounded:
        return f"equal, to what rounding to {' and '.join(proof.rounded)} moves of each parameter in the reference"
    return f"equal, to {proof.tolerance:.0e} of what is compared"


def _finding(finding: Finding) -> list[str]:
    lines = [*indented(finding_head(finding)), *indented(finding_why(finding), 6)]
    return [*lines, *indented(parameters_text(finding), 6)] if finding.parameters else lines


def finding_head(finding: Finding) -> str:
    """In which step, of what, by which factor, and at which module."""
    said = f"step {finding.step}, {finding.what}"
    numbers = []
    if finding.factor is not None:
        numbers.append(f"× {finding.factor:.4g}")
    if finding.rest is not None and finding.rest > 1e-6:
        numbers.append(f"rest {finding.rest:.2g}")
    if numbers:
        said += f" ({', '.join(numbers)})"
    return f"{said}, first at {finding.module}" if finding.module else said


def finding_why(finding: Finding) -> str:
    """The cause, where there is one, and its sentence."""
    return f"[{finding.cause}] {finding.why}" if finding.cause else finding.why


def parameters_text(finding: Finding) -> str:
    """How many, and the first of them."""
    return f"{count_text(len(finding.parameters), 'parameter')}: {first_of(finding.parameters, 4)}"


def indented(text: str, by: int = 3) -> list[str]:
    """A sentence in lines of a screen, that far from its edge."""
    return textwrap.wrap(text, WIDTH, break_on_hyphens=False, initial_indent=" " * by, subsequent_indent=" " * by)


def stops_screen(verdict: StopVerdict) -> str:
    """Each stop with what was lost, and the verdict."""
    steps = [str(number) for number in verdict.saved if number]
    saves = f"saved after step{'s' * (len(steps) != 1)} {', '.join(steps)}"
    lines = [f"undisturbed  {verdict.layout.name}: {verdict.steps} steps, {saves}"]
    for trial in verdict.trials:
        lines += _trial(trial)
    for note in verdict.notes:
        lines += textwrap.wrap(f"note: {note}", WIDTH)
    lines.append(stops_verdict(verdict))
    return "\n".join(lines)


def stops_verdict(verdict: StopVerdict) -> str:
    """Of all stops."""
    if verdict.findings:
        return "something is lost"
    if any(trial.error for trial in verdict.trials):
        return "not compared: a run could not be compared"
    return "nothing is lost" + (", to the last bit" if all(trial.exact for trial in verdict.trials) else "")


def _trial(trial: Trial) -> list[str]:
    if trial.error:
        return [f"?  {trial.name}", *indented(trial.error)]
    mark = "✗" if trial.findings else "✓"
    if trial.begins is None and trial.findings:
        behind = ""
    else:
        repeated = "1 step is" if trial.lost == 1 else f"{trial.lost} steps are"
        again = f"; {repeated} repeated" if trial.lost else ""
        equal = "" if trial.findings else ", equal to the last bit" if trial.exact else ", equal to rounding"
        unseen = "" if trial.states else "; the optimizer's states by what its step makes of them alone"
        behind = f": continues after step {trial.begins}{again}{equal}{unseen}"
    lines = textwrap.wrap(f"{mark}  {trial.name}{behind}", WIDTH, subsequent_indent="   ")
    return [*lines, *(line for finding in trial.findings for line in _finding(finding))]


def stops_json(verdict: StopVerdict) -> dict[str, Any]:
    """As ``pardemo prove --stop --json`` prints it."""
    return {
        "equal": verdict.equal,
        "layout": verdict.layout.name,
        "steps": verdict.steps,
        "saved": verdict.saved,
        "trials": [
            {
                "stop": trial.stop.text, "kind": trial.stop.kind, "layout": trial.layout.name, "behind": trial.begins,
                "expected": trial.expected, "again": trial.lost, "exact": trial.exact, "in_save": trial.in_save,
                "overdue": trial.overdue,
                "states_compared": trial.states, "error": trial.error or None,
                "findings": [json_row(asdict(finding)) for finding in trial.findings],
            }
            for trial in verdict.trials
        ],
        "findings": [json_row(asdict(finding)) for finding in verdict.findings],
        "notes": verdict.notes,
    }  # fmt: skip


STYLE = """
.line { overflow-wrap: anywhere; }
.findings { padding-left: 1.1rem; } .findings div { overflow-wrap: anywhere; }
"""
#: The sign before a layout, the class of its colour.
_EQUAL, _DIFFERENT, _FAILED = ("✓", "ok"), ("✗", "failed"), ("?", "not")


def proof_page(proof: Proof, script: str) -> str:
    """The page: what is said of all layouts first, then each of them with its map.

    Args:
        script: its name.
    """
    sections = [
        Section("verdict", "Verdict", _verdict(proof)),
        *(
            Section(f"layout-{number}", f"{_sign(proof, layout)[0]} {layout.name}", _layout(proof, layout))
            for number, layout in enumerate(proof.layouts[1:], 1)
        ),
        Section("notes", "Notes", page_parts.bullets(map(_t, proof.notes)) if proof.notes else ""),
        Section("files", "Beside this page", _files(proof)),
    ]
    said = page_parts.sentence(proof_verdict(proof))
    head = f"<p>{_t(said)} The reference is {_t(reference_text(proof))}.</p>"
    return page_parts.document(f"{script} in {len(proof.layouts)} layouts", head, sections, MAP_STYLE + STYLE)


def _findings_of(proof: Proof, layout: Layout) -> list[Finding]:
    return [finding for finding in proof.findings if finding.layout == layout.name]


def _sign(proof: Proof, layout: Layout) -> tuple[str, str]:
    return _FAILED if layout.name in proof.failed else _DIFFERENT if _findings_of(proof, layout) else _EQUAL


def _verdict(proof: Proof) -> str:
    items = []
    for number, one in enumerate(proof.layouts[1:], 1):
        sign, colour = _sign(proof, one)
        found = _findings_of(proof, one)
        said = "could not be compared" if one.name in proof.failed else finding_head(found[0]) if found else ALIKE
        link = f'<a href="#layout-{number}">{_t(one.name)}</a>'
        items.append(f'<b class="{colour}">{sign}</b> {link}: {_t(said)}')
    return page_parts.bullets(items)


def _layout(proof: Proof, layout: Layout) -> str:
    body = f'<p class="line"><code>{_t(" ".join(layout.line))}</code></p>' if layout.line else ""
    if layout.name in proof.failed:
        return f"{body}<p>{_t(page_parts.sentence(proof.failed[layout.name]))}</p>"
    found = _findings_of(proof, layout)
    if found:
        items = "".join(f"<li>{_finding_html(proof, finding)}</li>\n" for finding in found)
        body += f'<ol class="findings">{items}</ol>'
    else:
        body += f"<p>{_t(page_parts.sentence(ALIKE))}</p>"
    of = proof.maps.get(layout.name)
    if of is None:
        return body
    drawn = map_drawing(of, [finding.module for finding in found if finding.module])
    return f"{body}<h3>The model in step {of.step}</h3><p>{_t(_compared(of, found))}</p>{drawn}"


def _finding_html(proof: Proof, finding: Finding) -> str:
    parts = [f"<b>{_t(finding_head(finding))}</b>", _t(finding_why(finding))]
    if finding.parameters:
        parts.append(_t(parameters_text(finding)))
    if finding in proof.files:
        kept, name = proof.kept[finding], proof.files[finding]
        size = sum(tensor.nbytes for tensor in kept.tensors.values())
        said = f'<a href="{_t(name)}">{_t(name)}</a>, {_t(amount(size))}'
        if kept.sketches:
            said += f"; of {_t(', '.join(kept.sketches))} these are sketches"
        if kept.left_out:
            said += f"; without {_t(', '.join(kept.left_out))}, for which there was no room"
        parts.append(f"tensors: {said}")
    return "".join(f"<div>{part}</div>" for part in parts)


def _compared(of: ModelMap, found: list[Finding]) -> str:
    """What was compared of the step that the map shows, and what was not."""
    numbers = "; ".join(f"{what}: {of.counts[key][0]} of {of.counts[key][1]}" for key, what in COLUMNS.items())
    said = f"Compared are {numbers}."
    what = {finding.what for finding in found}
    if {"data", "parameters"} & what:
        return f"{said} Where samples or first parameters are wrong, nothing that is made of them is looked at."
    if "forward" in what:
        return f"{said} Where outputs are wrong, gradients are not looked at, nor what is made of them."
    return f"{said} Steps behind the first one that differs are not compared." if found else said


def _files(proof: Proof) -> str:
    files = ["<code>prove.json</code> the same for programs, with all parameters of each finding"]
    if proof.files:
        files.append(
            "<code>tensors</code> the reference's and the layout's tensors of findings that nobody explains, up to "
            f"{_t(amount(MOST_BYTES))} of each"
        )
    return page_parts.bullets(files)


MAP_STYLE = """
.map { display: grid; grid-template-columns: minmax(0, max-content) repeat(3, minmax(4.2rem, max-content)); gap: 2px;
  margin: .8rem 0; font-size: .9rem; line-height: 1.35; }
.map > div { display: contents; }
.map .head { color: var(--off); text-align: center; padding: .15rem .3rem; }
.map .module { padding: .15rem 1rem .15rem calc(var(--depth) * .9rem); overflow-wrap: anywhere; }
.map .first code { font-weight: 700; }
.map b { color: var(--fails); white-space: nowrap; }
.cell { text-align: center; padding: .15rem .3rem; border-radius: .15rem; min-height: 1.5em; white-space: nowrap; }
.equal { background: var(--soft); color: var(--off); }
.different { background: var(--fails); color: var(--paper); font-weight: 600; }
.uncompared { color: var(--off); background: repeating-linear-gradient(45deg, transparent 0 4px, var(--line) 4px 5px);
  box-shadow: inset 0 0 0 1px var(--line); }
.means { list-style: none; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; padding: 0; font-size: .9rem; }
.means .cell { display: inline-block; min-width: 3rem; margin-right: .4em; }
@media (max-width: 44rem) { .map { font-size: .8rem; grid-template-columns: minmax(0, 1fr) repeat(3, 3.9rem); }
  .map small { display: none; }
  .map .module { padding: .15rem .3rem .15rem calc(var(--depth) * .55rem); }
  .map .head, .cell { padding: .15rem .1rem; } }
"""
#: Numbered modules in a row that are alike, from which on one row stands for all of them.
FOLDED = 3
_CLASSES = {EQUAL: "equal", DIFFERENT: "different", NOT_COMPARED: "uncompared"}
_SIGNS = {EQUAL: "=", DIFFERENT: "≠", NOT_COMPARED: "?"}


@dataclass
class _Module:
    """A module with those inside it."""

    row: ModuleRow
    inside: list["_Module"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.row.module.rpartition(".")[2]

    @property
    def empty(self) -> bool:
        """Whether it only holds others, as a list of layers: it does not run, and has no parameters."""
        return bool(self.inside) and not any(cell.state for cell in self.row.cells)


@dataclass(frozen=True)
class Line:
    """A row of the drawing: of one module, or of several that are alike."""

    label: str
    title: str
    depth: int
    row: ModuleRow
    first: bool


def map_drawing(of: ModelMap, first: Iterable[str]) -> str:
    """The map, and what its signs mean.

    Args:
        first: modules at which a finding begins.
    """
    head = "".join(f'<div class="head" role="columnheader">{_t(name)}</div>' for name in ("", *COLUMNS))
    body = "".join(f'<div role="row">{_line(line)}</div>\n' for line in map_lines(of, first))
    means = {
        EQUAL: "equal to the reference's", DIFFERENT: "different; × 2: twice the reference's",
        NOT_COMPARED: "not compared",
    }  # fmt: skip
    legend = "".join(f"<li>{_cell(Cell(state), '')}{_t(meaning)}</li>" for state, meaning in means.items())
    return (
        f'<div class="map" role="table" aria-label="map of the model"><div role="row">{head}</div>\n{body}</div>\n'
        f'<ul class="means">{legend}<li>empty: nothing there, as no gradient without parameters</li></ul>'
    )


def _line(line: Line) -> str:
    kind = f" <small>{_t(line.row.kind)}</small>" if line.row.kind not in ("", line.label) else ""
    here = " <b>◀ first</b>" if line.first else ""
    module = (
        f'<div class="module{" first" if line.first else ""}" role="rowheader" style="--depth: {line.depth}" '
        f'title="{_t(line.title)}"><code>{_t(line.label)}</code>{kind}{here}</div>'
    )
    return module + "".join(
        _cell(cell, f"{line.title}, {what}: {cell.state or 'none'}")
        for cell, what in zip(line.row.cells, COLUMNS, strict=True)
    )


def _cell(cell: Cell, title: str) -> str:
    sign = f"×\N{NO-BREAK SPACE}{cell.factor:.4g}" if cell.factor is not None else _SIGNS.get(cell.state, "")
    name = f"cell {_CLASSES[cell.state]}" if cell.state else "cell"
    said = f' title="{_t(title)}" role="cell"' if title else ""
    return f'<span class="{name}"{said}>{sign}</span>'


def map_lines(of: ModelMap, first: Iterable[str] = ()) -> list[Line]:
    """The rows of the drawing. One that only holds others is left out, and its name stands before theirs; of numbered
    siblings in a row that are alike, with all that is inside them, the first stands for all.
    """  # fmt: skip
    marked = frozenset(first)
    roots: list[_Module] = []
    by_name: dict[str, _Module] = {}
    for row in of.rows:
        module = by_name[row.module] = _Module(row)
        around = by_name.get(row.module.rpartition(".")[0])
        (around.inside if around else roots).append(module)
    return list(_lines(roots, "", 0, marked))


def _lines(modules: list[_Module], before: str, depth: int, marked: frozenset[str]) -> Iterator[Line]:
    for same in _runs_of_equal(modules, marked):
        one, last = same[0], same[-1]
        if one.empty and len(same) == 1:
            yield from _lines(one.inside, f"{before}{one.name}.", depth, marked)
            continue
        label, title = f"{before}{one.name}", one.row.module
        if len(same) > 1:
            label, title = f"{label} … {before}{last.name}", f"{title} … {last.row.module}"
        yield Line(label, title, depth, one.row, one.row.module in marked)
        yield from _lines(one.inside, "", depth + 1, marked)


def _runs_of_equal(modules: list[_Module], marked: frozenset[str]) -> Iterator[list[_Module]]:
    """Modules one by one, and runs of numbered ones that are alike together."""
    for key, group in groupby(modules, lambda one: (one.name.isdigit(), _look(one, marked))):
        some = list(group)
        if key[0] and len(some) >= FOLDED:
            yield some
        else:
            yield from ([one] for one in some)


def _look(module: _Module, marked: frozenset[str]) -> tuple:
    """Equal for modules that look the same on the map."""
    cells = tuple((cell.state, None if cell.factor is None else f"{cell.factor:.4g}") for cell in module.row.cells)
    inside = tuple((inner.name, _look(inner, marked)) for inner in module.inside)
    return module.row.kind, cells, module.row.module in marked, inside


PAGE, VERDICT, TENSORS = "prove.html", "prove.json", "tensors"
#: How a file of tensors is called, and a folder in which all is written first.
_TENSORS, _WRITTEN = re.compile(r"finding\d+\.safetensors"), ".prove-"


def proof_folder(path: str) -> Path:
    """The folder for a proof, made where there is none. It may have an earlier proof, which makes room for the new one.

    Raises:
        ValueError: it has other things, cannot be one, or cannot be written to; said before anything runs.
    """
    made = made_folder(path)
    strange = sorted(entry.name for entry in made.iterdir() if not _ours(entry))
    if strange:
        raise ValueError(f"--out: {path} has other things in it, as {strange[0]}: say a folder of its own")
    return made


def _ours(path: Path) -> bool:
    """Whether a proof has written this."""
    if path.name == TENSORS and path.is_dir() and not path.is_symlink():
        return all(_TENSORS.fullmatch(entry.name) for entry in path.iterdir())
    return path.name in (PAGE, VERDICT) or path.name.startswith(_WRITTEN)


def write_proof(folder: Path, proof: Proof, script: str) -> None:
    """Writes all into a folder inside this one, and moves it out when it is whole, the page last.

    The page and the verdict of an earlier proof go first: where a page is, all that it names is of the same proof.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {finding: number for number, finding in enumerate(proof.findings, 1)}
    proof.files = {finding: f"{TENSORS}/finding{numbers[finding]}.safetensors" for finding in proof.kept}
    for left in folder.glob(f"{_WRITTEN}*"):  # by a proof that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WRITTEN) as temporary:
        whole = Path(temporary)
        for finding, kept in proof.kept.items():
            _save(whole / proof.files[finding], kept)
        (whole / VERDICT).write_text(json.dumps(proof.as_json(), indent=1), "utf-8")
        (whole / PAGE).write_text(proof_page(proof, script), "utf-8")
        (folder / PAGE).unlink(missing_ok=True)
        (folder / VERDICT).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORS, ignore_errors=True)
        for name in (TENSORS, VERDICT, PAGE):
            if (whole / name).exists():
                os.replace(whole / name, folder / name)


def _save(path: Path, kept: Kept) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in kept.tensors.items()}  # none shares memory
    save_file(tensors, path, {"left out": json.dumps(kept.left_out), "sketches": json.dumps(kept.sketches)})
