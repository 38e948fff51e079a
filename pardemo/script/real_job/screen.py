"""Writes the terminal report of ``pardemo compare``, which begins with the first difference."""

from collections import Counter
from collections.abc import Iterable

from pardemo.script.blocks import Line, Lines, Section, Table, report_screen
from pardemo.script.real_job.comparison import TRACE, JobComparison
from pardemo.script.real_job.mismatches import CallMismatch, mismatch_text
from pardemo.script.words import at_line, count_text
from pardemo.tables import amount
from pardemo.world.errors import ranks_text

#: Rows of a table on the screen.
ROWS = 12


def comparison_screen(compared: JobComparison, folder: str) -> str:
    """Writes the report of a comparison for a terminal; ``folder`` is the rehearsal's."""
    read = [
        count_text(number, noun)
        for number, noun in (
            (len(compared.job.recorders), "flight recorder dump"), (len(compared.job.traces), "trace"),
            (len(compared.job.memory), "memory snapshot"), (len(compared.job.steps), "logged step"),
        ) if number
    ]  # fmt: skip
    without_sizes = "kinds, however often they repeat (bytes and dtypes: --same-size)"
    by = "kinds, bytes and dtypes" if compared.sizes else without_sizes
    head = f"{', '.join(read)} beside {folder}, a rehearsal on {count_text(compared.rehearsal.ranks, 'rank')}"
    parts = (_standstill, _not_predicted, _exposed, _waits, _memory, _logged, _machine)
    sections = [_first(compared, by), *(part(compared) for part in parts)]
    return report_screen(head, sections)


def _first(compared: JobComparison, by: str) -> Section:
    lines: list[Line] = []
    for name, result in compared.mismatches.items():
        roles = ", ".join(result.compared) or "no group that both have"
        lines.append(f"{name}: {count_text(result.calls, 'call')}, compared by {by}: {roles}")
        for ranks, mismatch in _same_place(result.differing):
            lines.append(
                f"{ranks_text(ranks)}, call {mismatch.number + 1} of {mismatch.role}: {mismatch_text(mismatch)}"
            )
        for ranks, mismatch in _same_place(each for each in result.first.values() if each.repeats):
            lines.append(
                f"{ranks_text(ranks)}: these kinds in this order, but repeated another number of times; first in call "
                f"{mismatch.number + 1} of {mismatch.role}: {mismatch_text(mismatch)}"
            )
        if result.unknown:
            lines.append(
                f"not compared: {count_text(result.unknown, 'call')} of groups whose ranks the files do not say"
            )
    if not compared.mismatches:
        return Section("first", "First difference", "no file has calls: a flight recorder's dump or a trace does")
    different = {each.rank for result in compared.mismatches.values() for each in result.differing}
    any_compared = any(result.compared for result in compared.mismatches.values())
    none = "none: every rank calls what was rehearsed" if any_compared else "nothing was compared"
    lead = f"{ranks_text(sorted(different))} of the job" if different else none
    return Section("first", "First difference", lead, [Lines(lines)])


def _same_place(mismatches: Iterable[CallMismatch]) -> list[tuple[list[int], CallMismatch]]:
    """Returns the mismatches in order, one for all ranks with the same line and the same call of the rehearsal."""
    by: dict[tuple, list[CallMismatch]] = {}
    for each in mismatches:
        call, there = each.call, each.expected
        key = (each.role, call and (call.kind, call.line), there and (there.kind, there.line))
        by.setdefault(key, []).append(each)
    return [(sorted(each.rank for each in group), group[0]) for group in by.values()]


def _standstill(compared: JobComparison) -> Section:
    if compared.standstill is None:
        return Section("standstill", "Calls that are not over")
    lines = compared.standstill.details.splitlines()
    lead = f"{compared.standstill.line} (counted from the first call that all dumps have)"
    return Section("standstill", "Calls that are not over", lead, [Lines(lines, "p")])


def _not_predicted(compared: JobComparison) -> Section:
    rows: list[tuple[str, ...]] = []
    leads = []
    for name, result in compared.mismatches.items():
        for how, traffic in (("not predicted", result.more), ("left out", result.fewer)):
            for (kind, role, line), calls in sorted(traffic.items(), key=lambda item: -item[1].nbytes):
                ranks = ranks_text(sorted(calls.ranks)).split(" ", 1)[1]
                rows.append((how, kind, role, str(calls.calls), amount(calls.nbytes), ranks, line or "–", name))
        if more := result.more.values():
            nbytes = amount(sum(calls.nbytes for calls in more))
            leads.append(f"{name}: {count_text(sum(calls.calls for calls in more), 'call')}, {nbytes}")
    head = ("", "collective", "group", "calls", "bytes", "ranks", "line", "in")
    return Section("traffic", "Not predicted", "; ".join(leads), [Table(head, rows, most=ROWS)] if rows else [])


