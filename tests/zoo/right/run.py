"""Random right layouts under ``pardemo prove``: none of them may be accused.

    python tests/zoo/right/run.py --seed 0 --count 60              # draws, runs, prints each false alarm
    python tests/zoo/right/run.py --seed 0 --only 7 --layout 2     # that layout once more, with all that is said
    python tests/zoo/right/run.py --seed 0 --count 1000 --seconds 170 --write
    python tests/zoo/right/run.py --seed 0 --count 1000 --jobs 3   # three proofs at a time: they wait for half of it

A proof has one model and several layouts of it, all held against one process. ``--write`` goes on where
``outputs/reference/right_layouts.json`` ends, if that is of the same seed, until there are ``--count`` layouts or the
seconds are over; ``docs/prove.md`` then says how many there are.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
WRITTEN = ROOT / "outputs" / "reference" / "right_layouts.json"
#: Where a document says how many there are.
PAGE, TOLD = ROOT / "docs" / "prove.md", re.compile(r"(?<=drawn from seed 1, )[\d,]+(?= were run)")
PER_PROOF = 6


@dataclass
class Counts:
    """Of all layouts that were run: how many, by engine; which were accused, which failed, what was not compared.

    ``mended``: those that were accused, by a fault of ``prove`` that has been mended since, each with its test.
    """

    seed: int
    proofs: int = 0
    layouts: int = 0
    seconds: float = 0.0
    engines: dict[str, dict[str, int]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    mended: list[str] = field(default_factory=list)

    def add(self, engine: str, outcome: str) -> None:
        """Counts a layout."""
        self._of(engine)["layouts"] += 1
        self.layouts += 1
        if outcome != "equal":
            self.engines[engine][outcome] += 1

    def merge(self, other: "Counts") -> None:
        """Adds what another process has counted of the same seed."""
        for engine, counts in other.engines.items():
            ours = self._of(engine)
            for what, number in counts.items():
                ours[what] += number
        self.proofs += other.proofs
        self.layouts += other.layouts
        self.seconds = round(self.seconds + other.seconds, 1)
        self.alarms += other.alarms
        self.failed += other.failed

    def _of(self, engine: str) -> dict[str, int]:
        return self.engines.setdefault(engine, {"layouts": 0, "alarms": 0, "failed": 0, "in_part": 0})


def drawn(seed: int, number: int, few: Sequence[str] = ()) -> tuple[dict[str, Any], list[dict[str, Any]], bool]:
    """A proof's model, its layouts, and whether it runs in fp64. ``few``: the only engines that are drawn."""
    import drawing

    rng = random.Random(f"{seed} {number}")
    engines = {name: of for name, of in drawing.ENGINES.items() if not few or name in few}
    while True:
        model, double = drawing.model(rng), rng.random() < 0.5
        layouts = [drawing.layout(rng, model, double, engines) for _ in range(PER_PROOF)]
        if None not in layouts:
            return model, layouts, double


def proven(model: dict[str, Any], layouts: Sequence[dict[str, Any]], double: bool):
    """The proof of these layouts, the first one's reference is one process."""
    import drawing

    from pardemo.script.compare import proof, runs
    from pardemo.script.compare.run_layouts import RunLayout

    made = []
    for values in [{"ranks": 1, "engine": "plain"}, *layouts]:
        script = os.path.relpath(HERE / f"{drawing.ENGINES[values['engine']][0]}.py")
        line = [f"--{key}={value}" for key, value in {**model, **values}.items() if key != "ranks"]
        made.append(RunLayout(values["ranks"], values, (script, *line)))
    options = runs.RunOptions(steps=2, double=double, timeout_s=90)
    with contextlib.redirect_stdout(io.StringIO()):
        return proof.compare_layouts(made, options)


