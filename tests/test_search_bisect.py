"""``--since``: the first release or commit that shows a difference, by halving; local packages and a local clone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo.cli import main
from pardemo.script.search import bisect
from pardemo.script.search.bisect import RIGHT, UNKNOWN, WRONG, first_wrong

#: Like a reproduction: it imports what is to be judged, and says what it shows.
REPRODUCTION = """
import sys
import pardemo_made
if sys.argv[1] == "layout":
    print(f"rank 0: {1.0} for {1.0}, x {1.0}, rest {0.0}: {pardemo_made.SHOWN}", flush=True)
"""


@given(st.integers(0, 12), st.integers(0, 12), st.sets(st.integers(0, 11)))
@settings(max_examples=200, deadline=None)
def test_the_first_wrong_one_is_found_past_those_that_cannot_be_judged(right, wrong, unknown):
    """Versions 0 to right + wrong, of which the last is wrong and known to be."""
    count = right + wrong + 1
    unknown -= {count - 1}
    asked = []

    def judge(version):
        asked.append(int(version))
        return UNKNOWN if int(version) in unknown else RIGHT if int(version) < right else WRONG

    last, first = first_wrong([str(version) for version in range(count)], judge)
    known = [version for version in range(count) if version not in unknown]
    assert int(first) == min(version for version in known if version >= right)
    assert last == str(max((version for version in known if version < right), default=""))
    assert len(asked) == len(set(asked)) <= 3 + len(unknown) + count.bit_length()


def in_folder(script, ranks, environment):
    """What a reproduction prints, from the text of the folder that is tried; without torchrun, which takes seconds."""
    text = (Path(environment["PYTHONPATH"].split(":")[0]) / "pardemo_made.py").read_text(encoding="utf-8")
    return ("", "it raises ImportError: no") if "broken" in text else (text, "")


@pytest.fixture
def clone(tmp_path):
    """A clone of six commits, the fifth of which brings the difference, and the third of which cannot be imported."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    for number, text in enumerate(["the same", "the same 2", "broken", "the same 3", "DIFFERENT", "DIFFERENT 2"], 1):
        (folder / "pardemo_made.py").write_text(text, encoding="utf-8")
        subprocess.run([*git, "add", "."], check=True)
        subprocess.run([*git, "commit", "-q", "-m", f"Change {number}"], check=True)
    subprocess.run([*git, "tag", "first", "HEAD~5"], check=True)
    return folder


def test_commits_of_a_clone(clone, monkeypatch):
    monkeypatch.setattr(bisect, "printed", in_folder)
    notes = []
    commits = bisect.commits(clone, "first")
    said = bisect.since_commit(Path("repro.py"), (1, 2), clone, commits, notes.append)
    right = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD~2"], capture_output=True, text=True).stdout
    assert said.startswith(f"Not in commit {right[:12]}, and since ")
    assert "(Change 5); not tried: " in said
    assert any("shows it" in note for note in notes)
    listed = subprocess.run(["git", "-C", str(clone), "worktree", "list"], capture_output=True, text=True, check=True)
    assert len(listed.stdout.splitlines()) == 1, "no folder of a commit is left"
    said = bisect.since_commit(Path("repro.py"), (1, 2), clone, bisect.commits(clone, "HEAD~1"), notes.append)
    assert "the oldest tried" in said
    for since, line in (("nowhere", "bad revision 'nowhere"), ("HEAD", "no later commits")):
        with pytest.raises(ValueError, match=line):
            bisect.commits(clone, since)


def wheel(folder, version, text):
    name = f"pardemo_made-{version}"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as made:
        made.writestr("pardemo_made.py", text)
        made.writestr(f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: pardemo-made\nVersion: {version}\n")
        made.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        made.writestr(f"{name}.dist-info/RECORD", "")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Releases 1.1 to 1.12 of a package in a folder, of which pip looks at no other place; 1.12 is installed."""
    wheels, installed = tmp_path / "wheels", tmp_path / "installed"
    wheels.mkdir()
    for number in (1, 2, 9, 10, 11, 12):
        shown = "DIFFERENT" if number >= 10 else "the same"
        wheel(wheels, f"1.{number}", f'SHOWN = "{shown}"\n')
    (wheels / "pardemo_made-1.9-py3-none-any.whl").write_bytes(b"no wheel")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    line = [sys.executable, "-m", "pip", "install", "-q", "--target", str(installed), "pardemo-made==1.12"]
    subprocess.run(line, check=True, timeout=60)
    monkeypatch.syspath_prepend(str(installed))


def test_releases_of_a_package(package, monkeypatch):
    monkeypatch.setattr(bisect, "printed", in_folder)
    notes = []
    versions = bisect.releases("pardemo-made", "1.1")
    assert versions == ["1.1", "1.2", "1.9", "1.10", "1.11", "1.12"]
    said = bisect.since_release(Path("repro.py"), (1, 2), "pardemo-made", versions, notes.append)
    assert said.startswith("Not in pardemo-made 1.2, and since 1.10; not tried: 1.9 (it cannot be installed: ")
    assert "pardemo-made 1.1: does not show it" in "\n".join(notes)
    with pytest.raises(ValueError, match="knows no release"):
        bisect.releases("pardemo-made", "2.0")


@pytest.mark.nightly
def test_a_release_is_what_the_reproduction_imports(package, tmp_path):
    script = tmp_path / "repro.py"
    script.write_text(REPRODUCTION, encoding="utf-8")
    versions = bisect.releases("pardemo-made", "1.2")
    said = bisect.since_release(script, (1, 2), "pardemo-made", versions, lambda note: None)
    assert said.startswith("Not in pardemo-made 1.2, and since 1.10")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--package", "torch"], "say --since"),
        (["--since", "2.11"], "--since needs --package NAME"),
        (["--recipe", "peft", "--since", "1", "--package", "nowhere"], "--package nowhere is not installed"),
        (["--recipe", "peft", "--since", "1", "--clone", "nowhere"], "git rev-list in nowhere: fatal: cannot change"),
        (["--recipe", "nothing"], "there is no recipe nothing: say one of transformers-tensor-parallel"),
        (["--recipe", "peft", "train.py"], "leave out the one behind --"),
    ],
)
def test_what_the_command_refuses(options, line, capsys):
    assert main(["prove", "--search", *options]) == 2
    assert line in capsys.readouterr().err
