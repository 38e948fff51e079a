"""A name that another cell reads is bound by one cell: a cell run again changes nothing that another one shows."""

import bindings
import nbformat
import pytest

from pardemo import project


@pytest.mark.parametrize("name", project.notebooks())
def test_a_name_that_another_cell_reads_is_bound_once(name):
    cells = bindings.cells_of(nbformat.read(project.notebooks()[name], as_version=4))
    assert bindings.bound_again(cells) == {}, "cells by their place: give each of them a name of its own"


@pytest.mark.parametrize("name", project.notebooks())
def test_a_name_that_a_cell_reads_is_bound_by_it_or_above_it(name):
    cells = bindings.cells_of(nbformat.read(project.notebooks()[name], as_version=4))
    assert bindings.unbound(cells) == {}, "cells by their place"


@pytest.mark.parametrize("name", project.notebooks())
def test_what_one_cell_binds_no_other_cell_changes(name):
    cells = bindings.cells_of(nbformat.read(project.notebooks()[name], as_version=4))
    assert bindings.changed_elsewhere(cells) == {}, "cells by their place: make a new one of the old, `old | {…}`"


def read(*sources):
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    return bindings.cells_of(nbformat.v4.new_notebook(cells=cells))


def again(*sources):
    return bindings.bound_again(read(*sources))


@pytest.mark.parametrize(
    "sources",
    [
        ("print(a)", "a = 1"),
        ("%%ranks 2\na = 1", "print(a)"),
        ("%%writefile train.py\na = 1", "print(a)"),
        ("%%ranks {a}\n1",),
    ],
)
def test_a_name_that_nothing_binds_is_seen(sources):
    assert list(bindings.unbound(read(*sources))) == ["a"]


@pytest.mark.parametrize(
    "sources",
    [
        ("a = 1", "print(a)", "a = 2"),
        ("a = 1", "a += 1"),
        ("a = 1", "a = a + 1"),
        ("a = 1", "for a in range(3): pass", "print(a)"),
        ("a = 1", "def f(): return a", "a = 2", "f()"),
        ("a = 1", "[a * b for b in range(3)]", "a, c = 2, 3"),
        ("%%ranks 2 --get a\na = 1", "print(a)", "a = 2"),
        ("%%ranks 2 --wire a\n1", "print(a)", "%%ranks 2 --wire a\n1"),
        ("a = 2", "%%ranks {a}\n1", "a = 3"),
        ("a = 2", "%%ranks 2 --put a\n1", "a = 3"),
        ("from b import a", "print(a)", "from c import a"),
    ],
)
def test_another_binding_is_seen(sources):
    assert list(again(*sources)) == ["a"]


@pytest.mark.parametrize(
    "sources",
    [
        ("a = 1", "a = 2\nprint(a)"),
        ("for a in range(3): print(a)", "for a in range(4): print(a)"),
        ("a = [b for b in range(3)]", "print(a)", "c = [a for a in range(3)]"),
        ("import a", "a.b()", "import a"),
        ("print(b.a)", "a = 1", "a = 2"),
        ("f(a=1)", "a = 1", "a = 2"),
        ("%%ranks 2\na = 1", "%%ranks 2\na = 2", "%%ranks 2\nprint(a)"),
        ("try:\n    1 / 0\nexcept ValueError as a:\n    print(a)", "a = 1", "a = 2"),
    ],
)
def test_what_is_bound_anew_in_its_own_cell_is_free(sources):
    assert again(*sources) == {}


@pytest.mark.parametrize(
    ("sources", "seen"),
    [
        (("a = {}", "a[1] = 2"), {"a": [1]}),
        (("a = {}", "b = 1\na[1]['c'].d = 2", "print(a)"), {"a": [1]}),
        (("a = {}", "a[1] += 2"), {"a": [1]}),
        (("a = {}", "a = {1: 2}\na[3] = 4"), {}),
        (("import os", "os.environ['a'] = '1'"), {}),
        (("a = {}", "b = a | {1: 2}"), {}),
    ],
)
def test_a_change_from_another_cell_is_seen(sources, seen):
    assert bindings.changed_elsewhere(read(*sources)) == seen
