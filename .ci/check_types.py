"""``python .ci/check_types.py``: mypy over the whole package, and a look at the list of what it does not check yet.

One run without the list of ``ignore_errors`` in pyproject.toml says both: an error in a module that is not on the list,
and a module (or a package, as ``pardemo.peers.*``) on the list that has none any more. Both are failures.
"""

import re
import subprocess
import sys
import tempfile
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ERROR = re.compile(r"^(?P<path>[^:\n]+\.py):\d+: error: ")
CACHE = ROOT / ".mypy_cache"


def main() -> int:
    """Returns 0 where every module is checked that is not on the list, and every one on it still needs to be."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(without_list(settings))
        file.flush()
        command = [sys.executable, "-m", "mypy", "--config-file", file.name, "--cache-dir", str(CACHE)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return done.returncode
    wrong, passing = judge(done.stdout.splitlines(), listed(settings))
    print(*wrong, sep="\n", end="\n" if wrong else "")
    for name in passing:
        print(f"pyproject.toml: {name} passes now: take it off mypy's list of ignore_errors")
    checked = f"types: {len(listed(settings))} entries not checked yet"
    print(f"{checked}, {len(wrong)} errors in what is" if wrong else checked)
    return 1 if wrong or passing else 0


def listed(settings: dict) -> list[str]:
    """Modules and packages that are not checked yet."""
    return [name for part in settings["overrides"] if part.get("ignore_errors") for name in part["module"]]


def judge(lines: list[str], names: list[str]) -> tuple[list[str], list[str]]:
    """The errors in modules that are not on the list, and what on the list has no error."""
    wrong, needed = [], set()
    for line in lines:
        if found := ERROR.match(line):
            module = found["path"].removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            fitting = [name for name in names if fits(module, name)]
            needed.update(fitting)
            if not fitting:
                wrong.append(line)
    return wrong, [name for name in names if name not in needed]


def fits(module: str, name: str) -> bool:
    """As mypy reads it: ``pardemo.peers.*`` is the package's ``__init__``, too."""
    return fnmatchcase(module, name) or (name.endswith(".*") and module == name[:-2])


def without_list(settings: dict) -> str:
    """mypy's settings as TOML, without the list."""
    lines = ["[tool.mypy]", *(f"{key} = {toml(value)}" for key, value in settings.items() if key != "overrides")]
    for part in settings["overrides"]:
        if not part.get("ignore_errors"):
            lines += ["[[tool.mypy.overrides]]", *(f"{key} = {toml(value)}" for key, value in part.items())]
    return "\n".join(lines) + "\n"


def toml(value: bool | str | list[str]) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(toml, value))}]" if isinstance(value, list) else f'"{value}"'


if __name__ == "__main__":
    sys.exit(main())
