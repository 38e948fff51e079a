"""What may import what, what a bare import costs, and the shape of the tree."""

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from pardemo import project, runner
from pardemo.parameters import parameters_of

PACKAGE = project.PACKAGE
ROOT = PACKAGE.parent
#: The core knows nothing of these rooms; they build on it.
ABOVE_THE_CORE = {"baichuan2", "headlines", "finetune", "planner"}
#: Command line, benches and exercises are no part of it either: they take from every room.
NOT_THE_CORE = ABOVE_THE_CORE | {"cli", "bench", "exercises"}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_the_core_imports_none_of_the_rooms_above_it():
    for path in modules():
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room not in NOT_THE_CORE:
            for name in imports_of(path):
                assert not (name.startswith("pardemo.") and name.split(".")[1] in ABOVE_THE_CORE), f"{path}: {name}"


def test_formulas_are_arithmetic_only():
    for path in (PACKAGE / "formulas").glob("*.py"):
        for name in imports_of(path):
            assert name.split(".")[0] in {
                "decimal",
                "math",
                "typing",
                "collections",
                "fractions",
                "dataclasses",
                "enum",
                "pardemo",
            }
            assert not name.startswith("pardemo") or name.startswith("pardemo.formulas")


def test_import_pardemo_loads_no_torch():
    code = "import sys, pardemo; dir(pardemo); sys.exit(bool({'torch', 'numpy', 'pandas'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_every_public_name_is_there_and_documented():
    import pardemo

    for name in pardemo.__all__:
        assert name == "__version__" or getattr(pardemo, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pardemo.nothing


def test_modules_are_short_and_documented():
    for path in modules():
        text = path.read_text()
        assert text.count("\n") <= 350, path
        if path.name != "__main__.py":
            assert ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("name", sorted(runner.notebooks()))
def test_notebooks_are_stored_as_they_should_be(name):
    notebook = nbformat.read(runner.notebooks()[name], as_version=4)
    nbformat.validate(notebook)
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert {"world_size", "preset"} <= set(parameters_of(runner.notebooks()[name]))
    for before, cell in zip([None, *notebook.cells], notebook.cells, strict=False):
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert cell.source.count("\n") < 30, cell.source
        else:
            assert before is None or before.cell_type == "code", "one Markdown cell leads into code"
    assert notebook.metadata.kernelspec.name == "python3"


def test_requirements_are_pinned_exactly():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line and "@" not in line for line in lines)
    assert "torch==2.13.0" in lines
