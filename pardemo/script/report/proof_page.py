"""Writes the page of a proof, and the folder of ``--out``; says what to do next."""

import itertools
import json
import os
import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_file

from pardemo import project
from pardemo.script import blocks
from pardemo.script.blocks import Block, Chart, Line, Lines, Marked, Section, paragraphs
from pardemo.script.compare import results
from pardemo.script.compare.differences import MOST_BYTES, Finding, KeptTensors
from pardemo.script.compare.module_map import COLUMNS, ModelMap
from pardemo.script.compare.results import LayoutResult, Proof
from pardemo.script.report import model_map
from pardemo.tables import amount

#: A tolerance above that is not fp64's.
PRECISE = 1e-6


def hints(proof: Proof) -> list[str]:
    """Says what to do next, a line each; the command prints them on the error stream."""
    lines = []
    if any(finding.cause for finding in proof.findings):
        lines.append("what each name in brackets means, and what to change: docs/prove.md, Each cause")
    if any(finding.what == "forward" and not finding.cause for finding in proof.findings):
        lines.append("an output parts first: look at what goes in there; --out DIR keeps it beside the reference's")
    if proof.findings and proof.tolerance > PRECISE:
        lines.append("compared in the script's own precision: --double shows what is no rounding")
    return lines


def proof_page(proof: Proof, script: str) -> str:
    """Writes the page: the verdict on all layouts first, then each of them with its map.

    Args:
        script: its name.
    """
    lines: list[Line] = []
    sections: list[Section] = []
    for number, layout in enumerate(proof.layouts[1:], 1):
        sign, colour = layout.sign
        sentence = results.finding_head(layout.findings[0]) if layout.findings else results.ALIKE
        sentence = "could not be compared" if layout.error else sentence
        link = Marked("a", layout.name, f' href="#layout-{number}"')
        lines.append([Marked("strong", sign, f' class="{colour}"'), " ", link, f": {sentence}"])
        sections.append(Section(f"layout-{number}", f"{sign} {layout.name}", "", _layout_blocks(layout, proof.steps)))
    files: list[Line] = [[Marked("code", "prove.json"), " the same for programs, with all parameters of each finding"]]
    if any(finding.tensors_file for finding in proof.findings):
        contents = "the reference's and the layout's tensors of findings that nobody explains"
        files.append([Marked("code", "tensors"), f" {contents}, up to {amount(MOST_BYTES)} of each"])
    return blocks.report_page(
        f"{script} in {len(proof.layouts)} layouts",
        f"{blocks.sentence(proof.verdict)} The reference is {proof.reference_text}.",
        [
            Section("verdict", "Verdict", "", [Lines(lines)]),
            *sections,
            Section("notes", "Notes", "", [Lines(proof.notes)]),
            Section("files", "Beside this page", "", [Lines(files)]),
        ],
        model_map.STYLE,
    )


def _layout_blocks(result: LayoutResult, steps: int) -> list[Block]:
    findings, model = result.findings, result.model
    below: list[Block] = [paragraphs([Marked("code", " ".join(result.layout.line))])]
    if lead := result.lead(steps):
        below.append(paragraphs(blocks.sentence(lead)))
    for finding in findings if not lead else ():
        below += results.finding_blocks(finding, _tensors_line(finding))
    if result.error or model is None:
        return below
    title = Chart("", title=f"The model in step {model.step}")
    drawn = model_map.map_blocks(model, [finding.module for finding in findings if finding.module])
    return [*below, title, paragraphs(_compared(model, findings)), *drawn]


def _tensors_line(finding: Finding) -> Line:
    """Says where a finding's tensors are, and which of them; empty where none were written."""
    kept, name = finding.tensors, finding.tensors_file
    if kept is None or name is None:
        return ""
    size_text = f", {amount(sum(tensor.nbytes for tensor in kept.tensors.values()))}"
    if kept.sketches:
        size_text += f"; of {', '.join(kept.sketches)} these are sketches"
    if kept.left_out:
        size_text += f"; without {', '.join(kept.left_out)}, for which there was no room"
    return ["tensors: ", Marked("a", name, f' href="{name}"'), size_text]


def _compared(model: ModelMap, findings: list[Finding]) -> str:
    """Says what was compared of the step that the map shows, and what was not."""
    numbers = "; ".join(f"{label}: {model.counts[key][0]} of {model.counts[key][1]}" for key, label in COLUMNS.items())
    sentence = f"Compared are {numbers}."
    kinds = {finding.what for finding in findings}
    if {"data", "parameters"} & kinds:
        return f"{sentence} Where samples or first parameters are wrong, nothing that is made of them is looked at."
    if "forward" in kinds:
        return f"{sentence} Where outputs are wrong, gradients are not looked at, nor what is made of them."
    return f"{sentence} Steps behind the first one that differs are not compared." if findings else sentence


PAGE, VERDICT, TENSORS = "prove.html", "prove.json", "tensors"
#: How a file of tensors is called, and a folder in which all is written first.
_TENSORS, _WRITTEN = re.compile(r"finding\d+\.safetensors"), ".prove-"


def proof_folder(path: str) -> Path:
    """Makes the folder for a proof, if there is none; an earlier proof in it makes room for the new one.

    Raises:
        ValueError: it has other things, cannot be one, or cannot be written to; said before anything runs.
    """
    folder = project.writable_folder(path, "--out")
    strange = sorted(entry.name for entry in folder.iterdir() if not _ours(entry))
    if strange:
        raise ValueError(f"--out: {path} has other things in it, as {strange[0]}: say a folder of its own")
    return folder


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
    numbers = itertools.count(1)
    for layout in proof.layouts:
        layout.findings = [_with_file(finding, next(numbers)) for finding in layout.findings]
    for left in folder.glob(f"{_WRITTEN}*"):  # by a proof that was killed while it wrote
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_WRITTEN) as temporary:
        new = Path(temporary)
        for finding in proof.findings:
            if finding.tensors is not None and finding.tensors_file is not None:
                _save(new / finding.tensors_file, finding.tensors)
        (new / VERDICT).write_text(json.dumps(proof.as_json(), indent=1), "utf-8")
        (new / PAGE).write_text(proof_page(proof, script), "utf-8")
        (folder / PAGE).unlink(missing_ok=True)
        (folder / VERDICT).unlink(missing_ok=True)
        shutil.rmtree(folder / TENSORS, ignore_errors=True)
        for name in (TENSORS, VERDICT, PAGE):
            if (new / name).exists():
                os.replace(new / name, folder / name)


def _with_file(finding: Finding, number: int) -> Finding:
    """Returns a finding with the file that its tensors are written to, if it has any; ``number``: of the finding."""
    return replace(finding, tensors_file=f"{TENSORS}/finding{number}.safetensors") if finding.tensors else finding


def _save(path: Path, kept: KeptTensors) -> None:
    path.parent.mkdir(exist_ok=True)
    tensors = {name: tensor.contiguous().clone() for name, tensor in kept.tensors.items()}  # none shares memory
    save_file(tensors, path, {"left out": json.dumps(kept.left_out), "sketches": json.dumps(kept.sketches)})
