"""What may import what, what a bare import costs, and the shape of the tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from pardemo import project
from pardemo.book.run.parameters import parameters_of

PACKAGE = project.PACKAGE
ROOT = PACKAGE.parent
#: The parts of the package from the base up: each may use those of lower layers, and none of its own layer or above.
#: The core ends with zero; the frameworks, the jobs, the planner and the book stand on it.
LAYERS = (
    ("private_names", "rank_registry"),
    ("compat", "deadline", "extras"),
    ("argument_checks", "project", "tables", "closed_pipe", "termination"),
    ("cluster", "signed_folders"),
    ("formulas", "world"),
    ("groups",),
    ("collectives",),
    ("meters",),
    ("data_parallel", "pipeline_parallel", "tensor_parallel"),
    ("context_parallel", "expert_parallel", "low_precision", "optimizers", "zero"),
    ("small_models",),
    ("draw",),
    ("cells", "peers", "testing"),
    ("claims",),
    ("machine",),
    ("baichuan2", "headlines"),
    ("finetune",),
    ("planner",),
    ("script",),
    ("measure", "prove"),
    ("book",),
    ("cli",),
)


#: The planner of layouts: a question goes through these modules once, and each imports only those before it.
PLANNER = (
    "shape", "recomputed", "configurations", "tuning", "layout", "machines", "programs", "job", "per_rank",
    "micro_batch", "fine_tune_step", "step", "fine_tune_memory", "memory", "intervals", "search", "procedure",
    "published",
)  # fmt: skip
ABOVE = {"charts", "explanations", "launch", "layout_command", "layout_text", "url_query", "__init__"}

#: Rooms of the planner, none of which uses a later one.
PLANNER_ROOMS = ("layouts", "dry_run", "fine_tune")

#: A script followed: each of these packages and modules imports only those before it.
SCRIPT = (
    "words", "blocks", "hangs", "runtime", "step", "record", "compare", "resume", "search", "report", "job_files",
    "real_job", "command",
)  # fmt: skip


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, inside_functions: bool = True):
    """The modules that a file imports; of pardemo the module itself, also for ``from package import module``."""
    import pardemo

    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                home = pardemo._HOME.get(alias.name, "pardemo") if node.module == "pardemo" else node.module
                yield inner if inner in NAMES else home


NAMES = {dotted(path) for path in modules()}


def part_of(module: str) -> str:
    return module.split(".")[1]


def test_every_part_uses_only_the_layers_below_it():
    layer = {part: level for level, parts in enumerate(LAYERS) for part in parts}
    entrances = {"__init__.py", "__main__.py"}
    assert set(layer) == {p.stem for p in PACKAGE.iterdir() if p.name not in entrances and p.suffix in ("", ".py")} - {
        "__pycache__"
    }
    wrong = []
    for path in modules():
        if path.parent == PACKAGE and path.name in entrances:
            continue
        own = part_of(dotted(path))
        for name in imports_of(path):
            if not name.startswith("pardemo.") or part_of(name) == own:
                continue
            if layer[part_of(name)] >= layer[own]:
                wrong.append(f"{path.relative_to(PACKAGE)} uses {name}")
    assert wrong == []


def test_every_folder_is_a_package():
    """A folder of modules without ``__init__.py`` works from a checkout, and is left out of what is installed."""
    assert [path for path in {module.parent for module in modules()} if not (path / "__init__.py").exists()] == []


@pytest.mark.parametrize("parts", [None, ("script", "measure", "prove")], ids=["at load", "in functions, too"])
def test_no_module_waits_for_itself(parts):
    """What modules import of each other when they are loaded has no ring, also within a part; in some parts, neither
    has what functions and annotations import."""
    some = [path for path in modules() if parts is None or path.relative_to(PACKAGE).parts[0] in parts]
    uses = {dotted(p): {n for n in imports_of(p, inside_functions=parts is not None) if n in NAMES} for p in some}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join((*way[way.index(name) :], name))
        if name not in done:
            for other in uses.get(name, set()) - {name}:
                visit(other, (*way, name))
            done.add(name)

    for name in uses:
        visit(name, ())


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


@pytest.mark.parametrize(
    "code",
    [
        "import pardemo; dir(pardemo)",
        "import pardemo.cli; pardemo.cli._parser()",
        "import pardemo.formulas.communication",
        "import pardemo.headlines",
        "from pardemo.finetune import recipe; recipe.load('tiny-cpu')",
    ],
)
def test_what_starts_at_once_loads_no_library(code):
    code += "; import sys; sys.exit(bool({'torch', 'numpy', 'pandas', 'matplotlib', 'datasets'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_every_public_name_is_there_and_documented():
    import pardemo

    for name in pardemo.__all__:
        assert name == "__version__" or getattr(pardemo, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pardemo.nothing


def test_modules_are_short_and_documented():
    for path in modules():
        text = path.read_text()
        assert text.count("\n") <= 600, path
        if path.name != "__main__.py":
            assert ast.get_docstring(ast.parse(text)), path


#: Decorators of functions whose docstring a page prints: the hint of an exercise, the words for a drawing.
PRINTED = {"exercise", "drawing"}


def test_first_sentences_say_what_a_thing_does_or_is():
    """No docstring of a module, a class or a public function begins with What, Which or How, with a question,
    or as if a noun stood before it: with Of, As, Where or Also."""
    wrong = []
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                first = re.split(r"(?<=[.?!])\s", text, maxsplit=1)[0]
                marks = {ast.unparse(mark).partition("(")[0] for mark in getattr(node, "decorator_list", ())}
                if getattr(node, "name", "").startswith("_") or marks & PRINTED:
                    continue
                if re.match(r"(What|Which|How|Whose?|Why|Of|As|Where|Also)\b|.*\?$", first, re.S):
                    wrong.append(f"{name}: {first}")
    assert wrong == []


#: Names that say nothing of what they hold; ``names_to_go.txt`` has those that are still there.
EMPTY = {"found", "of", "one", "own", "said", "told", "two", "what"}
#: Those that are read far from where they get a value: names of parameters, attributes and fields of a class.
EMPTY_TO_CALLERS = EMPTY | {"each", "made", "place", "where", "who"}


def empty_names(path):
    tree = ast.parse(path.read_text())
    fields = {field.target for kind in ast.walk(tree) if isinstance(kind, ast.ClassDef)
              for field in kind.body if isinstance(field, ast.AnnAssign)}  # fmt: skip
    for node in ast.walk(tree):
        name, words = getattr(node, "asname", None) or "", EMPTY
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name, words = node.id, EMPTY_TO_CALLERS if node in fields else EMPTY
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name, words = node.attr, EMPTY_TO_CALLERS
        elif isinstance(node, ast.arg):
            name, words = node.arg, EMPTY_TO_CALLERS
        if name.strip("_") in words:
            yield path.relative_to(PACKAGE).as_posix(), name


def test_variables_are_named_after_what_they_hold():
    """None comes; and one that has gone leaves the list, so that it does not come back."""
    lines = (ROOT / "tests" / "names_to_go.txt").read_text(encoding="utf-8").splitlines()
    assert sorted({f"{place} {name}" for path in modules() for place, name in empty_names(path)}) == lines


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_notebooks_are_stored_as_they_should_be(name):
    notebook = nbformat.read(project.notebooks()[name], as_version=4)
    nbformat.validate(notebook)
    tagged = [c for c in notebook.cells if "parameters" in c.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert {"world_size", "preset"} <= set(parameters_of(project.notebooks()[name]))
    assert notebook.metadata["pardemo"]["question"], "what it answers, for the README"
    for before, cell in zip([None, *notebook.cells], notebook.cells, strict=False):
        if cell.cell_type == "code":
            assert not cell.outputs
            assert cell.execution_count is None
            assert cell.source.count("\n") < 30, cell.source
        else:
            assert before is None or before.cell_type == "code", "one Markdown cell leads into code"
    assert notebook.metadata.kernelspec.name == "python3"


def test_cells_on_ranks_are_linted_too(tmp_path):
    """ruff passes cells by that begin with a magic it does not know. What ranks run is Python like all the rest."""
    for name, path in project.notebooks().items():
        for k, cell in enumerate(nbformat.read(path, as_version=4).cells):
            if cell.cell_type == "code" and cell.source.startswith("%%ranks"):
                source = cell.source.partition("\n")[2]
                (tmp_path / f"{name}_{k}.py").write_text(source.rstrip("; ") + "\n")
    settings = ["--no-cache", "--config", ".ruff.toml"]
    # F821, F401, B018: a name of an earlier cell, an import for a later one, a value to be shown
    done = ruff("check", "--ignore", "F821,F401,B018,F704", *settings, str(tmp_path))
    assert done.returncode == 0, done.stdout
    left = set(map(str, tmp_path.glob("*.py")))
    for width in range(96, 71, -1):  # as ruff lays it out for some width: a cell for readers of phones is narrower
        if left:
            shown = ("--output-format", "concise", "--line-length", str(width))
            done = ruff("format", "--check", *settings, *shown, *sorted(left))
            left = {path for path in left if f"{path}:" in done.stdout}
            assert (done.returncode != 0) == bool(left), done.stderr
    assert left == set()


def ruff(*arguments):
    command = [sys.executable, "-m", "ruff", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT / "notebooks")


def test_requirements_are_pinned_exactly():
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all("==" in line and "@" not in line for line in lines)
    assert "torch==2.13.0" in lines


def test_chapters_are_packages_that_nothing_else_names_by_number():
    """A chapter is a folder, a notebook, and a line of the list; its number is in the last two alone."""
    from pardemo.book import contents

    folders = {path.parent.name for path in (PACKAGE / "book" / "chapters").glob("*/__init__.py")}
    assert set(contents.CHAPTERS) == folders
    assert sorted(map(contents.notebook_of, contents.CHAPTERS)) == sorted(project.notebooks())
    for chapter in folders:
        files = {path.name for path in (PACKAGE / "book" / "chapters" / chapter).iterdir()}
        assert {"__init__.py", "claims.toml", "exercises.py", "problems.py"} <= files
    named = set(map(contents.notebook_of, contents.CHAPTERS))
    wrong = []
    for path in modules():
        text = path.read_text() if path.name != "contents.py" else ""
        wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in named if name in text]
        wrong += [f"{path.relative_to(PACKAGE)}: {name}" for name in re.findall(r'f?"(?:0\d|1[0-5])_[a-z{]\w*', text)]
    assert wrong == []


@pytest.mark.parametrize(
    ("folder", "order", "above"),
    [
        ("planner/layouts", PLANNER, ABOVE),
        ("script", SCRIPT, {"__init__"}),
    ],
    ids=["planner", "script"],
)
def test_nothing_goes_back_within(folder, order, above):
    """The planner: model, job, a rank's share, its price, the choice; published runs judge them and nothing uses
    these. A script: how it is run, followed, recorded, compared, resumed, reported."""
    place = {name: number for number, name in enumerate(order)}
    paths = sorted((PACKAGE / folder).rglob("*.py"))
    parts = [path.relative_to(PACKAGE / folder).parts[0].removesuffix(".py") for path in paths]
    assert {*parts} == {*order} | above
    package = f"pardemo.{folder.replace('/', '.')}."
    for here, path in zip(parts, paths, strict=True):
        for name in imports_of(path) if here in place else ():
            if name.startswith(package):
                there = name.removeprefix(package).split(".")[0]
                assert there in place, f"{here}/{path.name} uses {name}, which stands above it"
                assert place[there] <= place[here], f"{here}/{path.name} goes back to {name}"


def test_a_dry_run_needs_no_plan_and_a_plan_of_layouts_neither():
    level = {f"pardemo.planner.{room}": number for number, room in enumerate(PLANNER_ROOMS)}
    wrong = []
    for path in (path for room in PLANNER_ROOMS for path in (PACKAGE / "planner" / room).rglob("*.py")):
        own = level[".".join(dotted(path).split(".")[:3])]
        later = (name for name in imports_of(path) if level.get(".".join(name.split(".")[:3]), -1) > own)
        wrong += [f"{path.relative_to(PACKAGE)} uses {name}" for name in later]
    assert wrong == []
