"""docs/prove.md says what is so: its examples print what it shows, and each cause has a row there."""

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import fenced

from pardemo import project
from pardemo.script.compare import proof, reference, runs
from pardemo.script.compare.run_layouts import SIZES
from pardemo.script.record import parameters, rank_record

ROOT = project.PACKAGE.parent
PROVE = project.PACKAGE / "script"
PAGE = (ROOT / "docs" / "prove.md").read_text(encoding="utf-8")
#: Modules that make findings.
MODULES = "findings gradient_causes initial_parameters across_layouts checks samples comparison"
#: What makes findings, and which of its arguments is the cause.
CAUSE_ARGUMENT = {"Finding": 3, "step_pair.finding": 1, "_finding": 2, "_update_finding": 2, "_cause": 0}
MAKERS = [PROVE / "compare" / f"{name}.py" for name in MODULES.split()]


def rows(mark: str) -> list[list[str]]:
    """The cells of a table's rows, by the comment before it."""
    table = PAGE[PAGE.index(f"<!-- {mark}:") : PAGE.index(f"<!-- end of {mark} -->")]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def ran(*words: str, status: int = 0, cwd: Path = ROOT, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """What Python makes of these words: it has to end with this status."""
    run = subprocess.run(
        [sys.executable, *words], cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert run.returncode == status, run.stderr[-2000:]
    return run


def texts(node: ast.expr | None) -> Iterator[str]:
    """Texts that an expression may be: itself, the arms of a choice, the parts of a tuple."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for part in [node.body, node.orelse] if isinstance(node, ast.IfExp) else getattr(node, "elts", []):
        yield from texts(part)


def named_by(node: ast.AST) -> Iterator[str]:
    """Texts that stand where a cause's name does: an argument of a finding's or a cause's, what is returned."""
    if isinstance(node, ast.Call):
        place = CAUSE_ARGUMENT.get(ast.unparse(node.func))
        yield from texts(node.args[place]) if place is not None and len(node.args) > place else ()
        for keyword in node.keywords:
            yield from texts(keyword.value) if keyword.arg == "cause" else ()
    elif isinstance(node, ast.Return) or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "cause"):
        yield from texts(node.value)


def causes() -> set[str]:
    """The names of all causes that the code can tell."""
    found = {
        name
        for path in MAKERS
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for name in named_by(node)
    }
    return {name for name in found if re.fullmatch(r"[a-z]+(-[a-z]+)*", name)}


def test_each_cause_has_a_row_and_each_row_a_cause():
    listed = [re.match(r"\*\*([a-z-]+)\*\*: .", row[0])[1] for row in rows("causes")]
    assert len(listed) == len(set(listed))
    assert set(listed) == causes()
    assert all(len(row) == 2 and all(row) for row in rows("causes"))


def test_the_example_prints_what_the_page_shows():
    command, printed = fenced("example", PAGE)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "pardemo"
    run = ran("-m", *words, status=1)
    assert run.stdout == printed
    losses = re.findall(r"`(\d\.\d{4})`", PAGE[PAGE.index("<!-- example:") : PAGE.index("## What is compared")])
    told = [f"step {step} loss {loss}" for step, loss in zip((0, 1, 1, 1), losses, strict=True)]
    assert [line.partition("] ")[2] for line in run.stderr.splitlines() if "step 0" in line] == [told[0]] * 4
    assert {line.partition("] ")[2] for line in run.stderr.splitlines() if "step 1" in line} == set(told[1:])


def test_each_cause_of_a_stop_has_a_row_and_each_row_a_cause():
    listed = [row[0].strip("*") for row in rows("causes of a stop")]
    told = {
        node.args[place].value
        for path in (PROVE / "resume").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and (place := {"Finding": 3, "resumed.add": 1}.get(ast.unparse(node.func)))
        for argument in [node.args[place]]
        if isinstance(argument, ast.Constant) and argument.value
    }
    assert set(listed) == told | {"not-restored", "data"}
    assert len(listed) == len(set(listed))


@pytest.mark.nightly
def test_the_example_of_a_stop_prints_what_the_page_shows():
    command, printed = fenced("example of a stop", PAGE)
    words = shlex.split(command.replace("\\\n", " "))
    assert ran("-m", *words, status=1, timeout=300).stdout == printed


@pytest.mark.nightly
def test_the_engine_prints_what_the_page_shows(tmp_path):
    code, printed = fenced("engine", PAGE)
    (tmp_path / "engine.py").write_text(code, encoding="utf-8")
    assert ran("engine.py", cwd=tmp_path).stdout == printed


def test_messages_are_the_commands_own():
    said = "".join(re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8")) for path in PROVE.rglob("*.py"))
    said = re.sub(r"\{[^{}]*\}", "…", said)
    quoted = [text for row in rows("messages") for text in re.findall(r"`([^`]+)`", row[0])]
    assert len(quoted) > 8
    for text in quoted:
        for part in text.split("…"):
            assert part.strip() in said, text


def test_numbers_are_the_codes():
    assert all(name in PAGE and f"{value:.0e}" in PAGE for name, value in reference.TOLERANCES.items())
    assert {6: "six"}[reference.TIMES] + " times what that has moved" in PAGE
    assert f"Above {runs.SKETCHED // 1_000_000} million parameters" in PAGE
    assert f"up to {proof.IN_FULL // 1_000_000} million numbers" in PAGE
    assert f"each block of {rank_record.BLOCK} × {rank_record.BLOCK}" in PAGE
    assert f"of more than {parameters.LARGEST_BUFFER:,} numbers" in PAGE
    assert f"`--timeout` ({runs.RunOptions().timeout_s:g} s)" in PAGE
    assert all(f"`{size}`" in PAGE for size in SIZES)


def test_options_are_the_commands():
    there = set(re.findall(r"--[a-z]+", ran("-m", "pardemo", "prove", "--help").stdout)) - {"--help", "--batch"}
    assert all(option in PAGE for option in there)
