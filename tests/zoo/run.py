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
from dataclasses import asdict, dataclass
from pathlib import Path

ZOO = Path(__file__).resolve().parent
RESULT = ZOO.parent.parent / "outputs" / "reference" / "zoo.json"
PAGE = ZOO.parent.parent / "docs" / "records" / "silent-bugs.md"
PLACE = re.compile(r"(<!-- (count|families): [^>]*-->\n).*?(<!-- end of \2 -->)", re.DOTALL)
#: Families whose cases hang: they are told by the log of collectives, and tested in tests/test_hangs.py.
OTHERS = {"hangs"}
#: The others, in the order of the page, each with its heading there.
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
        return ZOO / self.family / f"{self.name}.py"


@dataclass(frozen=True)
class Outcome:
    """What a proof said of a case: of the broken script, and whether the mended one was accused."""

    family: str
    name: str
    thread: str
    what: str
    found: bool
    module_right: bool
    cause_right: bool
    false_alarm: bool
    cause: str
    module: str
    factor: float | None
    rest: float | None
    layout: str
    step: int | None
    said: str
    seconds: float


def cases() -> list[Case]:
    """All cases of all families, in their order."""
    made = []
    for file in sorted(ZOO.glob("*/cases.toml")):
        if file.parent.name not in OTHERS:
            for name, of in tomllib.loads(file.read_text(encoding="utf-8")).items():
                made.append(Case(file.parent.name, name, **{**of, "layouts": tuple(of["layouts"])}))
    return made


def proven(case: Case, mended: bool):
    """The proof of a case's script in its layouts, in fp64 unless it says otherwise."""
    from pardemo.script.compare import layouts, proof, runs

    keys = sorted({word.partition("=")[0] for text in case.layouts for word in text.split()} - {"ranks"})
    line = [os.path.relpath(case.script), *(part for key in keys for part in (f"--{key}", f"{{{key}}}"))]
    line += ["--mended"] if mended else []
    options = runs.Options(steps=case.steps, double=case.double, timeout_s=60)
    with contextlib.redirect_stdout(io.StringIO()):
        return proof.scripts(layouts.from_texts(case.layouts, line), options)


def outcome(case: Case) -> Outcome:
    """Runs a case twice, and holds what is said against what it should be."""
    begin = time.monotonic()
    said, found, alarm = "", [], False
    try:
        broken = proven(case, False)
        found = broken.findings
        said = "; ".join(broken.failed.values())
    except ValueError as error:
        said = f"error: {error}"
    try:
        right = proven(case, True)
        alarm = not right.equal
        if alarm:
            said += f" | mended: {[(f.what, f.cause, f.module, f.why) for f in right.findings]} {right.failed}"
    except ValueError as error:
        alarm, said = True, f"{said} | mended: {error}"
    best = next((f for f in found if f.cause == case.cause), found[0] if found else None)
    module = best.module if best else ""
    right_module = bool(best) and (module == case.module or module.startswith(f"{case.module}.") or not case.module)
    factor = best.factor if best else None
    cause_right = bool(best) and best.cause == case.cause
    if cause_right and case.factor is not None:
        cause_right = factor is not None and abs(factor - case.factor) < 1e-3 * abs(case.factor)
    return Outcome(
        case.family, case.name, case.thread, case.what, bool(found), right_module, cause_right, alarm,
        best.cause if best else "", module, factor, best.rest if best else None, best.layout if best else "",
        best.step if best else None, (best.why if best else "") + said, round(time.monotonic() - begin, 1),
    )  # fmt: skip


def page(kept: list[dict], text: str) -> str:
    """The page's text with its counts and tables made of what was kept of all cases."""
    made = {"count": counted(kept), "families": "\n".join(family(name, kept) for name in FAMILIES)}
    return PLACE.sub(lambda place: place[1] + made[place[2]] + place[3], text)


def counted(kept: list[dict]) -> str:
    """How many were found, in sentences, and those of which something was missed."""
    of, longest, minutes = len(kept), max(one["seconds"] for one in kept), sum(one["seconds"] for one in kept) / 60
    found, module, cause, alarm = (
        sum(one[key] for one in kept) for key in ("found", "module_right", "cause_right", "false_alarm")
    )
    lines = [
        f"**{of} bugs: {found} found, {module} at the right module, {cause} with the right cause.** False alarms on "
        f"the {of} mended scripts: {alarm}. Broken and mended together, a bug took at most {longest:.0f} seconds on "
        f"two cores, and all of them {minutes:.0f} minutes."
    ]
    wanted = {(case.family, case.name): case for case in cases()}
    for one in kept:
        if not (one["found"] and one["module_right"] and one["cause_right"]):
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
    lines += [f"| bug | met in | script in `tests/zoo/{name}` | `pardemo prove` says |", "|---|---|---|---|"]
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


def worse(outcomes: list[Outcome]) -> list[str]:
    """Names of the cases that are worse than in the committed outcome."""
    kept = {row["name"]: row for row in json.loads(RESULT.read_text(encoding="utf-8"))}
    right = ("found", "module_right", "cause_right")
    return [
        one.name for one in outcomes
        if any(kept[one.name][key] and not getattr(one, key) for key in right)
        or (one.false_alarm and not kept[one.name]["false_alarm"])
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
    chosen = [case for case in cases() if not asked.names or {case.family, case.name} & set(asked.names)]
    outcomes = []
    for case in chosen:
        one = outcome(case)
        outcomes.append(one)
        marks = "".join(
            letter if good else "-"
            for letter, good in zip("FMC", (one.found, one.module_right, one.cause_right), strict=True)
        )
        wanted = "" if marks == "FMC" else f"  [wanted {case.cause} at {case.module} {case.factor or ''}]"
        alarm = "  FALSE ALARM" if one.false_alarm else ""
        print(f"{marks} {one.seconds:5.1f} s  {one.family}/{one.name}: {one.cause} at {one.module} "
              f"× {one.factor} rest {one.rest}{wanted}{alarm}", flush=True)  # fmt: skip
        if asked.verbose or wanted or alarm:
            print(f"        {one.said}", flush=True)
    count = [
        sum(getattr(one, key) for one in outcomes) for key in ("found", "module_right", "cause_right", "false_alarm")
    ]
    print(f"{len(outcomes)} cases: {count[0]} found, {count[1]} at the right module, {count[2]} with the cause, "
          f"{count[3]} false alarms")  # fmt: skip
    fallen = worse(outcomes)
    print(*(f"worse than the committed outcome: {name}" for name in fallen), sep="\n", end="")
    if asked.write:
        RESULT.write_text(json.dumps([asdict(one) for one in outcomes], indent=1, ensure_ascii=False) + "\n")
        write_page()
    return 1 if fallen else 0


def write_page() -> None:
    """Makes the page's tables anew of what is kept."""
    PAGE.write_text(page(json.loads(RESULT.read_text()), PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ZOO.parent.parent))
    sys.exit(main())
