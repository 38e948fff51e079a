"""The light core: every import is declared, and a missing package is named with the extra that brings it."""

import ast
import json
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest
from packaging.requirements import Requirement

from pardemo import extras, project

ROOT = project.PACKAGE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: Modules of the core's packages, where the name that is imported is not the package's.
CORE = {"cloudpickle": "cloudpickle", "numpy": "numpy", "psutil": "psutil", "pydantic": "pydantic",
        "pyroute2": "pyroute2", "safetensors": "safetensors", "torch": "torch", "yaml": "pyyaml"}  # fmt: skip


def declared(lines):
    """The packages of these requirements, those of the extras that they name among them."""
    packages = set()
    for text in lines:
        requirement = Requirement(text)
        if requirement.name == "pardemo":
            for extra in requirement.extras:
                packages |= declared(PROJECT["optional-dependencies"][extra])
        else:
            packages.add(requirement.name)
    return packages


def imported():
    """``(file, module)`` of every import of a module that is neither Python's nor ours, nor beside a recipe."""
    for path in sorted(project.PACKAGE.rglob("*.py")):
        beside = {file.stem for file in path.parent.glob("*.py")} if path.parent.name == "scripts" else set()
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for root in {name.partition(".")[0] for name in names}:
                if root not in sys.stdlib_module_names and root != "pardemo" and root not in beside:
                    yield str(path.relative_to(project.PACKAGE)), root


def test_every_import_is_declared():
    known = set(CORE) | {module for modules in extras.PACKAGES.values() for module in modules}
    assert sorted({pair for pair in imported() if pair[1] not in known}) == [], "no extra brings these"
    assert declared(PROJECT["dependencies"]) == set(CORE.values())
    for extra, modules in extras.PACKAGES.items():
        assert set(modules.values()) <= declared(PROJECT["optional-dependencies"][extra]), extra
    assert set(PROJECT["optional-dependencies"]) == {*extras.PACKAGES, "all"}
    assert declared(PROJECT["optional-dependencies"]["all"]) >= {
        package for modules in extras.PACKAGES.values() for package in modules.values()
    }


def test_pinned_versions_are_within_the_declared_bounds():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pinned = dict(line.lower().split("==") for line in lines if "==" in line and line[0] != "#")
    every = [*PROJECT["dependencies"], *(line for more in PROJECT["optional-dependencies"].values() for line in more)]
    for requirement in map(Requirement, every):
        if requirement.name != "pardemo":
            assert requirement.specifier.contains(pinned[requirement.name.lower()]), requirement


def test_what_is_used_by_private_names_is_bounded_on_both_sides():
    """But torch: who has a later one only wants to measure or prove; compat tells what has gone when it is needed."""
    every = [*PROJECT["dependencies"], *(line for more in PROJECT["optional-dependencies"].values() for line in more)]
    bounded = {r.name for r in map(Requirement, every) if {">=", "<"} <= {s.operator for s in r.specifier}}
    assert bounded >= {
        "deepspeed", "accelerate", "megatron-core", "transformers", "peft", "nbconvert", "nbclient", "papermill",
        "ipykernel", "pyroute2",
    }  # fmt: skip
    (torch,) = (r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert {s.operator for s in torch.specifier} == {">="}


def test_every_file_of_the_package_is_in_the_wheel():
    """Tables, templates and recipes, wherever they lie, and the mark that the package is typed."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    suffixes = {line.removeprefix("**/*") for line in setuptools["package-data"]["pardemo"]}
    files = [path for path in project.PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    left_out = [path for path in files if path.suffix not in {".py", *suffixes} and path.name not in suffixes]
    assert left_out == []
    assert "py.typed" in suffixes


BLOCKED = textwrap.dedent(
    """
    import sys
    from importlib import util
    from importlib.abc import MetaPathFinder
    from pardemo import extras

    class Absent(MetaPathFinder):
        names = {module for modules in extras.PACKAGES.values() for module in modules}

        def find_spec(self, name, path=None, target=None):
            if name in self.names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent())
    find_spec = util.find_spec
    util.find_spec = lambda name, package=None: None if name in Absent.names else find_spec(name, package)
    """
)


def light(code, *arguments, cwd=None):
    """A process for which only the core's packages are installed."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED + textwrap.dedent(code), *arguments],
        capture_output=True, text=True, timeout=600, check=False, cwd=cwd,
    )  # fmt: skip


