"""Runs the zoo's cases, broken and mended, under ``pardemo prove``: which are found, where, and by which cause.

    python tests/zoo/run.py [FAMILY or NAME …] [--write] [--verbose]

``--write`` puts the outcome of all cases into ``outputs/reference/zoo.json``.
"""

import argparse
import contextlib
import io
import json
import os
import sys
import time
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ZOO = Path(__file__).parent
#: Families whose cases hang: they are told by the log of collectives, and tested in tests/test_hangs.py.
OTHERS = {"hangs"}


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
    """The proof of a case's script in its layouts, in fp64."""
    from pardemo.prove import layouts, proof, runner

    keys = sorted({word.partition("=")[0] for text in case.layouts for word in text.split()} - {"ranks"})
    line = [os.path.relpath(case.script), *(part for key in keys for part in (f"--{key}", f"{{{key}}}"))]
    line += ["--mended"] if mended else []
    options = runner.Options(steps=case.steps, double=True, timeout_s=60)
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


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
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
    if asked.write and asked.names:
        raise SystemExit("--write is of all cases")
    if asked.write:
        target = ZOO.parent.parent / "outputs" / "reference" / "zoo.json"
        target.write_text(json.dumps([asdict(one) for one in outcomes], indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ZOO.parent.parent))
    main()