def run(seed: int, number: int, counts: Counts, few: Sequence[str] = (), only: int | None = None) -> None:
    """Runs one proof, and prints what was said of its layouts; where that fails, a proof of each of them."""
    model, layouts, double = drawn(seed, number, few)
    begin = time.monotonic()
    chosen = layouts if only is None else [layouts[only]]
    again = f"python tests/zoo/right/run.py --seed {seed} --only {number}" + "".join(f" --engine {one}" for one in few)
    try:
        made = proven(model, chosen, double)
    except Exception as error:  # a fault of prove's own: the other layouts go on, and the other proofs
        if not isinstance(error, ValueError):
            traceback.print_exc()
        print(f"FAILED proof {number}: {error}\n    {again}\n    {model} double={double}", flush=True)
        if only is None:
            for place in range(len(layouts)):
                run(seed, number, counts, few, place)
        else:
            counts.add(layouts[only]["engine"], "failed")
            counts.failed.append(f"{again} --layout {only}: {error}")
        return
    finally:
        if only is None:
            counts.seconds = round(counts.seconds + time.monotonic() - begin, 1)
            counts.proofs += 1
    for place, (values, one) in enumerate(zip(chosen, made.layouts[1:], strict=True)):
        said, failed = one.findings, one.error
        notes = [n for n in made.notes if n.startswith(f"{one.name}:")]
        outcome = "alarms" if said else "failed" if failed else "in_part" if notes else "equal"
        counts.add(values["engine"], outcome)
        repeat = f"{again} --layout {place if only is None else only}"
        if outcome != "equal" or only is not None:
            print(f"{outcome.upper()} {one.name}\n    {repeat}\n    {model} double={double}", flush=True)
            for line in [f"{f.what} {f.cause} {f.module} step {f.step} × {f.factor} rest {f.rest}: {f.why}"
                         f" {f.parameters[:4]}" for f in said] + ([failed] if failed else []) + notes:  # fmt: skip
                print(f"        {line}", flush=True)
        if outcome in ("alarms", "failed"):
            getattr(counts, outcome).append(f"{repeat}: {failed or said[0].why}")


def counted(seed: int, number: int, few: Sequence[str]) -> Counts:
    """One proof's counts, in a process of its own."""
    counts = Counts(seed)
    run(seed, number, counts, few)
    return counts


def _as_line(counts: Counts) -> str:
    return (
        f"{counts.layouts} layouts, {len(counts.alarms)} false alarms, {len(counts.failed)} failed, {counts.seconds} s"
    )


def _begin(parent: int) -> None:
    """Readies a process for proofs, and ends it with the one that started it."""
    _find()
    from pardemo.termination import end_with_parent

    end_with_parent(parent)


def _find() -> None:
    """Lets a process find the package and the modules beside this one."""
    sys.path[:0] = [str(ROOT), str(HERE)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60, help="layouts")
    parser.add_argument("--only", type=int, help="the number of one proof")
    parser.add_argument("--layout", type=int, help="the number of one of its layouts")
    parser.add_argument("--engine", action="append", default=[], help="draw layouts of this engine only; repeat it")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no proof after that time")
    parser.add_argument("--jobs", type=int, default=1, help="proofs at a time")
    parser.add_argument("--write", action="store_true")
    asked = parser.parse_args()
    counts = Counts(asked.seed)
    if asked.only is not None:
        run(asked.seed, asked.only, counts, asked.engine, asked.layout)
        sys.exit(bool(counts.alarms or counts.failed))
    if asked.write and WRITTEN.is_file():
        before = json.loads(WRITTEN.read_text(encoding="utf-8"))
        counts = Counts(**before) if before["seed"] == asked.seed else counts
    until = time.monotonic() + asked.seconds
    # each process starts its own ranks, and prints what is not equal
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, spawn, initializer=_begin, initargs=(os.getpid(),)) as pool:
        begun = counts.proofs
        going: deque[Future[Counts]] = deque()
        while counts.layouts < asked.count:
            while len(going) < asked.jobs and time.monotonic() < until:
                going.append(pool.submit(counted, asked.seed, begun, asked.engine))
                begun += 1
            if not going:
                break
            counts.merge(going.popleft().result())
            if counts.proofs % 10 == 0:
                print(_as_line(counts), flush=True)
            if asked.write:
                WRITTEN.write_text(json.dumps(asdict(counts), indent=1) + "\n", encoding="utf-8")
    if asked.write:
        PAGE.write_text(TOLD.sub(f"{counts.layouts:,}", PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{_as_line(counts)}: {json.dumps(counts.engines)}")
    sys.exit(bool(counts.alarms or counts.failed))


if __name__ == "__main__":
    _find()
    main()
