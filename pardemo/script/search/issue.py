"""Writes the text of an issue about a finding, as a library's maintainers want it."""

import platform
import re
import shlex
from importlib import metadata
from pathlib import Path

from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import launch_of
from pardemo.script.runtime.runner import HEAVY, heavy_imports
from pardemo.script.search.reproduction import LABELS, SCRIPT, TEST, script_files
from pardemo.script.search.search_results import SearchFinding
from pardemo.script.words import count_text, finding_text, first_of

#: Packages that have another name than their module.
PACKAGES = {"megatron.core": "megatron-core"}


def library_versions(layout: RunLayout) -> str:
    """Returns the libraries that a layout's script imports, with their versions: ``torch 2.13.0, peft 0.21.2``."""
    launch, text = launch_of(layout)
    files = [] if launch.module else script_files(Path(launch.script))
    texts = [text, *(file.read_text("utf-8", errors="replace") for file in files[1:])]
    names = [name for name in HEAVY if any(name in heavy_imports(text) for text in texts)]
    return ", ".join(f"{name} {metadata.version(name)}" for name in ["torch", *(PACKAGES.get(n, n) for n in names)])


def title_of(finding: SearchFinding, marks: str) -> str:
    """Returns an issue's title, as ``Gradients of layers.0.norm.weight are wrong with tp=2``."""
    seen = finding.parting.seen
    name = seen.evidence.parameter if seen.evidence else seen.finding.module
    label = LABELS[seen.evidence.tensor] if seen.evidence else seen.finding.what
    return f"{label.capitalize()}{f' of {name}' * bool(name)} are wrong with {marks}"


def issue_text(finding: SearchFinding, title: str, versions: str) -> str:
    """Writes the issue: what, how to see it, where, until when to work around it, since when."""
    seen, made = finding.parting.seen, finding.reproduction
    difference, ranks = seen.finding, finding.layout.ranks
    head = finding_text(difference.step, difference.what, difference.factor, difference.rest, difference.module)
    lines = [
        f"# {title}", "",
        f"{versions}; Python {platform.python_version()}, {platform.system()}, CPUs and gloo.", "",
        f"`{_command(finding.layout)}` on {count_text(ranks, 'rank')} does not train as "
        f"`{_command(finding.reference)}` on {count_text(finding.reference.ranks, 'rank')} does: {head}. "
        f"{_sentence(difference.why)}", "",
    ]  # fmt: skip
    if difference.parameters:
        names = [f"`{name}`" for name in difference.parameters]
        lines += [f"{count_text(len(names), 'parameter')}: {first_of(names, 8)}.", ""]
    lines += [
        "## To reproduce", "",
        f"`{SCRIPT}` runs the script unchanged and compares one parameter; `pytest {TEST}` fails while it is there.",
        "", "```bash",
        f"torchrun --standalone --nproc-per-node {finding.reference.ranks} {SCRIPT} reference",
        f"torchrun --standalone --nproc-per-node {ranks} {SCRIPT} layout",
        "```", "", "```text", made.output or made.reason, "```", "",
        "## Where", "", _where(finding), "",
    ]  # fmt: skip
    if finding.right is not None:
        right = f"`{_command(finding.right)}` on {count_text(finding.right.ranks, 'rank')} trains as one process does."
        lines += ["## Until it is mended", "", right, ""]
    lines += ["## Releases", "", finding.since or f"Seen with {versions}; others were not tried.", ""]
    return "\n".join(lines)


def _where(finding: SearchFinding) -> str:
    seen = finding.parting.seen
    module = f"`{seen.finding.module}`{f' ({seen.kind})' if seen.kind else ''}" if seen.finding.module else ""
    parts = [
        f"the first module that differs is {module}" if module else "",
        f"at `{seen.finding.line}`" if seen.finding.line else "",
    ]
    return _sentence(", ".join(filter(None, parts)) or "nothing says it")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _command(layout: RunLayout) -> str:
    return re.sub(r"^\S*/", "", shlex.join(layout.line))
