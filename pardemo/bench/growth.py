"""What happens where there is many times as much: ranks, layers and GPUs of a plan, claims, rows of data.

A row's peer is here mostly what linear growth from a smaller case would take, so that a ratio below 1 says that
something grows faster than what it is given. The last rows say where the seconds of the collection's notebooks go.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pardemo import project
from pardemo.bench import BenchRow, by_turns, compare, slowest
from pardemo.bench.plan import told

if TYPE_CHECKING:
    from pardemo import World
    from pardemo.planner.layouts.job.job import Job

RANKS, RING_BYTES, RING_ROUNDS = (2, 4, 8, 16), 1 << 20, 9
GPUS, BATCH, TIMES, PLAN_ROUNDS = 64, 1024, 4, 5
EACH, CHAPTERS, MORE = 100, 10, 10  # claims of a chapter, chapters, times as many
ONE_CHAPTER, REPORT_ROUNDS = 1_000, 3
FEW, MANY, KEPT = 100_000, 1_000_000, 20_000  # rows of a file, rows that are chosen
FLAT, STEADY = 0.95, 0.9  # a peak and a rate that do not grow, but for noise


def rows() -> list[BenchRow]:
    return [*_ranks(), *_planner(), *_ledger(), *_data(), *_chapters()]


def _ranks() -> list[BenchRow]:
    from pardemo import World

    table = []
    for ranks in RANKS:
        with World(ranks, preload=[__name__]) as world:
            table += of_ranks(world, ranks)
    return table


def of_ranks(world: "World", ranks: int) -> list[BenchRow]:
    """The rows of a World of so many ranks."""
    cores = project.available_cores()
    seconds = slowest(world.run(all_reduces, RING_BYTES, RING_ROUNDS))
    shared = f"; {ranks} ranks share {cores} cores" if ranks > cores else ""
    note = f"gloo all_reduce of {RING_BYTES >> 10:,} KiB{shared}"
    ways = ("ring", "server")
    return [compare(f"growth.{way}.n{ranks}", seconds[way], seconds["torch"], "s", None, note) for way in ways]


def all_reduces(nbytes: int, rounds: int) -> dict[str, list[float]]:
    """On every rank: seconds of the ring, the parameter server and gloo, by turns."""
    import torch
    import torch.distributed as dist

    from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce

    tensor = torch.zeros(nbytes // 4)  # whose sums do not grow from round to round; `ring` looks at sums
    ways: dict[str, Callable[[], object]] = {
        "ring": lambda: ring_all_reduce(tensor),
        "server": lambda: parameter_server_all_reduce(tensor),
        "torch": lambda: dist.all_reduce(tensor),
    }
    return by_turns(ways, rounds, warm=2)


def _planner() -> list[BenchRow]:
    from pardemo.planner.layouts.choice.procedure_check import job_of

    model = job_of("llama3-70b", "H100", GPUS, 400.0)
    layers = model.shape.layers
    fewer = replace(model, shape=replace(model.shape, layers=layers // TIMES))
    jobs = {"fewer": fewer, "model": model, "more": replace(model, machine=replace(model.machine, gpus=TIMES * GPUS))}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    tried = {}
    for _ in range(PLAN_ROUNDS):
        for name, job in jobs.items():
            took, tried[name] = _search_s(job)
            seconds[name].append(took)
    what = {
        "layers": (
            "model",
            "fewer",
            f"{layers} layers on {GPUS} GPUs: {TIMES} × the seconds of {layers // TIMES} layers",
        ),
        "gpus": ("more", "model", f"{layers} layers on {TIMES * GPUS} GPUs: {TIMES} × the seconds of {GPUS} GPUs"),
    }
    return [
        compare(
            f"growth.plan.{name}", seconds[ours], [TIMES * each for each in seconds[peer]], "s", 1.0,
            f"a search, {told_of}; {tried[ours]:,} layouts, there {tried[peer]:,}",
        )
        for name, (ours, peer, told_of) in what.items()
    ]  # fmt: skip


def _search_s(job: "Job") -> tuple[float, int]:
    """Seconds of a search, and the layouts that it looked at."""
    from pardemo.planner.layouts.choice.search import search

    begin = time.perf_counter()
    result = search(job, BATCH)
    return time.perf_counter() - begin, result.tried


def _ledger() -> list[BenchRow]:
    """Booking and reporting many claims."""
    few, many = CHAPTERS * EACH, MORE * CHAPTERS * EACH
    with tempfile.TemporaryDirectory() as folder:
        small, large, one, tenth = (Path(folder, name) for name in ("small", "large", "one", "tenth"))
        small_s, large_s = book(small, CHAPTERS, EACH), book(large, MORE * CHAPTERS, EACH)
        report_s(small)  # its library is loaded once
        reports = [(report_s(large), MORE * report_s(small)) for _ in range(REPORT_ROUNDS)]
        tenth_s, one_s = book(tenth, 1, ONE_CHAPTER // MORE), book(one, 1, ONE_CHAPTER)
    linear = f"{MORE} × the seconds of {few:,} claims in {CHAPTERS} chapters"
    chapter = f"{ONE_CHAPTER:,} claims in one chapter, whose file is written whole at each: {MORE} × the seconds of "
    booked = f"{many:,} claims, {EACH} a chapter: {linear}"
    reported_s, expected_s = zip(*reports, strict=True)
    return [
        compare("growth.ledger", [large_s], [MORE * small_s], "s", STEADY, booked),
        compare("growth.ledger.one_chapter", [one_s], [MORE * tenth_s], "s", None, f"{chapter}{ONE_CHAPTER // MORE}"),
        compare("growth.report", reported_s, expected_s, "s", STEADY, f"report.html of {many:,}: {linear}"),
    ]


def book(folder: Path, chapters: int, each: int) -> float:
    """Seconds to book ``each`` claims in so many chapters, each with its file in ``folder``."""
    from pardemo.claims import Ledger

    begin = time.perf_counter()
    for chapter in range(chapters):
        ledger = Ledger(f"{chapter:03}_made_up", folder)
        for k in range(each):
            ledger.check(
                f"made_up_{chapter}.claim_{k}", f"Claim {k} of chapter {chapter}.", 100.0, 100.5, "B",
                rel=0.01, source="a paper", evidence="arithmetic",
            )  # fmt: skip
    return time.perf_counter() - begin


def report_s(folder: Path) -> float:
    """Seconds to read the claims in a folder and to write their report."""
    from pardemo import claims
    from pardemo.book.run import endings, report

    begin = time.perf_counter()
    booked = claims.read(folder)
    ended = [endings.NotebookEnding(name, "ok", 1.0) for name in dict.fromkeys(row["notebook"] for row in booked)]
    report.write(folder, ended, booked)
    return time.perf_counter() - begin


_BUILD = """
import json, sys, time
from pardemo.headlines import picture
from pardemo.headlines.build import build
folder, out, kept = sys.argv[1:]
begin = time.perf_counter()
test = int(kept) // 20
build([folder], out, train=int(kept) - test, test=test)
seconds = time.perf_counter() - begin
with open("/proc/self/status") as status:  # getrusage's would be that of the process which started this one, if larger
    kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(json.dumps([seconds, kib / 1024]))
