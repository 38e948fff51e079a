"""``python .ci/newest.py names``: what to install for a try of the newest versions, a name in each line.

``python .ci/newest.py changed``: a table of the packages that are there in another version than requirements.txt has.
"""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("hypothesis", "mypy", "playwright", "pytest", "pytest-xdist", "ruff", "setuptools")


def main(question: str) -> int:
    if question == "names":
        print(*names(), sep="\n")
    else:
        print("| package | tried with | here |", "|---|---|---|", *changed(), sep="\n")
    return 0


def names() -> list[str]:
    """All that pyproject.toml names, without its bounds, and the tools of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for more in project["optional-dependencies"].values() for line in more)]
    found = {re.match(r"[\w.-]+", line)[0] for line in lines} - {"pardemo"}
    return sorted({*found, *TOOLS})


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
