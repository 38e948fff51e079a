"""Where a step's time and a GPU's memory go, part by part, and which constant says so."""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from typing import Any

from pardemo.planner.layouts.intervals import of_bytes, of_seconds
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check, recomputation
from pardemo.planner.layouts.machines import ATTENTION, MEMORY_SHARE
from pardemo.planner.layouts.memory import Memory, memory
from pardemo.planner.layouts.micro_batch import PARTS
from pardemo.planner.layouts.published.against import ACROSS, RESERVE, room
from pardemo.planner.layouts.search import PlannedLayout, SearchResult, search
from pardemo.planner.layouts.step import idle_stages, step


def parse(text: str, job: Job, batch: int | None = None) -> Layout:
    """``tp=8,pp=4,micro_batch=2,…``: the fields of :class:`Layout`; what is left out follows from GPUs and batch.

    Or the layout as a search prints it.

    Raises:
        ValueError: a word that is no field of a layout, or a layout that cannot be run.
    """
    kinds = {field.name: str(getattr(field.type, "__name__", field.type)) for field in fields(Layout)}
    read: dict[str, Callable[[str], Any]] = {"bool": _truth, "int": int, "tuple": _words}
    values: dict[str, Any] = {}
    if "=" not in text:
        text = _fields_of(text)
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        if name in values:
            raise ValueError(f"{name} is said twice in {text!r}")
        if name == "recompute" and "modules" not in values:
            values |= recomputation(value)
            continue
        if name not in kinds:
            raise ValueError(f"no {name!r} in a layout; there are {', '.join(kinds)}, as tp=8,pp=4")
        try:
            values[name] = read.get(kinds[name], str)(value)
        except ValueError:
            raise ValueError(
                f"{word!r}: {name} must be {'yes or no' if kinds[name] == 'bool' else 'a number'}"
            ) from None
    layout = Layout(**values)
    if "dp" not in values:
        others = layout.tp * layout.cp * layout.pp
        layout = layout.but(dp=max(1, job.machine.gpus // others))
    each = layout.dp * layout.micro_batch
    divides = batch is None or batch % each == 0
    if batch and "accumulation" not in values:  # one that every schedule takes, where the batch is told of below
        layout = layout.but(accumulation=batch // each if divides else layout.pp)
    check(
        layout, job.shape, job.machine.gpus, job.sequence, job.stack.ends_as_layers
    )  # first: it may be a wrong degree that does not divide
    if not divides:
        raise ValueError(f"{batch} samples a step do not divide by DP {layout.dp} × {layout.micro_batch} samples")
    if batch and layout.batch != batch:
        raise ValueError(
            f"{layout} has {layout.batch} samples a step, and --per-step says {batch}; leave one of them out"
        )
    if lacking := job.stack.lacks(layout):
        raise ValueError(
            f"{job.stack.name} has no {', no '.join(lacking)}; it has {', '.join(sorted(job.stack.can))} (--program)"
        )
    if idle := idle_stages(job, layout):
        raise ValueError(f"{job.stack.name} leaves {idle} of PP {layout.pp} stages without anything; take fewer")
    return layout


def _fields_of(printed: str) -> str:
    """``TP8 PP4 DP2 zero1/8 1×32 v5 recompute full`` -> ``tp=8,pp=4,…``; words that are none stay as they are."""
    words, fields = printed.split(), []
    while words:
        word = words.pop(0)
        if degree := re.fullmatch(r"(TP|CP|PP|DP|EP|ETP)(\d+)", word):
            fields.append(f"{degree[1].lower()}={degree[2]}")
            if degree[1] == "TP" and int(degree[2]) > 1:
                fields.append("sequence_parallel=yes")
        elif shared := re.fullmatch(r"(zero[123])(?:/(\d+))?", word):
            fields.append(f"sharding={shared[1]}" + (f",shard_group={shared[2]}" if shared[2] else ""))
        elif batch := re.fullmatch(r"(\d+)[×x](\d+)", word):
            fields.append(f"micro_batch={batch[1]},accumulation={batch[2]}")
        elif chunks := re.fullmatch(r"v(\d+)", word):
            fields.append(f"chunks={chunks[1]}")
        elif word in ("recompute", "context", "schedule", "offload") and words:
            fields.append(f"{word}={words.pop(0)}")
        else:
            fields.append(word)
    return ",".join(fields)


def _words(value: str) -> tuple[str, ...]:
    return tuple(filter(None, value.split("+")))


def _truth(value: str) -> bool:
    words = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}
    if value.lower() not in words:
        raise ValueError(f"neither yes nor no: {value!r}")
    return words[value.lower()]


def reasons(job: Job) -> dict[str, str]:
    """For each part of a step: the rates and constants that it is computed from."""
    machine, stack, gpu = job.machine, job.stack, job.machine.gpu
    measured = "as measured" if gpu.measured else f"{machine.link_share:g} of the rates"
    within, between = three(machine.rate(2) / 1e9), three(machine.between * machine.link_share / 1e9)
    links = (
        f"{within} GB/s inside a host, {between} GB/s a host's adapters, {measured}; "
        f"{machine.latency_within * 1e6:.0f} and {machine.latency_between * 1e6:.0f} µs for each doubling of ranks"
    )
    layer_seconds = (
        "none was given" if stack.layer_s is None else f"{stack.layer_s:g} s for both passes through a layer, as given"
    )
    return {
        "layers as measured": layer_seconds,
        "matrix multiplications": f"{machine.matrix_flops * stack.products * job.rate / 1e12:.0f} TFLOP/s of "
        f"{gpu.flops / 1e12:.0f}: reached alone {gpu.reachable / 1e12:.0f}, in a step {gpu.sustained:g} of that, by "
        f"{stack.name} {stack.products:g}; each size as if {job.small:g} larger",
        "attention": f"{machine.attention_flops * stack.attention / 1e12:.0f} TFLOP/s: {ATTENTION:g} of the products' "
        f"rate, by {stack.name} {stack.attention:g}",
        "memory bandwidth": f"{machine.memory_bytes_per_s / 1e9:.0f} GB/s, "
        + ("as measured" if gpu.measured else f"{MEMORY_SHARE:g} of the datasheet's")
        + "; an "
        f"activation passes {stack.whole:g} times whole and {stack.cut:g} times cut, a layer and pass",
        "launching kernels": f"{1e3 * stack.launch_s:g} ms of host time a layer, {1e6 * stack.launch_rank_s:g} µs more "
        "for each tensor-parallel rank, where the GPU is quicker",
        "tensor-parallel traffic": links,
        "context-parallel traffic": f"{links}, or for each message of a ring",
        "expert-parallel traffic": links,
        "pipeline messages": f"{1e6 * stack.send_s:g} µs of host time each, then {links}",
        "pipeline bubble": "the other stages' time for one micro-batch, by the chunks",
        "data-parallel traffic": f"{links}; {stack.reduce_share:g} of it, {stack.hidden:g} of the computation hides it",
        "optimizer": f"{stack.state} bytes of states, {stack.gradient} of gradients a parameter, through memory",
    }


def three(value: float) -> str:
    """At least three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}" if value > 0 else "0"


def explained_json(job: Job, layout: Layout) -> dict[str, Any]:
    """Seconds and bytes part by part."""
    predicted, footprint = step(job, layout), memory(job, layout)
    seconds = of_seconds(job, layout, predicted.seconds)
    held = of_bytes(job, layout, footprint.peak_bytes)
    return {
        "layout": asdict(layout), "seconds": predicted.seconds, "seconds_low": seconds.low,
        "seconds_high": seconds.high, "interval": seconds.why, "mfu": predicted.mfu,
        "tokens_per_s": predicted.tokens_per_s,
        "parts": {name: predicted.parts[name] for name in PARTS if name in predicted.parts},
        "stages": list(predicted.stages), "lines": footprint.lines,
        "peak_bytes": footprint.peak_bytes, "peak_bytes_low": held.low, "peak_bytes_high": held.high,
        "room_bytes": room(job), "fits": footprint.peak_bytes <= room(job),
        "fullest_stage": footprint.stage, "reasons": reasons(job),
    }  # fmt: skip


def explained_text(job: Job, layout: Layout) -> str:
    """The same for a terminal."""
    from pardemo.tables import text_table

    predicted, footprint, why = step(job, layout), memory(job, layout), reasons(job)
    rows = [("", "seconds", "share", "from")]
    for name in PARTS:
        if name in predicted.parts:
            value = predicted.parts[name]
            rows.append((name, f"{value:.3f}", f"{value / predicted.seconds:.1%}", why[name]))
    rows.append(
        (
            "a step",
            f"{predicted.seconds:.3f}",
            "",
            f"{predicted.tokens_per_s:,.0f} tokens/s a GPU, MFU {predicted.mfu:.1%}",
        )
    )
    seconds = of_seconds(job, layout, predicted.seconds)
    rows.append(("in 4 of 5 cases", f"{seconds.low:.3f}", "", f"to {seconds.high:.3f}; {seconds.why}"))
    lines = [("", "GB")] + [(name, f"{value / 1e9:.2f}") for name, value in footprint.lines.items()]
    lines.append((f"stage {footprint.stage}, the fullest", f"{footprint.peak_bytes / 1e9:.2f}"))
    stages = sorted(set(predicted.stages))
    heading = f"{layout} on {layout.gpus} × {job.machine.gpu.name}, "
    heading += f"{layout.batch} sample{'s' * (layout.batch != 1)} of {job.sequence:,} tokens a step; "
    heading += f"{' or '.join(map(str, stages))} layers a stage" if layout.pp > 1 else f"{job.shape.layers} layers"
    if not job.machine.inside(layout.tp):
        hosts = -(-layout.tp // job.machine.host_gpus)
        heading += (
            f"\nTP {layout.tp} spans {hosts} hosts: each layer's sums go over their adapters; half of the published "
        )
        heading += f"runs of that kind took {ACROSS:g} times as long as predicted and more"
    return "\n".join([heading, "", text_table(rows), "", text_table(lines), "", fitting(job, footprint)])


def fitting(job: Job, footprint: Memory) -> str:
    """One line: whether the fullest GPU has the room."""
    needed, capacity, free = (
        three(value / 1e9) for value in (footprint.peak_bytes, job.machine.gpu.memory_bytes, room(job))
    )
    verdict = "fits" if footprint.peak_bytes <= room(job) else "does not fit"
    return f"{needed} GB of {capacity}: {verdict} ({100 * RESERVE:g} % stay free, so there is room for {free})"


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


def search_json(answer: SearchResult, changed: Changed, assumed: dict[str, Any], warning: str | None) -> dict[str, Any]:
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
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.launch import facts

    model = facts.of(configurations.find(model_name), answer.job.shape, model_name)
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


def search_text(
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
