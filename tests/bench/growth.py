"""What happens where there is many times as much: ranks, layers and GPUs of a plan, claims, rows of data.

A row's peer is here mostly what linear growth from a smaller case would take, so that a ratio below 1 says that
something grows faster than what it is given.
"""

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.collectives import all_reduces
from bench.table import PEAK_MIB, BenchRow, compare, on_ranks, process
from pardemo import Ledger, claims, project
from pardemo.book.run import endings, report
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.procedure import job_of
from pardemo.planner.layouts.search import search

RANKS, RING_BYTES, RING_ROUNDS = (2, 4, 8, 16), 1 << 20, 9
GPUS, BATCH, TIMES, PLAN_ROUNDS = 64, 1024, 4, 5
EACH, CHAPTERS, MORE = 100, 10, 10  # claims of a chapter, chapters, times as many
ONE_CHAPTER, REPORT_ROUNDS = 1_000, 3
FEW, MANY, KEPT = 100_000, 1_000_000, 20_000  # rows of a file, rows that are chosen
FLAT, STEADY = 0.95, 0.9  # a peak and a rate that do not grow, but for noise


def rows() -> Iterator[BenchRow]:
    for part in (of_ranks, of_planner, of_claims, of_data):
        yield from part()


def of_ranks() -> Iterator[BenchRow]:
    cores = project.available_cores()
    for ranks in RANKS:
        shared = f"; {ranks} ranks share {cores} cores" if ranks > cores else ""
        note = f"gloo all_reduce of {RING_BYTES >> 10:,} KiB{shared}"
        shape = RING_BYTES, RING_ROUNDS, ("ring", "server", "torch")
        ways = [(f"growth.{way}.n{ranks}", way, "torch", None, note) for way in ("ring", "server")]
        yield from on_ranks(all_reduces, {"": shape}, ways, ranks=ranks)


def of_planner() -> Iterator[BenchRow]:
    model = job_of("llama3-70b", "H100", GPUS, 400.0)
    layers = model.shape.layers
    fewer = replace(model, shape=replace(model.shape, layers=layers // TIMES))
    jobs = {"fewer": fewer, "model": model, "more": replace(model, machine=replace(model.machine, gpus=TIMES * GPUS))}
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    tried = {}
    for _ in range(PLAN_ROUNDS):
        for name, job in jobs.items():
            took, tried[name] = search_s(job)
            seconds[name].append(took)
    for name, ours, peer, what in (
        ("layers", "model", "fewer", f"{GPUS} GPUs: {TIMES} × the seconds of {layers // TIMES} layers"),
        ("gpus", "more", "model", f"{TIMES * GPUS} GPUs: {TIMES} × the seconds of {GPUS} GPUs"),
    ):
        note = f"a search, {layers} layers on {what}; {tried[ours]:,} layouts, there {tried[peer]:,}"
        linear = [TIMES * each for each in seconds[peer]]
        yield compare(f"growth.plan.{name}", seconds[ours], linear, "s", 1.0, note)


def search_s(job: Job) -> tuple[float, int]:
    """Seconds of a search, and the layouts that it looked at."""
    begin = time.perf_counter()
    result = search(job, BATCH)
    return time.perf_counter() - begin, result.tried


def of_claims() -> Iterator[BenchRow]:
    few, many = CHAPTERS * EACH, MORE * CHAPTERS * EACH
    with tempfile.TemporaryDirectory() as folder:
        small, large, one, tenth = (Path(folder, name) for name in ("small", "large", "one", "tenth"))
        small_s, large_s = book(small, CHAPTERS, EACH), book(large, MORE * CHAPTERS, EACH)
        report_s(small)  # its library is loaded once
        reports = [(report_s(large), MORE * report_s(small)) for _ in range(REPORT_ROUNDS)]
        tenth_s, one_s = book(tenth, 1, ONE_CHAPTER // MORE), book(one, 1, ONE_CHAPTER)
    linear = f"{MORE} × the seconds of {few:,} claims in {CHAPTERS} chapters"
    booked = f"{many:,} claims, {EACH} a chapter: {linear}"
    yield compare("growth.ledger", [large_s], [MORE * small_s], "s", STEADY, booked)
    chapter = f"{ONE_CHAPTER:,} claims in one chapter, whose file is written whole at each: {MORE} × the seconds of "
    note = f"{chapter}{ONE_CHAPTER // MORE}"
    yield compare("growth.ledger.one_chapter", [one_s], [MORE * tenth_s], "s", None, note)
    yield compare("growth.report", *zip(*reports, strict=True), "s", STEADY, f"report.html of {many:,}: {linear}")


def book(folder: Path, chapters: int, each: int) -> float:
    """Seconds to book ``each`` claims in so many chapters, each with its file in ``folder``."""
    begin = time.perf_counter()
    for chapter in range(chapters):
        ledger = Ledger(f"{chapter:03}_made_up", folder)
        for k in range(each):
            claim = claims.Claim(
                f"made_up_{chapter}.claim_{k}", f"Claim {k} of chapter {chapter}.", "B", within=0.01,
                because="rounding", source="a paper", evidence="arithmetic",
            )  # fmt: skip
            ledger.check(claim, 100.0, 100.5)
    return time.perf_counter() - begin


def report_s(folder: Path) -> float:
    """Seconds to read the claims in a folder and to write their report."""
    begin = time.perf_counter()
    booked = claims.read(folder)
    ended = [endings.NotebookEnding(name, "ok", 1.0) for name in dict.fromkeys(row["notebook"] for row in booked)]
    report.write_pages(folder, ended, booked)
    return time.perf_counter() - begin


BUILD = f"""{PEAK_MIB}
import json, sys, time
import pardemo.draw.style
from pardemo.headlines.build import build
folder, out, kept = sys.argv[1:]
begin = time.perf_counter()
test = int(kept) // 20
build([folder], out, train=int(kept) - test, test=test)
print(json.dumps([time.perf_counter() - begin, peak_mib()]))
"""


def of_data() -> list[BenchRow]:
    built = {}
    with tempfile.TemporaryDirectory() as folder:
        for count, rounds in ((FEW, 2), (MANY, 1)):
            source = Path(folder, str(count))
            write_rows(source, count)
            runs = [process(BUILD, str(source), str(Path(folder, "out")), str(KEPT)) for _ in range(rounds)]
            built[count] = [median(each) for each in zip(*runs, strict=True)]
    (few_s, few_mib), (many_s, many_mib) = built[FEW], built[MANY]
    what = f"{KEPT:,} rows chosen of {MANY:,}: of {FEW:,}"
    of_both = [1000 * many_s / MANY], [1000 * few_s / FEW]
    return [
        compare(f"growth.data.{MANY}", *of_both, "s", STEADY, f"a thousand rows; {what}"),
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
