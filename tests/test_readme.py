"""The README's example runs as it stands, and what it names exists."""

import re
import subprocess
import sys

import pytest

from pardemo import project, runner

ROOT = project.PACKAGE.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_example_runs_and_prints_what_it_says(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    script = tmp_path / "example.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    sent = [int(word) for word in re.findall(r"\d+", done.stdout)]
    assert len(sent) == 4
    assert sent == pytest.approx([1.5 * (4 << 20)] * 4, rel=0.005)


def test_every_linked_file_exists():
    for target in re.findall(r"\]\((?!http)([^)]+)\)", TEXT):
        assert (ROOT / target).exists(), target


def test_every_chapter_is_listed():
    for name in runner.notebooks():
        assert f"| {name} |" in TEXT


def test_the_two_commands_are_there():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for command in re.findall(r"make (\w+)", TEXT):
        assert command in targets
    assert {"run", "test", "lab", "bench"} <= set(targets)
