"""Writes the text of an issue about a finding, as a library's maintainers want it."""

import platform
import re
import shlex
from importlib import metadata
from pathlib import Path

from pardemo.script.blocks import sentence
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.compare.runs import launch_of
from pardemo.script.runtime.runner import HEAVY, heavy_imports
from pardemo.script.search.axes import Space, as_text
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
    packages = ["torch", *(PACKAGES.get(name, name) for name in names)]
    return ", ".join(f"{name} {_version(name)}" for name in packages)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # as of a clone on the path
        return "from a folder"


def title_of(finding: SearchFinding, space: Space) -> str:
    """Returns an issue's title, as ``Gradients of layers.0.norm.weight are wrong with tp=2``."""
    seen, marks = finding.seen, as_text(space.marks(finding.point))
    name = seen.evidence.parameter if seen.evidence else seen.finding.module
    label = LABELS[seen.evidence.tensor] if seen.evidence else seen.finding.what
    return f"{label.capitalize()}{f' of {name}' * bool(name)} are wrong with {marks}"


def write_issue(finding: SearchFinding, space: Space) -> None:
    """Writes the issue beside the reproduction: what, how to see it, where, what to do until then, since when."""
    assert finding.reproduction.folder is not None
    (finding.reproduction.folder / "issue.md").write_text(_issue_text(finding, title_of(finding, space)), "utf-8")


def _issue_text(finding: SearchFinding, title: str) -> str:
    made, layout, reference = finding.reproduction, finding.verdict.layout, finding.verdict.reference
    difference, versions = finding.seen.finding, library_versions(layout)
    kind = f" ({finding.seen.kind})" if finding.seen.kind else ""
    module = f"the first module that differs is `{difference.module}`{kind}" if difference.module else ""
    where = ", ".join(filter(None, (module, f"at `{difference.line}`" if difference.line else "")))
    head = finding_text(difference.step, difference.what, difference.factor, difference.rest, difference.module)
    lines = [
        f"# {title}", "",
        f"{versions}; Python {platform.python_version()}, {platform.system()}, CPUs and gloo.", "",
        f"`{_command(layout)}` on {count_text(layout.ranks, 'rank')} does not train as "
        f"`{_command(reference)}` on {count_text(reference.ranks, 'rank')} does: {head}. "
        f"{sentence(difference.why.rstrip('.'))}", "",
    ]  # fmt: skip
    if difference.parameters:
        names = [f"`{name}`" for name in difference.parameters]
        lines += [f"{count_text(len(names), 'parameter')}: {first_of(names, 8)}.", ""]
    lines += [
        "## To reproduce", "",
        f"`{SCRIPT}` runs the script unchanged and compares one parameter; `pytest {TEST}` fails while it is there.",
        "", "```bash",
        f"torchrun --standalone --nproc-per-node {reference.ranks} {SCRIPT} reference",
        f"torchrun --standalone --nproc-per-node {layout.ranks} {SCRIPT} layout",
        "```", "", "```text", made.output or made.reason, "```", "",
        "## Where", "", sentence(where or "nothing says it"), "",
    ]  # fmt: skip
    if finding.right is not None:
        ranks = count_text(finding.right.ranks, "rank")
        right = f"`{_command(finding.right)}` on {ranks} trains as its reference does."
        lines += ["## Until it is mended", "", right, ""]
    lines += ["## Releases", "", finding.since or f"Seen with {versions}; others were not tried.", ""]
    return "\n".join(lines)


def _command(layout: RunLayout) -> str:
    return re.sub(r"^\S*/", "", shlex.join(layout.line))
