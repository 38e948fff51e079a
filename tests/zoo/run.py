"""Runs the zoo's cases, broken and mended, under ``pardemo prove``: which are found, where, and by which cause.

    python tests/zoo/run.py [FAMILY or NAME …] [--write] [--docs] [--verbose]

The exit status is 1 where a case is worse than in the committed outcome: not found, elsewhere, by another cause, or
accused when mended. ``--write`` puts the outcome of all cases into ``outputs/reference/zoo.json``, and makes
docs/records/silent-bugs.md's tables of it; ``--docs`` makes them of what that file has, and runs nothing.
"""

import argparse
import contextlib
import io
import json
import os
import re
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ZOO = Path(__file__).resolve().parent
RESULT = ZOO.parent.parent / "outputs" / "reference" / "zoo.json"
PAGE = ZOO.parent.parent / "docs" / "records" / "silent-bugs.md"
PLACE = re.compile(r"(<!-- (count|families): [^>]*-->\n).*?(<!-- end of \2 -->)", re.DOTALL)
#: What is to be right of a proof's verdict.
RIGHT = ("found", "module_right", "cause_right")
#: In the order of the page, each with its heading there. Scripts that hang are another matter: tests/test_hangs.py.
FAMILIES = {
    "sums": "Sums over ranks",
    "normalisation": "What the loss is divided by",
    "losses": "Losses over a cut vocabulary or sequence",
    "clipping": "Clipping",
    "randomness": "Random numbers",
    "data": "Data",
    "positions": "Positions and masks",
    "state": "What is kept from step to step",
    "pipelines": "Pipelines",
    "precision": "Precision",
    "recomputation": "Recomputation",
}


@dataclass(frozen=True)
class Case:
    """One bug: its script, the thread, the layouts, and what a proof has to say of it."""

    family: str
    name: str
    thread: str
    what: str
    layouts: tuple[str, ...]
    cause: str
    module: str = ""
    factor: float | None = None
    steps: int = 3
    double: bool = True  # False where the bug is one of rounding, which fp64 takes away

    @property
    def script(self) -> Path:
        """The script, broken unless it gets ``--mended``."""
        return ZOO / f"{self.name}.py"


def cases() -> list[Case]:
    """All cases of all families, in their order."""
    families = tomllib.loads((ZOO / "cases.toml").read_text(encoding="utf-8"))
    return [
        Case(family, name, **{**of, "layouts": tuple(of["layouts"])})
        for family, members in families.items() for name, of in members.items()
    ]  # fmt: skip


def proven(case: Case, mended: bool):
    """The proof of a case's script in its layouts, in fp64 unless it says otherwise."""
    from pardemo.script.compare import proof, run_layouts, runs

    keys = sorted({word.partition("=")[0] for text in case.layouts for word in text.split()} - {"ranks"})
    line = [os.path.relpath(case.script), *(part for key in keys for part in (f"--{key}", f"{{{key}}}"))]
    line += ["--mended"] if mended else []
    options = runs.RunOptions(steps=case.steps, double=case.double, timeout_s=60)
    with contextlib.redirect_stdout(io.StringIO()):
        return proof.compare_layouts(run_layouts.from_texts(case.layouts, line), options)


def outcome(case: Case) -> dict[str, Any]:
    """What proofs say of a case, beside what they have to say of the broken script; the mended one is to be equal.

    A row of ``zoo.json``.
    """
    begin, said, alarm = time.monotonic(), "", False
    findings, best = [], None
    try:
        broken = proven(case, False)
        findings, said = broken.findings, "; ".join(broken.failed.values())
    except ValueError as error:
        said = f"error: {error}"
    try:
        right = proven(case, True)
        if alarm := not right.equal:
            said += f" | mended: {[(f.what, f.cause, f.module, f.why) for f in right.findings]} {right.failed}"
    except ValueError as error:
        alarm, said = True, f"{said} | mended: {error}"
    row = dict.fromkeys(("cause", "module", "factor", "rest", "layout", "step"))
    row |= {"cause": "", "module": "", "layout": ""}
    if findings:
        best = next((f for f in findings if f.cause == case.cause), findings[0])
        row = {name: getattr(best, name) for name in row}
        said = best.why + said
    cause_right = bool(best) and best.cause == case.cause
    if cause_right and case.factor is not None:
        cause_right = best.factor is not None and abs(best.factor - case.factor) < 1e-3 * abs(case.factor)
    return {
        "family": case.family, "name": case.name, "thread": case.thread, "what": case.what, "found": bool(best),
        "module_right": bool(best) and f"{best.module}.".startswith(f"{case.module}." if case.module else ""),
        "cause_right": cause_right, "false_alarm": alarm, **row, "said": said,
        "seconds": round(time.monotonic() - begin, 1),
    }  # fmt: skip


