"""What ``pardemo plan --search`` prints: what was asked and assumed, the best layouts, and what they depend on."""

from dataclasses import asdict, replace
from typing import Any

from pardemo.planner.layouts.choice.intervals import of_bytes
from pardemo.planner.layouts.choice.search import PlannedLayout, SearchResult, search
from pardemo.planner.layouts.explain import three
from pardemo.planner.layouts.job.job import Job

GB = 1e9
FRONT = 5  # layouts shown of the front of time and memory
Changed = dict[str, tuple[PlannedLayout, PlannedLayout]]


def layout_json(job: Job, candidate: PlannedLayout) -> dict[str, Any]:
    """A layout of a search with its time and memory, and between what they lie in four of five cases, for JSON."""
    seconds = candidate.interval(job)
    held = of_bytes(job, candidate.layout, candidate.memory.peak_bytes)
    return {
        "layout": asdict(candidate.layout), "seconds": candidate.seconds, "seconds_low": seconds.low,
        "seconds_high": seconds.high, "interval": seconds.why, "mfu": candidate.step.mfu,
        "tokens_per_s": candidate.step.tokens_per_s, "peak_bytes": candidate.memory.peak_bytes,
        "peak_bytes_low": held.low, "peak_bytes_high": held.high, "fits": candidate.fits,
        "headroom": candidate.headroom, "parts": candidate.step.parts, "lines": candidate.memory.lines,
    }  # fmt: skip


def as_json(answer: SearchResult, changed: Changed, assumed: dict[str, Any], warning: str | None) -> dict[str, Any]:
    """All of an answer; ``assumed`` as the command says it, ``warning`` as :func:`positions` does."""
    return {
        "assumed": assumed, "warning": warning, "tried": answer.tried, "fitting": answer.fitting,
        "best": [layout_json(answer.job, candidate) for candidate in answer.best],
        "front": [layout_json(answer.job, candidate) for candidate in answer.front],
        "least": layout_json(answer.job, answer.least),
        "if": {
            name: {"best": layout_json(answer.job, best), "same": layout_json(answer.job, same)}
            for name, (best, same) in changed.items()
        },
    }  # fmt: skip


def planned(job: Job, assumed: dict[str, Any]) -> str:
    """Two lines: the job and its machine, with the options that are defaults; then what is not planned."""
    between = three(assumed["link_bytes_per_s"] * 8 / 1e9)
    hosts, each, defaults = assumed["hosts"], assumed["host_gpus"], assumed["defaults"]
    samples = assumed["samples_per_step"]
    link = f", {between} Gbit/s between hosts ({assumed['link']})" if hosts > 1 else ""
    place = f"{hosts} hosts of {each}" if hosts > 1 else "one host"
    usual = [
        option for option in defaults if option in ("--per-step", "--sequence") or (option == "--hosts" and hosts > 1)
    ]
    left_out = "".join(f"\nnot planned: {told}" for told in assumed["not_planned"])
    name = job.shape.name or "model"
    trained = f"full training of {name}"
    if job.frozen:
        lora = assumed["lora"]
        trained = f"LoRA of rank {lora['rank']} on {', '.join(lora['target'])} ({lora['parameters'] / 1e6:.1f}M "
        trained += f"parameters) beside the frozen {name}"
    return (
        f"{trained}, {job.shape.params / 1e9:.1f}B parameters, as {job.stack.name} "
        f"runs it ({job.stack.about})\n"
        f"{assumed['gpus']} × {assumed['gpu']} on {place}{link}; {samples:,} sample{'s' * (samples != 1)} of "
        f"{job.sequence:,} tokens a step, {job.precision}" + (f" (defaults: {', '.join(usual)})" if usual else "")
    ) + left_out


def positions(answer: SearchResult, model_name: str) -> str | None:
    """A warning where Megatron-LM has no argument for the model's positions; None where it has."""
    from pardemo.planner.layouts.launch import facts
    from pardemo.planner.layouts.model import sizes

    model = facts.of(sizes.find(model_name), answer.job.shape, model_name)
    if model.positions != "other":
        return None
    warning = f"warning: Megatron-LM has no argument for {model.kind}'s positions (ALiBi or the like), "
    warning += "which megatron.sh leaves out"
    if any(candidate.layout.cp > 1 for candidate in answer.best):
        warning += f"; context parallelism (CP) there does not run them: {_without_context(answer)}"
    return warning


def _without_context(answer: SearchResult) -> str:
    """The best layout of a program that has no context parallelism."""
    job = answer.job
    try:
        best = search(replace(job, stack=job.stack.but(can=job.stack.can - {"cp"})), answer.batch, 1).best
    except ValueError:
        best = ()
    return f"the best without is {best[0].layout}, {best[0].seconds:.2f} s" if best else "without it nothing fits"