def _exposed(compared: JobComparison) -> Section:
    timings = {rank: record.timing for rank, record in sorted(compared.job.traces.items()) if record.timing}
    rows, by = [], Counter[tuple[str, str]]()
    for rank, timing in timings.items():
        idle = timing.span - timing.computes - timing.exposed
        parts = (timing.span, timing.computes, timing.communicates, timing.exposed, idle)
        rows.append((str(rank), *(f"{1e3 * seconds:.1f}" for seconds in parts), f"{timing.overlap:.1%}"))
        by.update(compared.job.traces[rank].exposed_by())  # type: ignore[arg-type]
    head = ("rank", "traced ms", "computes", "communicates", "exposed", "idle", "hidden")
    lines = [
        (kind or "–", line or "–", f"{1e3 * seconds:.1f}") for (kind, line), seconds in by.most_common() if seconds
    ]
    worst = max(timings, key=lambda rank: timings[rank].exposed, default=None)
    if worst is None:
        return Section("exposed", "Exposed communication")
    unit = "kernel of its GPU" if timings[worst].of_device else "operator of its processor"
    lead = f"rank {worst} communicates for {1e3 * timings[worst].exposed:.1f} ms while no {unit} computes"
    below = [Table(("collective", "line", "exposed ms, all ranks"), lines, most=ROWS)] if lines else []
    return Section("exposed", "Exposed communication", lead, [Table(head, rows, most=ROWS), *below])


def _waits(compared: JobComparison) -> Section:
    if not compared.waits:
        return Section("waits", "Who waits for whom")
    name = TRACE if TRACE in compared.waits and compared.waits[TRACE].by_lengths else next(iter(compared.waits))
    waits = compared.waits[name]
    rows = []
    for rank in sorted({*waits.last, *waits.waited_s}):
        by = Counter(waits.waited_s.get(rank, {}))
        others = ", ".join(f"{1e3 * seconds:.1f} for rank {last}" for last, seconds in by.most_common(3) if seconds)
        caused = sum(waited.get(rank, 0.0) for waited in waits.waited_s.values())
        rows.append((str(rank), str(waits.last[rank]), f"{1e3 * sum(by.values()):.1f}", f"{1e3 * caused:.1f}", others))
    how = "their kernels' lengths" if waits.by_lengths else "the times at which ranks call them, by their hosts' clocks"
    lead = f"{count_text(waits.collectives, 'collective')} of the {name}s, by {how}"
    if (longest := waits.longest) is not None:
        lead += (f"; longest: rank {longest.rank} waits {1e3 * longest.seconds:.1f} ms for rank {longest.last} in "
                 f"{longest.kind}{at_line(longest.line)}")  # fmt: skip
    head = ("rank", "came last", "waited ms", "others waited ms", "waited ms, most")
    rows.sort(key=lambda row: -float(row[3]))
    return Section("waits", "Who waits for whom", lead, [Table(head, rows, most=ROWS)])


def _memory(compared: JobComparison) -> Section:
    memory = compared.memory
    if memory is None:
        return Section("memory", "Memory")
    rows = []
    for kind, planned, job in memory.kinds:
        beyond = "–" if planned is None else f"{'−' * (job < planned)}{amount(abs(job - planned))}"
        rows.append((kind, "–" if planned is None else amount(planned), amount(job), beyond))
    against = f", beside {memory.plan}" if memory.plan else "; for a plan beside it measure with --full-size"
    lead = f"rank {memory.rank} holds {amount(memory.peak_bytes)} at its peak{against}"
    return Section("memory", "Memory", lead, [Table(("kind", "planned", "job", "beyond"), rows)])


def _logged(compared: JobComparison) -> Section:
    logged, parts = compared.logged, []
    for name, text, unit in (
        ("steps", "{:.0f} steps", 1.0), ("step_s", "{:.4g} s each (median)", 1.0),
        ("slowest_s", "the slowest {:.4g} s", 1.0), ("memory_bytes", "{:.4g} GiB at most", 2**30),
        ("tflops", "{:.1f} TFLOP/s a GPU", 1.0),
        ("tokens_per_s", "{:,.0f} tokens/s", 1.0), ("first_loss", "loss {:.4g} at first", 1.0),
        ("last_loss", "{:.4g} at last", 1.0),
    ):  # fmt: skip
        if (value := logged.get(name)) is not None:
            parts.append(text.format(value / unit))
    if compared.rehearsal.step_s and logged.get("step_s"):
        parts.append(f"{compared.rehearsal.step_s:.4g} s a step were predicted")
    return Section("log", "The log", ", ".join(parts))


def _machine(compared: JobComparison) -> Section:
    rows = [
        (rate.kind, "between nodes" if rate.between else "inside a node", f"{rate.bytes_per_s / 1e9:.3g}",
         str(rate.collectives)) for rate in compared.rates
    ]  # fmt: skip
    flops = compared.product_flops
    parts = [f"large matrix multiplications reach {flops / 1e12:.4g} TFLOP/s"] if flops else []
    parts += ["collectives reach, over each link"] if rows else []
    table = [Table(("collective", "where", "GB/s", "of"), rows)] if rows else []
    return Section("machine", "What this machine reaches", "; ".join(parts), table)
