"""Hashes what a notebook's result depends on: ``pardemo run --resume`` runs it again where the hash is another.

That is the notebook, its chapter's package, the modules of the package that these import, with the tables beside them,
``data/``, the pinned versions, the parameters, and what the notebook reads of other notebooks. The last it says itself,
in its metadata, as patterns of files in the run's folder or in the project: ``"pardemo": {"reads": ["machine.json"]}``.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pardemo import project

LARGE_BYTES = 64 << 20  # of a larger file the size and the time of its last change stand for what is in it
#: How a cell names a module of the package: ``from … import …``, or as it stands in a text or behind ``--preload``.
_FROM = re.compile(r"from (pardemo[\w.]*) import (\([^)]*\)|[^\n]*)")
_NAMED = re.compile(r"\bpardemo(?:\.\w+)*")


def of_sources(path: Path, parameters: dict[str, Any]) -> str:
    """A digest of the notebook, what of the package it uses, ``data/``, pinned versions, parameters; 64 hex digits."""
    return _digest(json.dumps(parameters, sort_keys=True), (path, *_sources(path)))


def with_inputs(sources: str, path: Path, folder: Path) -> str:
    """That digest and what the notebook reads of others, in ``folder``: claims, a profile, a trained adapter."""
    return _digest(sources, _inputs(path, folder))


def reads(path: Path) -> list[str]:
    """The patterns that a notebook's metadata names; none where it names none."""
    return json.loads(path.read_text(encoding="utf-8"))["metadata"].get("pardemo", {}).get("reads", [])


def named(path: Path) -> set[str]:
    """Finds what a notebook's code names of the package: modules, and what it imports from them."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    text = "\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")
    names = set(_NAMED.findall(text))
    for package, imported in _FROM.findall(text):
        names |= {f"{package}.{name}" for name in re.findall(r"\w+", imported)}
    return names


def modules_of(path: Path) -> set[str]:
    """The modules of the package that a notebook imports, and those that these import, wherever they do.

    A name in a text counts, too: ranks and processes are started with modules that are told by their name. A chapter's
    package is whole, since its page looks for names in all of its modules.
    """
    names = named(path)
    files = _files(project.PACKAGE)
    package = f"pardemo.book.chapters.{project.chapter_name(path.stem)}"
    reached: set[str] = set()
    left = [*names, *(name for name in files if name == package or name.startswith(f"{package}."))]
    while left:
        if (name := left.pop()) in files and name not in reached:
            reached.add(name)
            left += _imports(name, files[name])
    return reached


@cache
def _files(package: Path) -> dict[str, Path]:
    """The package's modules by their dotted names."""
    files = {".".join(("pardemo", *path.relative_to(package).with_suffix("").parts)): path
             for path in package.rglob("*.py")}  # fmt: skip
    return {name.removesuffix(".__init__"): path for name, path in files.items()}


@cache
def _imports(module: str, path: Path) -> frozenset[str]:
    """Names that a module imports, or has in a text, and its package; those that are no module are passed over."""
    text = path.read_text(encoding="utf-8")
    late = "import_module" in text and path.name == "__init__.py"  # it names modules of its own in texts
    imported = {module.rpartition(".")[0]}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            imported |= {name, f"{module}.{name}"} if late else {name}
    return frozenset(imported)


@cache
def _tables(package: Path) -> dict[Path, list[Path]]:
    """What is no module, recipes and tables, by the folder of the modules that it lies with."""
    tables: dict[Path, list[Path]] = {}
    for path in sorted(package.rglob("*")):
        if path.suffix != ".py" and path.is_file() and "__pycache__" not in path.parts:
            owner = next((folder for folder in path.parents if (folder / "__init__.py").exists()), package)
            tables.setdefault(owner, []).append(path)
    return tables


def _sources(path: Path) -> Iterator[Path]:
    files = _files(project.PACKAGE)
    modules = sorted(files[name] for name in modules_of(path))
    yield from modules
    for folder in sorted({project.PACKAGE, *(module.parent for module in modules)}):
        yield from _tables(project.PACKAGE).get(folder, ())
    yield from (file for file in sorted((project.root() / "data").rglob("*")) if "__pycache__" not in file.parts)
    yield project.root() / "requirements.txt"


def _inputs(path: Path, folder: Path) -> Iterator[Path]:
    for pattern in reads(path):
        for root in (folder, project.root()):
            yield from (file for file in sorted(root.glob(pattern)) if file.stem != path.stem)  # not its own of before


def _digest(begin: str, files: Iterable[Path]) -> str:
    digest = hashlib.sha256(begin.encode())
    for file in filter(Path.is_file, files):
        status = file.stat()
        large = status.st_size > LARGE_BYTES
        content = f"{status.st_size} {status.st_mtime_ns}".encode() if large else file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()
