"""Runs right layouts of the pinned libraries' own engines under ``pardemo prove``: a silent bug would part them.

    python tests/found/run.py [--bugs] [--only NAME …] [--write] [--docs] [--verbose]

``--bugs`` tries the scripts of this folder instead, by the tests of tests/test_found.py, and ``--write`` then notes in
``tried.json`` whether the installed release still has each bug: the column *tried with* of docs/records/found.md.
``--write`` puts what came out into ``outputs/reference/searched.json`` (with ``--only``, of those alone: the others
stay), and makes the table of docs/records/found.md; ``--docs`` makes the table of what that file has, and runs nothing.
"""

import argparse
import contextlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

SEARCHED = Path(__file__).resolve().parent / "searched"
ROOT = SEARCHED.parent.parent.parent
SCRIPTS = ROOT / "pardemo" / "script" / "search" / "recipes" / "scripts"
RESULT = ROOT / "outputs" / "reference" / "searched.json"
PAGE = ROOT / "docs" / "records" / "found.md"
PLACE = re.compile(r"(<!-- searched: [^>]*-->\n).*?(<!-- end of searched -->)", re.DOTALL)
TRIED = Path(__file__).resolve().with_name("tried.json")
ROW = re.compile(r"^\| \*\*`\w+`\*\*.*$", re.MULTILINE)
#: Libraries that have another name among packages.
PACKAGES = {"megatron": "megatron-core", "trainer": "transformers"}


@dataclass(frozen=True)
class Case:
    """A script, and the lists of layouts that have to train alike: each list is a proof."""

    library: str
    name: str
    what: str
    layouts: tuple[str, ...]
    double: bool = True
    also: tuple[str, ...] = ()
    script_name: str = ""

    @property
    def script(self) -> Path:
        """The script of all its layouts: of the case's name, unless it says another."""
        return SCRIPTS / f"{self.library}_{self.script_name or self.name}.py"


@dataclass(frozen=True)
class Outcome:
    """What a case's proofs said: ``said`` is empty where all layouts train alike."""

    library: str
    version: str
    name: str
    script: str
    what: str
    layouts: list[str]
    double: bool
    right: int
    said: list[str]
    seconds: float


def cases() -> list[Case]:
    """All cases of all libraries, in their order."""
    made = []
    for file in sorted(SEARCHED.glob("*.toml")):
        for name, of in tomllib.loads(file.read_text(encoding="utf-8")).items():
            lists = {key: tuple(of.pop(key)) for key in ("layouts", "also") if key in of}
            made.append(Case(file.stem, name, **of, **lists))
    return made


def proven(case: Case, texts: tuple[str, ...]):
    """The proof of a list of layouts; a name that a layout leaves out has the first layout's value, or the script's."""
    from pardemo.script.compare import proof, run_layouts, runs

    keys = sorted({word.partition("=")[0] for text in texts for word in text.split()} - {"ranks"})
    defaults = {key: default(case.script, key) for key in keys}
    full = []
    for text in texts:
        own = dict(word.split("=", 1) for word in text.split())
        full.append(" ".join(f"{key}={value}" for key, value in {"ranks": 1, **defaults, **own}.items()))
    line = [os.path.relpath(case.script), *(f"--{key}={{{key}}}" for key in keys)]
    options = runs.RunOptions(double=case.double, timeout_s=120)
    with contextlib.redirect_stdout(io.StringIO()):
        return proof.compare_layouts(run_layouts.from_texts(full, line), options)


def default(script: Path, key: str) -> str:
    """The default of a script's option, or ``none``."""
    found = re.search(rf'\b{key}=("?)([^",)]*)\1', script.read_text(encoding="utf-8").partition("options(")[2])
    return (found[2] if found else "") or "none"


def outcome(case: Case) -> Outcome:
    """Runs a case's proofs."""
    begin, right, said = time.monotonic(), 0, []
    for texts in filter(None, (case.layouts, case.also)):
        try:
            made = proven(case, texts)
        except ValueError as error:
            said.append(str(error))
            continue
        said += [f"{name}: {error}" for name, error in made.failed.items()]
        said += [f"{f.layout}: step {f.step}, {f.what}, {f.cause} at {f.module}: {f.why}" for f in made.findings]
        right += len(texts) - 1 - len({*made.failed, *(finding.layout for finding in made.findings)})
    version = importlib.metadata.version(PACKAGES.get(case.library, case.library)).partition("+")[0]
    took = round(time.monotonic() - begin, 1)
    layouts = [*case.layouts, *case.also]
    return Outcome(
        case.library, version, case.name, case.script.name, case.what, layouts, case.double, right, said, took
    )