def as_text(
    answer: SearchResult, changed: Changed, assumed: dict[str, Any], warning: str | None, whole_front: bool = False
) -> str:
    """A search for a terminal: the best layouts, why the first one, what it depends on, what takes less memory."""
    from pardemo.tables import text_table

    lines = [planned(answer.job, assumed), f"{answer.tried:,} layouts divide it, {answer.fitting:,} of them fit"]
    if not answer.best:
        least = answer.least
        lines.append(
            f"nothing fits; the least is {least.layout}, {least.memory.peak_bytes / GB:.0f} GB of "
            f"{least.room / GB:.0f}: {would_fit(least)}"
        )
        return "\n".join(lines)
    rows = [("", "layout", "s a step", "in 4 of 5 cases", "tokens/s/GPU", "MFU", "GB", "free",
             "most of the rest goes to")]  # fmt: skip
    for place, candidate in enumerate(answer.best):
        interval = candidate.interval(answer.job)
        rows.append((
            "→" if place == 0 else "", str(candidate.layout), f"{candidate.seconds:.2f}",
            f"{interval.low:.2f} to {interval.high:.2f}",
            f"{candidate.step.tokens_per_s:,.0f}", f"{candidate.step.mfu:.1%}",
            f"{candidate.memory.peak_bytes / GB:.0f}", f"{candidate.headroom:.0%}", _cost(candidate),
        ))  # fmt: skip
    lines += ["", text_table(rows), *trust(answer), ""]
    for name, (best, same) in changed.items():
        lines.append(changed_line(name, best, same))
    lines += ["", *_front(answer, whole_front)]
    return "\n".join(lines + ([warning] if warning else []))


def changed_line(name: str, best: PlannedLayout, same: PlannedLayout) -> str:
    """What a changed assumption does to the best layout, and which one is the best then."""
    verdict = f"{same.seconds:.2f} s" if same.fits else "no longer fits"
    other = "still the best" if best.layout == same.layout else f"then {best.layout}, {best.seconds:.2f} s"
    return f"if {name}: {verdict}; {other}"


#: What takes less of each line of a GPU's memory.
_LESS = {
    "logits": "a loss that is fused or made in chunks never has them whole; so does context parallelism (CP)",
    "activations": "take a shorter sequence, or more GPUs for context parallelism (CP), which cuts each sample",
    "gathered parameters": "take more GPUs, or a program that gathers less ahead",
}


def would_fit(least: PlannedLayout) -> str:
    """What most of the least memory is, and what would take less of it."""
    line = max(least.memory.lines, key=least.memory.lines.__getitem__)
    less = _LESS.get(line, "take more GPUs, which share them, or a GPU with more memory")
    return f"{least.memory.lines[line] / GB:.0f} GB of it are {line}; {less}"


#: GPUs up to which a job may be one of Transformers' Trainer's.
FINE_TUNED = 16


def trust(answer: SearchResult) -> list[str]:
    """How far to trust the order: where intervals are from, which layouts are equal, why the arrow stands there."""
    first, others = answer.best[0], answer.best[1:]
    interval = first.interval(answer.job)
    lines = [f"how far times may be off: {interval.why}"]
    near = [candidate for candidate in others if candidate.seconds <= interval.high]
    if near:
        equal = "the first two are" if len(near) == 1 else f"the first {len(near) + 1} are"
        lines.append(f"{equal} equal within that: try them on 20 steps before you commit")
    quicker = min(answer.best, key=lambda candidate: candidate.seconds)
    if quicker is not first:
        lines.append(
            f"{quicker.layout} is predicted quicker, but layouts of its kind (tensor parallel or pipelines over hosts) "
            "have taken longer than predicted"
        )
    if answer.job.machine.gpus <= FINE_TUNED:
        lines.append("as Transformers' Trainer runs the job, with ZeRO or FSDP2, pardemo plan --full says it")
    return lines


def _front(answer: SearchResult, whole: bool) -> list[str]:
    """How many layouts no other beats in both time and memory, and which: the ends and the middle, or all."""
    from pardemo.tables import text_table

    front = answer.front
    shown = (
        front if whole or len(front) <= FRONT else [front[i * (len(front) - 1) // (FRONT - 1)] for i in range(FRONT)]
    )
    left = f", {len(shown)} of them here (--all shows all)" if len(shown) < len(front) else ""
    rows = [("layout", "s a step", "GB", "free")]
    rows += [
        (
            str(candidate.layout),
            f"{candidate.seconds:.2f}",
            f"{candidate.memory.peak_bytes / GB:.0f}",
            f"{candidate.headroom:.0%}",
        )
        for candidate in shown
    ]
    return [f"{len(front)} layouts are such that none is quicker with less memory{left}:", text_table(rows)]


def _cost(candidate: PlannedLayout) -> str:
    """The two largest parts beside products and attention."""
    useful = {"matrix multiplications", "attention"}
    rest = sorted(
        (n for n in candidate.step.parts if n not in useful), key=candidate.step.parts.__getitem__, reverse=True
    )[:2]
    return ", ".join(f"{name} {candidate.step.parts[name] / candidate.seconds:.0%}" for name in rest)