"""


def _data() -> list[BenchRow]:
    built = {}
    with tempfile.TemporaryDirectory() as folder:
        for count, rounds in ((FEW, 2), (MANY, 1)):
            source = Path(folder, str(count))
            write_rows(source, count)
            runs = [told(_BUILD, str(source), str(Path(folder, "out")), str(KEPT)) for _ in range(rounds)]
            built[count] = [median(each) for each in zip(*runs, strict=True)]
    (few_s, few_mib), (many_s, many_mib) = built[FEW], built[MANY]
    what = f"{KEPT:,} rows chosen of {MANY:,}: of {FEW:,}"
    per = 1000  # rows: a single one's seconds have too many zeros to be read
    return [
        compare(
            f"growth.data.{MANY}", [per * many_s / MANY], [per * few_s / FEW], "s", STEADY, f"a thousand rows; {what}"
        ),
        compare(f"growth.data.{MANY}.peak", [many_mib], [few_mib], "MiB", FLAT, f"the process's peak; {what}"),
    ]


def write_rows(folder: Path, count: int) -> None:
    """A file of made-up news as LCSTS has them, no two alike, of 60 to 139 characters."""
    folder.mkdir(parents=True)
    text = "城市的图书馆今天重新开放，读者从清晨起排队入场。" * 6
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for k in range(count):
            row = {"text": f"{k:010}{text[: 50 + k % 80]}", "summary": f"图书馆重新开放 {k}"}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _chapters() -> list[BenchRow]:
    from pardemo.bench.notebook_parts import parts

    ours, peer = parts()
    what = {
        "kernel": "the kernels' start and end",
        "imports": "imports",
        "ranks": "the start of ranks",
        "work": "all else: the work",
    }
    note = (
        "of three chapters, in kernels as Jupyter starts them; ours are forked from a process with the libraries loaded"
    )
    return [
        compare(f"growth.chapters.{part}", ours[part], peer[part], "s", None, f"{told_of}, {note}")
        for part, told_of in what.items()
    ]