def table(kept: list[dict]) -> str:
    """A row for each library's cases in which all layouts train alike, and a sentence before them."""
    rows = [one for one in kept if not one["said"]]
    count, single = sum(one["right"] for one in rows), sum(one["right"] for one in rows if not one["double"])
    lines = [
        f"{count} layouts in {len(rows)} cases train as one process does (`python tests/found/run.py`), {single} of "
        "them in fp32 and the others in fp64. Each library's list says what a case compares.",
        "", "| list | cases, each with the number of its layouts |", "|---|---|",
    ]  # fmt: skip
    for library in dict.fromkeys(one["library"] for one in rows):
        own = [one for one in rows if one["library"] == library]
        name = f"{PACKAGES.get(library, library)} {own[0]['version']}"
        names = ", ".join(f"{one['name']} {one['right']}" for one in own)
        lines.append(f"| [{name}](../../tests/found/searched/{library}.toml) | {names} |")
    return "\n".join(lines) + "\n"


def tried_with(releases: dict[str, bool]) -> str:
    """A cell of the page: the releases that have a bug, and those that have not.

    >>> tried_with({"0.16.1": True, "0.19.2": False})
    '0.16.1; not 0.19.2'
    """
    has, has_not = ([name for name, there in releases.items() if there is which] for which in (True, False))
    return "; ".join([*([", ".join(has)] if has else []), *([f"not {', '.join(has_not)}"] if has_not else [])])


def page(text: str) -> str:
    """The page with its table and the column *tried with* made anew of what is kept."""
    made = table(json.loads(RESULT.read_text(encoding="utf-8")))
    tried = json.loads(TRIED.read_text(encoding="utf-8"))

    def row(found: re.Match[str]) -> str:
        cells = found[0].removesuffix("|").split(" | ")
        names = re.findall(r"\*\*`(\w+)`\*\*", cells[0])
        said = {name: tried_with(tried[name]["releases"]) for name in names}
        one = len(set(said.values())) == 1
        cells[-1] = said[names[0]] if one else "; ".join(f"`{name}`: {text}" for name, text in said.items())
        return " | ".join(cells) + " |"

    return PLACE.sub(lambda place: place[1] + made + place[2], ROW.sub(row, text))


def write_page() -> None:
    """Makes the page anew of what is kept."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def bugs(only: list[str], write: bool) -> int:
    """Tries the scripts of this folder: whether the installed releases have their bugs.

    A bug is there where all tests of its script pass, and is not where one says that it was mended; what fails
    otherwise is shown, and nothing is noted of it.
    """
    tried, unclear = json.loads(TRIED.read_text(encoding="utf-8")), 0
    for name, of in tried.items():
        if only and not {name, of["library"]} & set(only):
            continue
        line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_found.py", "-k", name]
        run = subprocess.run([*line, "-m", "nightly or not nightly"], cwd=ROOT, capture_output=True, text=True)
        there = True if run.returncode == 0 else False if "mended: take it off" in run.stdout else None
        version = importlib.metadata.version(of["library"]).partition("+")[0]
        said = {True: "has it", False: "has it no longer", None: "is not known to have it:\n" + run.stdout[-2000:]}[
            there
        ]
        print(f"{name}: {of['library']} {version} {said}", flush=True)
        unclear += there is None
        if there is not None:
            of["releases"] = dict(sorted({**of["releases"], version: there}.items(), key=lambda one: _number(one[0])))
        if write:
            TRIED.write_text(json.dumps(tried, indent=1) + "\n", encoding="utf-8")
            write_page()
    return int(unclear > 0)


def _number(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def write(outcomes: list[Outcome]) -> None:
    """Keeps these outcomes beside those of the other cases, in the order of all."""
    kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else []
    all_of = {(one["library"], one["name"]): one for one in [*kept, *map(asdict, outcomes)]}
    order = [all_of[key] for key in ((case.library, case.name) for case in cases()) if key in all_of]
    RESULT.write_text(json.dumps(order, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> int:
    """The command line: the exit status is 1 where a script parts that did not in the committed outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bugs", action="store_true", help="try the scripts of found bugs")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="names of scripts or libraries")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="show what the scripts print, too")
    asked = parser.parse_args()
    if asked.bugs:
        return bugs(asked.only, asked.write)
    outcomes = []
    for case in [] if asked.docs else cases():
        if asked.only and not {case.library, case.name} & set(asked.only):
            continue
        quiet = contextlib.nullcontext() if asked.verbose else contextlib.redirect_stderr(io.StringIO())
        with quiet:
            one = outcome(case)
        outcomes.append(one)
        print(f"{'right' if not one.said else 'PARTED'} {one.right} layouts {one.seconds:5.1f} s  "
              f"{one.library}/{one.name}", *one.said, sep="\n    ", flush=True)  # fmt: skip
    kept = {row["name"] for row in json.loads(RESULT.read_text(encoding="utf-8")) if row["said"]}
    if asked.write:
        write(outcomes)
    if asked.write or asked.docs:
        write_page()
    return 1 if {one.name for one in outcomes if one.said} - kept else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
