"""``python .ci/newest.py names``: what to install for a try of the newest versions, a name in each line.

``python .ci/newest.py changed``: a table of the packages that are there in another version than requirements.txt has.
``python .ci/newest.py tests``: the gate's tests, the zoo, the bugs that were found and the layouts that are right, with
the newest of everything, in .venv-newest, made anew; by a Python of 3.12 or newer, which is looked for where this one
is older: on PATH, then among pyenv's.
"""

import os
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What the newest Megatron-core asks for. The oldest that will do is taken: more packages have wheels for it.
PYTHON = (3, 12)
NAMES = [f"python3.{minor}" for minor in range(PYTHON[1], PYTHON[1] + 4)]
TOOLS = ("hypothesis", "mypy", "playwright", "pytest", "pytest-xdist", "ruff", "setuptools")
PYTEST = ("-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "-m")
#: What runs in the newest environment, one after the other, whether or not one before has failed.
RUNS = {
    "the quick tests": (*PYTEST, "quick"),
    "the gate's tests": (*PYTEST, "not nightly"),
    "the zoo": ("tests/zoo/run.py",),
    "the bugs that were found": ("tests/found/run.py", "--bugs"),
    "the layouts that are right": ("tests/found/run.py",),
}


def main(question: str) -> int:
    if question == "names":
        print(*names(), sep="\n")
    elif question == "tests":
        return tests() if sys.version_info >= PYTHON else tests_elsewhere()
    else:
        print("| package | tried with | here |", "|---|---|---|", *changed(), sep="\n")
    return 0


def names() -> list[str]:
    """All that pyproject.toml names, without its bounds, and the tools of the tests."""
    import tomllib  # here: a Python older than 3.11 looks for a newer one

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for more in project["optional-dependencies"].values() for line in more)]
    found = {re.match(r"[\w.-]+", line)[0] for line in lines} - {"pardemo"}
    return sorted({*found, *TOOLS})


def tests_elsewhere() -> int:
    """Starts this script again in a newer Python: its exit status, or 1 and a line where there is none."""
    python = newer_python()
    if python is None:
        version = ".".join(map(str, sys.version_info[:3]))
        print(f"make newest needs Python 3.12 or newer, and this is {version}; name one: make newest PYTHON=python3.12")
        return 1
    return subprocess.run([python, __file__, "tests"]).returncode


def newer_python() -> str | None:
    """The first Python of 3.12 or newer, of those on PATH and then of pyenv's versions."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    installed = [str(path) for name in NAMES for path in sorted(pyenv.glob(f"*/bin/{name}"))]
    for python in [*filter(None, map(shutil.which, NAMES)), *installed]:
        # pyenv's own python3.12 on PATH starts nothing until a version is chosen
        if subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True).returncode == 0:
            return python
    return None


def tests() -> int:
    """Makes the environment and runs all of RUNS in it: 0 only where each has passed."""
    folder = ROOT / ".venv-newest"
    venv.create(folder, with_pip=True, clear=True)
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, *names()], check=True)
    subprocess.run([*install, "--no-deps", "--no-build-isolation", "-e", "."], cwd=ROOT, check=True)
    subprocess.run([python, __file__, "changed"], check=True)
    statuses = {what: subprocess.run([python, *run], cwd=ROOT).returncode for what, run in RUNS.items()}
    print(*(f"{'failed' if status else 'passed'}: {what}" for what, status in statuses.items()), sep="\n")
    return int(any(statuses.values()))


def changed() -> list[str]:
    """Rows of a Markdown table."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    tried = dict(line.split("==") for line in lines if "==" in line and line[0] != "#")
    rows = []
    for name, version in tried.items():
        try:
            here = metadata.version(name)
        except metadata.PackageNotFoundError:
            here = "not installed"
        if here.split("+")[0] != version:
            rows.append(f"| {name} | {version} | {here} |")
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
