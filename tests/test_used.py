"""No function of the package is called by tests alone."""

import ast
import re
from collections import Counter

import pytest

from pardemo import project

ROOT = project.root()

#: For readers who import pardemo; no chapter has a use for them.
FOR_READERS = {
    "HeadlineScores", "PlainDataParallel", "PlainExperts", "PlainPipeline", "PlainZero3", "shard_weight",
    "sum_router_gradient",
}  # fmt: skip
#: Methods by whose names torch, Transformers, PyYAML, pickle or IPython ask; pytest's hooks are known by their begin.
FOR_LIBRARIES = {
    "convert_tokens_to_string", "elapsed_time", "extra_repr", "find_class", "ignore_aliases",
    "load_ipython_extension", "on_log", "on_train_begin", "persistent_load", "reset_parameters",
    "set_output_embeddings",
}  # fmt: skip


def defined_and_named(tree):
    """Public functions, methods and classes of a module, and how often it names what: as a name or within a string."""
    defined, named, skipped = [], Counter(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            if node.body and isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant):
                skipped.add(node.body[0].value)  # its docstring
            if not isinstance(node, ast.Module) and not node.name.startswith("_"):
                defined.append(node.name)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            skipped.update(ast.walk(node.value))
        if node in skipped:
            continue
        if isinstance(node, ast.Name):
            named[node.id] += 1
        elif isinstance(node, ast.Attribute):
            named[node.attr] += 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.update(re.findall(r"\w+", node.value))  # "module:function", a key of a table, code for a process
    return defined, named


def used_by_tests_alone(sources, texts):
    """Names that the sources define and neither they nor the texts use. An import is no use."""
    defined, named = set(), Counter()
    for source in sources:
        of_it, in_it = defined_and_named(ast.parse(source))
        defined.update(of_it)
        named += in_it
    for text in texts:
        named.update(re.findall(r"\w+", text))
    return {name for name in defined if not named[name]}


def test_no_function_is_there_for_tests_alone():
    sources = [path.read_text() for path in project.PACKAGE.rglob("*.py")]
    beside = [path for end in ("*.toml", "*.yaml", "*.j2", "*.mjs") for path in project.PACKAGE.rglob(end)]
    documents = [ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "Makefile", *ROOT.glob("docs/**/*.md")]
    texts = [path.read_text() for path in (*beside, *documents, *ROOT.glob("notebooks/*.ipynb"))]
    found = used_by_tests_alone(sources, texts)
    known = ("check_", "pytest_")  # a chapter's exercises, by what they check; a plug-in's hooks
    found = {name for name in found if not name.startswith(known)}
    assert found - FOR_READERS - FOR_LIBRARIES == set(), "remove them, or move them into the tests"
    assert found >= FOR_READERS | FOR_LIBRARIES, "used by now: take them off the lists above"


@pytest.mark.parametrize(
    ("source", "texts", "found"),
    [
        ("def alone(): pass", [], {"alone"}),
        ("from x import alone\n__all__ = ['alone']\ndef alone(): 'alone'", [], {"alone"}),
        ("class A:\n    def alone(self): pass\nA()", [], {"alone"}),
        ("def used(): pass\nused()", [], set()),
        ("def used(): pass\nx.used", [], set()),
        ("def used(): pass\ntable = {'a': 'module:used'}", [], set()),
        ("def used(): pass", ["`used(4)`"], set()),
        ("def _own(): pass", [], set()),
    ],
)
def test_what_counts_as_a_use(source, texts, found):
    assert used_by_tests_alone([source], texts) == found
