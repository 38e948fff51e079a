"""Which Python ``make newest`` takes: the newest Megatron-core wants 3.12."""

import importlib.util

import pytest

from pardemo import project

SPEC = importlib.util.spec_from_file_location("newest", project.PACKAGE.parent / ".ci" / "newest.py")
newest = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(newest)


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """``installed("path/python3.12", 0)``: a Python that ends with this status; path is PATH, pyenv is pyenv's root."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    def install(name: str, status: int) -> str:
        python = tmp_path / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(f"#!/bin/sh\nexit {status}\n")
        python.chmod(0o755)
        return str(python)

    return install


def test_it_takes_the_oldest_on_the_path_that_starts(installed):
    installed("path/python3.11", 0)
    installed("path/python3.14", 0)
    python = installed("path/python3.13", 0)
    assert newest.newer_python() == python


def test_where_the_path_has_none_that_starts_it_takes_one_of_pyenvs(installed):
    installed("path/python3.12", 127)  # as pyenv's own says while no version is chosen
    python = installed("pyenv/versions/3.12.1/bin/python3.12", 0)
    assert newest.newer_python() == python


def test_where_there_is_none_it_says_so_in_one_line(installed, capsys):
    installed("pyenv/versions/3.11.7/bin/python3.11", 0)
    assert newest.tests_elsewhere() == 1
    line = capsys.readouterr().out
    assert line.startswith("make newest needs Python 3.12 or newer, and this is 3.")
    assert line.endswith("; name one: make newest PYTHON=python3.12\n")
