"""Private names of other libraries: all of them are there, and stand in one module."""

import ast
import re
from importlib import metadata

import pytest

from pardemo import compat, project

ROOT = project.PACKAGE.parent
#: Names with a leading underscore that Python documents.
DOCUMENTED = {"os._exit", "sys._getframe", "argparse._SubParsersAction", "fullest.memory._asdict"}


@pytest.mark.parametrize("name", compat.NAMES)
def test_every_private_name_is_there(name):
    """Where one is not, the failure's one line says which, of which version, and what it was for."""
    assert getattr(compat, name) is compat.resolve(compat.NAMES[name])


def test_a_name_that_is_gone_is_told_in_one_line():
    gone = compat.Private("torch._C._no_such_thing", "a test")
    with pytest.raises(compat.PrivateNameGone) as told:
        compat.resolve(gone)
    version = metadata.version("torch")
    assert str(told.value) == f"torch {version}, tried with {compat.TRIED['torch']}, has no {gone.path}, for: a test"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = compat.nothing


def test_the_versions_tried_are_those_that_are_pinned():
    pinned = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "requirements.txt").read_text(), flags=re.M))
    assert {library: pinned[library] for library in compat.TRIED} == compat.TRIED


def test_attributes_of_objects_are_there():
    import torch
    from torch.distributed.tensor import DTensor

    weight = torch.nn.Parameter(torch.ones(2))
    assert compat.accumulate_hooks(weight) == {} == compat.backward_hooks(weight)
    weight.register_post_accumulate_grad_hook(lambda p: None)
    assert len(compat.accumulate_hooks(weight)) == 1
    x = torch.zeros(2)
    before = compat.version(x)
    x.add_(1)
    assert compat.version(x) == before + 1
    assert compat.storage_address(x.untyped_storage()) == compat.storage_address(x[1:].untyped_storage())
    indices, values = compat.sparse_parts(torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,)))
    assert (indices.shape, values.tolist()) == ((1, 2), [1.0, 2.0])
    mm = torch.ops.aten.mm.default
    assert (compat.op_name(mm), compat.op_packet(mm)) == ("mm", torch.ops.aten.mm)
    assert compat.op_schema(mm).name == "aten::mm"
    assert isinstance(compat.node_number((weight * 2).grad_fn), int)
    assert DTensor._local_tensor, "what compat.local_tensor reads"
    assert compat.fsdp_state(torch.nn.Linear(1, 1)) is None
    assert not compat.in_backward()
    seen = []
    weight.register_hook(lambda gradient: seen.append(compat.in_backward()))
    weight.sum().backward()
    assert seen == [True]


def test_what_is_replaced_comes_back():
    class Base:
        def own(self):
            return 1

    class Derived(Base):
        pass

    with compat.replaced(Derived, "own", lambda self: 2):
        assert Derived().own() == 2
    assert Derived().own() == 1
    assert "own" not in vars(Derived)
    with compat.replaced(Derived, "new", 3):
        assert Derived.new == 3
    assert not hasattr(Derived, "new")


def foreign(tree, ours):
    """Names with one leading underscore that are used and that this package does not define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _private(node.attr):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr not in ours or owner in FOREIGN_MODULES:
                yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.module.startswith("pardemo"):
            names = [part for alias in node.names for part in (*node.module.split("."), alias.name)]
            if any(map(_private, names)):
                yield f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Import) and any(_private(p) for a in node.names for p in a.name.split(".")):
            yield ast.unparse(node)


FOREIGN_MODULES = {"torch", "dist", "distributed_c10d", "deepspeed", "accelerate", "nn", "F", "megatron"}


def _private(name):
    return name.startswith("_") and not name.startswith("__")


def defined(trees):
    """Every name that the package's own code defines: functions, classes, attributes that it sets on ``self``."""
    names = set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
    return names


def test_no_other_module_names_one():
    trees = {path: ast.parse(path.read_text()) for path in project.PACKAGE.rglob("*.py")}
    ours = defined(tree for path, tree in trees.items() if path.name != "compat.py")
    found = {
        f"{path.relative_to(project.PACKAGE)}: {name}"
        for path, tree in trees.items()
        if path.name != "compat.py"
        for name in set(foreign(tree, ours)) - DOCUMENTED
    }
    assert found == set()


def test_nothing_of_a_test_library_is_in_the_package():
    """But for the plug-in of pytest, the list of extras, and the test of a bug that a search writes."""
    known = {
        "__init__.py",
        "compat.py",
        "extras.py",
        "private_names.py",
        "script/search/issue.py",
        "script/search/reproduction.py",
    }
    found = {p for p in project.PACKAGE.rglob("*.py") if re.search(r"unittest|import mock|pytest", p.read_text())}
    files = {path.relative_to(project.PACKAGE).as_posix() for path in found}
    assert {file for file in files if not file.startswith("testing/")} <= known