def test_every_package_imports_without_extras_or_names_the_one_it_needs():
    done = light(
        """
        import pkgutil, pardemo
        from importlib import import_module
        for module in pkgutil.walk_packages(pardemo.__path__, "pardemo.", onerror=lambda name: None):
            if module.name.endswith("__main__") or ".scripts." in module.name:
                continue  # scripts are shown and run as a user would write them
            try:
                import_module(module.name)
                print("whole", module.name)
            except extras.MissingExtra as error:
                print("named", module.name)
            except ModuleNotFoundError as error:
                print("bare", module.name, error)
        """
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert [row for row in rows if row[0] == "bare"] == []
    named = {row[1] for row in rows if row[0] == "named"}
    core = ("world", "cluster", "meters", "collectives", "data_parallel", "pipeline_parallel", "tensor_parallel",
            "zero", "formulas", "groups", "claims", "tables", "project", "extras", "machine", "cli")  # fmt: skip
    assert [name for name in named if name.split(".")[1] in core] == []
    assert "pardemo.finetune.models" in named


def test_a_ring_and_zero_run_without_extras():
    done = light(
        """
        import torch
        from pardemo import World, WireMeter
        from pardemo.collectives import ring_all_reduce
        from pardemo.zero import Zero2

        def experiment():
            tensor = torch.ones(1 << 20)
            with WireMeter() as wire:
                ring_all_reduce(tensor)
            model = torch.nn.Linear(8, 8)
            engine = Zero2(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
            engine(torch.ones(2, 8)).sum().backward()
            engine.step()
            return float(tensor[0]), wire.sent_bytes > 0

        with World(2) as world:
            print(world.run(experiment))
        """
    )
    assert done.stdout == "[(2.0, True), (2.0, True)]\n", done.stderr[-2000:]


PLANS = [
    ("plan --search --model llama3-8b --gpu H100 --gpus 8", "llama3-8b"),
    ("plan --price 1", "8 × A800-80GB"),
    ("plan --model qwen2.5-7b --full --gpus 16 --backwards", "fewest gpus"),
]
NEEDED = [
    ("run 01", "nbformat|papermill|ipykernel|pillow", "book"),
    ("report outputs/reference", "nbformat|nbconvert|jinja2|pandas|pillow", "book"),
    ("claims outputs/reference", "pandas", "book"),
    ("plan --dry-run", "transformers", "finetune"),
    ("plan --search --model data/tiny-baichuan2 --gpus 8", "transformers", "finetune"),
    ("finetune tiny-cpu", "transformers|peft|datasets", "finetune"),
    ("predict tiny-cpu", "transformers|peft|datasets", "finetune"),
    ("doctor --deepspeed pardemo/planner/layouts/models.json", "deepspeed", "deepspeed"),
]


@pytest.fixture(scope="module")
def said():
    """Status, output and errors of each command, one after the other in a process without extras."""
    code = """
        import contextlib, io, json
        from pardemo.cli import main
        said = {}
        for command in sys.argv[1:]:
            out, error = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
                status = main(command.split())
            said[command] = status, out.getvalue(), error.getvalue()
        print(json.dumps(said))
    """
    done = light(code, *(command for command, *_ in (*PLANS, *NEEDED)), cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("command", "told"), PLANS)
def test_plans_are_made_without_extras(said, command, told):
    status, out, error = said[command]
    assert status == 0, error
    assert told in out


@pytest.mark.parametrize(("command", "package", "extra"), NEEDED)
def test_a_command_names_the_extra_that_it_needs_in_one_line(said, command, package, extra):
    status, _, error = said[command]
    brings = rf"which the extra \[({extra})\] brings: pip install '\.\[({extra})\]' in the clone"
    wanted = rf"pardemo {command.split()[0]} needs ({package}), {brings}"
    assert [line for line in error.splitlines() if re.fullmatch(wanted, line)], error
    assert "Traceback" not in error
    assert status == 2


def test_notebooks_and_data_that_only_a_clone_has_are_named_in_one_line(tmp_path, monkeypatch, capsys):
    from pardemo.cli import main

    monkeypatch.setattr(project, "PACKAGE", tmp_path / "site-packages" / "pardemo")
    monkeypatch.chdir(tmp_path)
    for command in (("run", "01"), ("finetune", "tiny-cpu"), ("predict", "tiny-cpu", "--out", "answers.jsonl")):
        assert main(command) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.endswith(f"they come with the repository, not with the package: git clone {project.REPOSITORY}")


def test_a_failed_import_that_no_extra_mends_is_raised_as_it_is():
    with pytest.raises(ModuleNotFoundError, match="No module named 'nothing_of_ours'") as raised, extras.needed_by("x"):
        import nothing_of_ours  # noqa: F401
    assert not isinstance(raised.value, extras.MissingExtra)
    line = r"^a test needs pillow, which the extra \[book\] brings: pip install '\.\[book\]' in the clone$"
    with pytest.raises(extras.MissingExtra, match=line), extras.needed_by("its caller"), extras.needed_by("a test"):
        raise ModuleNotFoundError("No module named 'PIL.Image'", name="PIL.Image")


def test_the_command_for_an_extra_needs_no_index_that_has_pardemo(monkeypatch):
    """Of a clone its folder, which holds the extra's list; of an installed package the address of the repository."""
    assert extras.IN_A_CLONE
    assert (extras.install("pytest"), extras.install("torch")) == (
        "pip install '.[testing]' in the clone", "pip install '.' in the clone",
    )  # fmt: skip
    monkeypatch.setattr(extras, "IN_A_CLONE", False)
    assert PROJECT["urls"]["Homepage"] == extras.REPOSITORY
    for module, named in (("pytest", "pardemo[testing]"), ("torch", "pardemo")):
        requirement = Requirement(extras.install(module).removeprefix("pip install ").strip("'"))
        assert str(requirement) == f"{named} @ git+{extras.REPOSITORY}"


def test_no_page_and_no_message_asks_an_index_for_pardemo():
    asks = re.compile(r"pip install [\"']?pardemo(?=[\"'\s`\[{\\])(?!\S* @)")
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("tests/*.py")]
    files += project.PACKAGE.rglob("*.py")
    asked = {str(path.relative_to(ROOT)): asks.findall(path.read_text(encoding="utf-8")) for path in files}
    assert {path: found for path, found in asked.items() if found} == {}
