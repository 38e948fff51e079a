"""Every name of the package that README, docs, notebooks and docstrings mention is there."""

import ast
import functools
import importlib
import re

import nbformat
import pytest

from pardemo import project

ROOT = project.PACKAGE.parent
NAME = re.compile(r"(?<![\w/@.-])pardemo(?:\.[A-Za-z_]\w*)+(?!/)")
REFERENCE = re.compile(r":(?:func|class|mod|meth|data|attr|exc):`~?(pardemo[\w.]+)`")
#: Not a name: files, and names that the changes say have gone.
FILES = re.compile(r"\.(?:json|toml|csv|md|py|lock|pth|zip)$")
GONE = {
    "pardemo.collection",
    "pardemo.peers.gpt",
    "pardemo.groups.Layout",
    "pardemo.planner.Job",
    "pardemo.planner.Cluster",
    "pardemo.planner.Hardware",
    "pardemo.planner.timing",
    "pardemo.planner.layouts.Machine",
    "pardemo.planner.layouts.step.step",
}


@functools.cache
def exists(name):
    parts = name.split(".")
    for until in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:until]))
        except ModuleNotFoundError as error:
            if error.name and not name.startswith(error.name):  # a package that is not installed
                return True
            continue
        for part in parts[until:]:
            if not hasattr(value, part) and part not in getattr(value, "__annotations__", {}):
                return False
            value = getattr(value, part, None)
        return True
    return False


def missing(names):
    return sorted(name for name in set(names) if not FILES.search(name) and not exists(name))


def mentioned(text):
    return NAME.findall(text)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))])  # fmt: skip
def test_what_a_page_mentions(page):
    assert set(missing(mentioned((ROOT / page).read_text()))) <= (GONE if page == "CHANGELOG.md" else set())


@pytest.mark.parametrize(
    "page",
    [
        "CONTRIBUTING.md",
        *(f"docs/{name}.md" for name in ("adding-a-chapter", "architecture", "cost-model", "security")),
    ],
)
def test_files_that_a_page_mentions(page):
    """By their path, or the end of it, in the repository."""
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+\.py)`", (ROOT / page).read_text(encoding="utf-8")))
    there = {path.as_posix() for folder in ("pardemo", "tests", ".ci") for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in named if not any(path.endswith(f"/{name}") for path in there)} == set()


@pytest.mark.parametrize("name", sorted(project.notebooks()))
def test_what_a_notebook_mentions(name):
    cells = nbformat.read(project.notebooks()[name], 4).cells
    assert missing(found for cell in cells for found in mentioned(cell.source)) == []


def test_what_docstrings_refer_to():
    sources = [*project.PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    wrong = {str(path.relative_to(ROOT)): missing(REFERENCE.findall(path.read_text())) for path in sources}
    assert {path: names for path, names in wrong.items() if names} == {}


#: A reference without its module: to a name of the file itself, or to one that the file imports.
SHORT = re.compile(r":(?:func|class|mod|meth|data|attr|exc):`~?(?!pardemo\b)([\w.]+)`")


def unresolved(source, package):
    """References without a module to names that the source neither defines nor imports, members of classes included."""
    tree = ast.parse(source)
    imported = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {alias.asname or alias.name: module + alias.name for alias in node.names}
    classes = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}

    def has(part, member):
        if part not in classes:
            return part in imported and exists(f"{imported[part]}.{member}")
        bases = (ast.unparse(base).partition("[")[0] for base in classes[part].bases)
        return member in defined(classes[part]) or any(has(base, member) for base in bases)

    for name in SHORT.findall(source):
        first, _, member = name.partition(".")
        if not first:
            there = exists(package + name)
        elif member and first in classes:
            there = has(first, member)
        elif first in imported:
            there = exists(imported[first] + name[len(first) :])
        else:
            there = name in defined(tree) or exists(name) or exists(f"{package}.{name}")
            there = there or any(has(part, name) for part in classes)
        if not there:
            yield name


def defined(tree):
    """Functions, classes, variables and attributes that are defined anywhere in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            yield getattr(node, "id", getattr(node, "attr", None))


def test_what_docstrings_refer_to_without_a_module():
    wrong = {}
    for path in project.PACKAGE.rglob("*.py"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        wrong[str(path.relative_to(ROOT))] = sorted({*unresolved(path.read_text(), package)})
    assert {path: names for path, names in wrong.items() if names} == {}


def test_a_reference_to_a_member_that_has_gone_is_seen():
    source = '''from pardemo.zero.engine import Engine
class Stage(Engine):
    """:meth:`step`, :meth:`Engine.full_parameters`, :data:`ERRORS`, :meth:`Engine.whole`, :meth:`Stage.whole`"""'''
    assert [*unresolved(source, "pardemo.zero")] == ["ERRORS", "Engine.whole", "Stage.whole"]


#: Of classes: names in the docstring that are no field.
NOT_YET = {"RankRecord": {"owners", "dtype", "line"}}


def undescribed(source):
    """Of a module's dataclasses: names that a docstring explains (``name``: …) and that no field has."""
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}

    def attributes(name):
        node = classes[name]
        bases = (base.id for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
        own = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
        own |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
        return own.union(*map(attributes, bases))

    for name, node in classes.items():
        text = ast.get_docstring(node) or ""
        section = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", text, re.MULTILINE)
        names = {*re.findall(r"``(\w+)``:", text), *re.findall(r"^ {4}(\w+):", section[1] if section else "", re.M)}
        if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
            yield name, names - attributes(name)


def test_fields_that_a_docstring_explains_are_there():
    sources = (path.read_text() for path in project.PACKAGE.rglob("*.py"))
    wrong = {name: names - NOT_YET.get(name, set()) for source in sources for name, names in undescribed(source)}
    assert {name: names for name, names in wrong.items() if names} == {}


def test_a_name_that_is_not_there_is_seen():
    assert missing(mentioned("see `pardemo.groups.Layout` and pardemo.groups.ParallelDims")) == [
        "pardemo.groups.Layout"
    ]


def test_modules_that_code_names_in_strings():
    """What is loaded before a fork, hidden from a stack, or searched for in one: no import shows that it is gone."""
    wrong = []
    for path in sorted(project.PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if re.fullmatch(r"pardemo(/\w+)+(\.py|/)", text):
                there = (ROOT / text).exists()
            else:
                there = not re.fullmatch(r"pardemo(\.\w+)+(:\w+)?", text) or not missing([text.replace(":", ".")])
            if not there:
                wrong.append(f"{path.name}:{node.lineno}: {text}")
    assert wrong == []