def page(kept: list[dict], text: str) -> str:
    """The page's text with its counts and tables made of what was kept of all cases."""
    made = {"count": counted(kept), "families": "\n".join(family(name, kept) for name in FAMILIES)}
    return PLACE.sub(lambda place: place[1] + made[place[2]] + place[3], text)


def counted(kept: list[dict]) -> str:
    """How many were found, in sentences, and those of which something was missed."""
    of, longest, minutes = len(kept), max(one["seconds"] for one in kept), sum(one["seconds"] for one in kept) / 60
    found, module, cause, alarm = (sum(one[key] for one in kept) for key in (*RIGHT, "false_alarm"))
    lines = [
        f"**{of} bugs: {found} found, {module} at the right module, {cause} with the right cause.** False alarms on "
        f"the {of} mended scripts: {alarm}. Broken and mended together, a bug took at most {longest:.0f} seconds on "
        f"two cores, and all of them {minutes:.0f} minutes."
    ]
    wanted = {(case.family, case.name): case for case in cases()}
    for one in kept:
        if not all(one[key] for key in RIGHT):
            case = wanted[one["family"], one["name"]]
            lines.append(
                f"\n- Missed in part: {one['what']} (`{one['name']}`). It should say {case.cause}"
                f"{f' at `{case.module}`' if case.module else ''}, and says {verdict(one)}: {one['said']}."
            )
    if len(lines) > 1:
        lines.append(
            "\nWhere a part of the gradient is wrong, and it is no multiple of what it should be, nothing in one "
            "layout tells that part from the rest."
        )
    return "\n".join(lines) + "\n"


def family(name: str, kept: list[dict]) -> str:
    """A family's heading, and a row for each of its bugs."""
    lines = [f"## {FAMILIES[name]}", ""]
    lines += ["| bug | met in | script in `tests/zoo` | `pardemo prove` says |", "|---|---|---|---|"]
    for one in kept:
        if one["family"] == name:
            first, *words = one["what"].split(" ")
            what = " ".join([first if "_" in first else first[0].upper() + first[1:], *words])
            cells = [what, first_of(one["thread"]), f"`{one['name']}`", verdict(one)]
            lines.append(f"| {' | '.join(cell.replace('|', ',') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def verdict(one: dict) -> str:
    """What was said of a broken script: cause, factor and first module."""
    if not one["found"]:
        return "nothing"
    said = one["cause"] or "no cause"
    factor, rest = one["factor"], one["rest"] or 0.0
    if one["said"][0] in "×÷":
        said += f", {one['said'].partition(' =')[0]}"
    elif factor is not None and rest < 1e-3 and abs(factor - 1) > 1e-6:  # else it is no multiple
        said += f", × {factor:.4g}"
    return f"{said} at `{one['module']}`" if one["module"] else said


def first_of(threads: str) -> str:
    """The first of a case's threads."""
    return re.split(r",\s*|\s+and\s+", threads)[0].replace("#", " ")


def worse(rows: list[dict]) -> list[str]:
    """Names of the cases that are worse than in the committed outcome."""
    kept = {row["name"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))}
    return [
        row["name"] for row in rows
        if any(kept[row["name"]][key] > row[key] for key in RIGHT)
        or row["false_alarm"] > kept[row["name"]]["false_alarm"]
    ]  # fmt: skip


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    if (asked.write or asked.docs) and asked.names:
        raise SystemExit("--write and --docs are of all cases")
    if asked.docs and not asked.write:
        write_page()
        return 0
    rows = []
    for case in cases():
        if asked.names and not {case.family, case.name} & set(asked.names):
            continue
        rows.append(row := outcome(case))
        marks = "".join(letter if row[key] else "-" for letter, key in zip("FMC", RIGHT, strict=True))
        wrong = f"  [wanted {case.cause} at {case.module} {case.factor or ''}]" if marks != "FMC" else ""
        wrong += "  FALSE ALARM" if row["false_alarm"] else ""
        print(f"{marks} {row['seconds']:5.1f} s  {case.family}/{case.name}: {row['cause']} at {row['module']} "
              f"× {row['factor']} rest {row['rest']}{wrong}", flush=True)  # fmt: skip
        if asked.verbose or wrong:
            print(f"        {row['said']}", flush=True)
    count = [sum(row[key] for row in rows) for key in (*RIGHT, "false_alarm")]
    print(f"{len(rows)} cases: {count[0]} found, {count[1]} at the right module, {count[2]} with the cause, "
          f"{count[3]} false alarms")  # fmt: skip
    fallen = worse(rows)
    print(*(f"worse than the committed outcome: {name}" for name in fallen), sep="\n", end="")
    if asked.write:
        RESULT.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_page()
    return 1 if fallen else 0


def write_page() -> None:
    """Makes the page's tables anew of what is kept."""
    PAGE.write_text(page(json.loads(RESULT.read_text()), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ZOO.parent.parent))
    sys.exit(main())
