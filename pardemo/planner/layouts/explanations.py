"""Explains layouts and a search's result as text and JSON: time and memory part by part, each with its constants."""

import math
from dataclasses import replace
from typing import Any

from pardemo.planner.estimate import RESERVE
from pardemo.planner.layouts.intervals import beyond_measured, measured_hosts, of_bytes
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.machines import ATTENTION, MEMORY_SHARE
from pardemo.planner.layouts.micro_batch import PARTS
from pardemo.planner.layouts.search import ACROSS, PlannedLayout, SearchResult, search

GB = 1e9
SLOWER = 0.2  # of a card's rate, that some have less than others of their name
FRONT = 5  # layouts shown of the front of time and memory
#: GPUs up to which a job may be one of Transformers' Trainer's.
FINE_TUNED = 16
#: What takes less of each line of a GPU's memory.
_LESS = {
    "logits": "a loss that is fused or made in chunks never has them whole; so does context parallelism (CP)",
    "activations": "take a shorter sequence, or more GPUs for context parallelism (CP), which cuts each sample",
    "gathered parameters": "take more GPUs, or a program that gathers less ahead",
}
Changed = dict[str, tuple[PlannedLayout, PlannedLayout]]


def constants_of_parts(job: Job) -> dict[str, str]:
    """Returns for each part of a step the rates and constants that it is computed from."""
    machine, program, gpu = job.machine, job.program, job.machine.gpu
    measured = "as measured" if gpu.measured else f"{machine.link_share:g} of the rates"
    traffic = "as measured" if gpu.measured else f"{MEMORY_SHARE:g} of the datasheet's"
    within, between = three_digits(machine.rate(2) / 1e9), three_digits(machine.between * machine.link_share / 1e9)
    links = (
        f"{within} GB/s inside a host, {between} GB/s a host's adapters, {measured}; "
        f"{machine.latency_within * 1e6:.0f} and {machine.latency_between * 1e6:.0f} µs for each doubling of ranks"
    )
    layer_s = "none was given"
    if program.layer_s is not None:
        layer_s = f"{program.layer_s:g} s for both passes through a layer, as given"
    matmul_flops = machine.matrix_flops * program.matmul_efficiency * job.matmul_speedup
    attention_flops = machine.attention_flops * program.attention_efficiency
    return {
        "layers as measured": layer_s,
        "matrix multiplications": f"{matmul_flops / 1e12:.0f} TFLOP/s of "
        f"{gpu.flops / 1e12:.0f}: reached alone {gpu.reachable / 1e12:.0f}, in a step {gpu.sustained:g} of that, by "
        f"{program.name} {program.matmul_efficiency:g}; each size as if {job.tile_loss:g} larger",
        "attention": f"{attention_flops / 1e12:.0f} TFLOP/s: {ATTENTION:g} of the products' "
        f"rate, by {program.name} {program.attention_efficiency:g}",
        "memory bandwidth": f"{machine.memory_bytes_per_s / 1e9:.0f} GB/s, {traffic}; an activation passes "
        f"{program.uncut_passes:g} times whole and {program.cut_passes:g} times cut, a layer and pass",
        "launching kernels": f"{1e3 * program.launch_s:g} ms of host time a layer, {1e6 * program.launch_rank_s:g} µs "
        "more for each tensor-parallel rank, where the GPU is quicker",
        "tensor-parallel traffic": links,
        "context-parallel traffic": f"{links}, or for each message of a ring",
        "expert-parallel traffic": links,
        "pipeline messages": f"{1e6 * program.send_s:g} µs of host time each, then {links}",
        "pipeline bubble": "the other stages' time for one micro-batch, by the chunks",
        "data-parallel traffic": f"{links}; {program.reduce_efficiency:g} of it, {program.dp_overlap:g} of the "
        "computation hides it",
        "optimizer": f"{program.state_bytes} bytes of states, {program.gradient_bytes} of gradients a "
        "parameter, through memory",
    }


def three_digits(value: float) -> str:
    """Returns at least three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}" if value > 0 else "0"


def layout_json(planned: PlannedLayout) -> dict[str, Any]:
    """Returns a layout for JSON: its time and memory, part by part, with their intervals of four of five cases."""
    seconds, held = planned.interval, of_bytes(planned.job, planned.layout, planned.peak_bytes)
    return {
        "layout": planned.layout.as_words(), "seconds": planned.seconds, "seconds_low": seconds.low,
        "seconds_high": seconds.high, "interval": seconds.why, "mfu": planned.step.mfu,
        "tokens_per_s": planned.step.tokens_per_s, "peak_bytes": planned.peak_bytes, "peak_bytes_low": held.low,
        "peak_bytes_high": held.high, "fits": planned.has_room, "headroom": planned.headroom,
        "parts": planned.step.parts, "lines": planned.memory.lines,
    }  # fmt: skip


def explained_json(planned: PlannedLayout) -> dict[str, Any]:
    """Returns :func:`layout_json` with the stages, and with the constants that each part is computed from."""
    return layout_json(planned) | {
        "slower_card": slower_card_json(planned), "stages": list(planned.step.stages),
        "fullest_stage": planned.memory.stage, "room_bytes": planned.usable_bytes,
        "reasons": constants_of_parts(planned.job),
    }  # fmt: skip


def explained_text(planned: PlannedLayout) -> str:
    """Returns the layout of :func:`explained_json` for a terminal."""
    from pardemo.tables import text_table

    job, layout, predicted, footprint = planned.job, planned.layout, planned.step, planned.memory
    why, seconds, stages = constants_of_parts(job), planned.interval, sorted(set(predicted.stages))
    rows = [
        ("", "seconds", "share", "from"),
        *((name, f"{value:.3f}", f"{value / predicted.seconds:.1%}", why[name])
          for name in PARTS if (value := predicted.parts.get(name)) is not None),
        ("a step", f"{predicted.seconds:.3f}", "",
         f"{predicted.tokens_per_s:,.0f} tokens/s a GPU, MFU {predicted.mfu:.1%}"),
        ("in 4 of 5 cases", f"{seconds.low:.3f}", "", f"to {seconds.high:.3f}; {seconds.why}"),
    ]  # fmt: skip
    lines = [("", "GB")] + [(name, f"{value / GB:.2f}") for name, value in footprint.lines.items()]
    lines.append((f"stage {footprint.stage}, the fullest", f"{footprint.peak_bytes / GB:.2f}"))
    heading = f"{layout} on {layout.gpus} × {job.machine.gpu.name}, "
    heading += f"{layout.batch} sample{'s' * (layout.batch != 1)} of {job.sequence:,} tokens a step; "
    heading += f"{' or '.join(map(str, stages))} layers a stage" if layout.pp > 1 else f"{job.shape.layers} layers"
    if not job.machine.inside(layout.tp):
        heading += (
            f"\nTP {layout.tp} spans {-(-layout.tp // job.machine.host_gpus)} hosts: each layer's sums go over their "
            f"adapters; half of the published runs of that kind took {ACROSS:g} times as long as predicted and more"
        )
    return "\n".join(
        [heading, "", text_table(rows), *card_line(planned), "", text_table(lines), "", describe_fit(planned)]
    )


def slower_card(planned: PlannedLayout) -> PlannedLayout | None:
    """Returns the layout on a card that multiplies slower by :data:`SLOWER`; None where its rate was measured."""
    machine = planned.job.machine
    if machine.gpu.measured:
        return None
    gpu = replace(machine.gpu, sustained=machine.gpu.sustained * (1 - SLOWER))
    return PlannedLayout(replace(planned.job, machine=replace(machine, gpu=gpu)), planned.layout)


def slower_card_json(planned: PlannedLayout) -> dict[str, Any] | None:
    """Returns the same for JSON: the share that it is slower by, and the seconds of a step then."""
    slower = slower_card(planned)
    return None if slower is None else {"slower_by": SLOWER, "seconds": slower.seconds}


def card_line(planned: PlannedLayout) -> list[str]:
    """Says how much depends on the rate of the card's matrix multiplications, and which command measures it."""
    slower = slower_card(planned)
    if slower is None:
        return []
    rate = planned.job.machine.matrix_flops / 1e12
    return [
        f"if this card's matrix multiplications reach {SLOWER:.0%} less than the {rate:,.0f} TFLOP/s (bf16, in a step) "
        f"that are assumed of {planned.job.machine.gpu.name}: {slower.seconds:.2f} s, "
        f"{slower.seconds / planned.seconds - 1:+.0%}; pardemo plan --measure profile.json measures them there, "
        "--gpu profile.json plans with them"
    ]


def describe_fit(planned: PlannedLayout) -> str:
    """Says in one line whether the fullest GPU has the room."""
    sizes = planned.peak_bytes, planned.job.machine.gpu.memory_bytes, planned.usable_bytes
    needed, capacity, free = (three_digits(value / GB) for value in sizes)
    verdict = "fits" if planned.has_room else "does not fit"
    return f"{needed} GB of {capacity}: {verdict} ({100 * RESERVE:g} % stay free, so there is room for {free})"


def changed_json(best: PlannedLayout, same: PlannedLayout) -> dict[str, Any]:
    """Returns the best layout of a changed job, and the present best one as it then is, for JSON."""
    return {"best": layout_json(best), "same": layout_json(same)}


def search_json(answer: SearchResult, changed: Changed, assumed: dict[str, Any], warning: str | None) -> dict[str, Any]:
    """Returns all of an answer; ``assumed`` as the command says it, ``warning`` as :func:`positions_warning` does."""
    return {
        "assumed": assumed, "warning": warning, "tried": answer.tried, "fitting": answer.fitting,
        "best": [layout_json(candidate) for candidate in answer.best],
        "slower_card": slower_card_json(answer.best[0]) if answer.best else None,
        "front": [layout_json(candidate) for candidate in answer.front], "least": layout_json(answer.least),
        "if": {name: changed_json(*pair) for name, pair in changed.items()},
    }  # fmt: skip


def describe_job(job: Job, assumed: dict[str, Any]) -> str:
    """Returns two lines: the job and its machine, with the options that are defaults; then what is not planned."""
    between = three_digits(assumed["link_bytes_per_s"] * 8 / 1e9)
    hosts, defaults = assumed["hosts"], assumed["defaults"]
    samples = assumed["samples_per_step"]
    link = f", {between} Gbit/s between hosts ({assumed['link']})" if hosts > 1 else ""
    on_hosts = f"{hosts} hosts of {assumed['host_gpus']}" if hosts > 1 else "one host"
    usual = [
        option for option in defaults if option in ("--per-step", "--sequence") or (option == "--hosts" and hosts > 1)
    ]
    left_out = "".join(f"\nnot planned: {clause}" for clause in assumed["not_planned"])
    name = job.shape.name or "model"
    trained = f"full training of {name}"
    if job.frozen:
        lora = assumed["lora"]
        trained = f"LoRA of rank {lora['rank']} on {', '.join(lora['target'])} ({lora['parameters'] / 1e6:.1f}M "
        trained += f"parameters) beside the frozen {name}"
    return (
        f"{trained}, {job.shape.params / 1e9:.1f}B parameters, as {job.program.name} "
        f"{job.program.release}{' ' * bool(job.program.release)}runs it ({job.program.fitted_to})\n"
        f"{assumed['gpus']} × {assumed['gpu']} on {on_hosts}{link}; {samples:,} sample{'s' * (samples != 1)} of "
        f"{job.sequence:,} tokens a step, {job.precision}" + (f" (defaults: {', '.join(usual)})" if usual else "")
    ) + left_out


def positions_warning(answer: SearchResult, model_name: str) -> str | None:
    """Returns a warning if Megatron-LM has no argument for the model's positions; else None."""
    from pardemo.planner.layouts import configurations
    from pardemo.planner.layouts.launch import facts

    model = facts.model_of(configurations.find_configuration(model_name), answer.job.shape, model_name)
    if model.positions != "other":
        return None
    warning = f"warning: Megatron-LM has no argument for {model.kind}'s positions (ALiBi or the like), "
    warning += "which megatron.sh leaves out"
    if any(candidate.layout.cp > 1 for candidate in answer.best):
        warning += f"; context parallelism (CP) there does not run them: {_without_context(answer)}"
    return warning


def _without_context(answer: SearchResult) -> str:
    """Returns the best layout of a program that has no context parallelism."""
    job = answer.job
    try:
        program = job.program.but(supports=job.program.supports - {"cp"})
        best = search(replace(job, program=program), answer.batch, 1).best
    except ValueError:
        best = ()
    return f"the best without is {best[0].layout}, {best[0].seconds:.2f} s" if best else "without it nothing fits"


def search_text(
    answer: SearchResult, changed: Changed, assumed: dict[str, Any], warning: str | None, whole_front: bool = False
) -> str:
    """Writes a search for a terminal: the best layouts, reasons for the first, what it depends on, what takes less."""
    from pardemo.tables import text_table

    lines = [describe_job(answer.job, assumed), f"{answer.tried:,} layouts divide it, {answer.fitting:,} of them fit"]
    if not answer.best:
        least = answer.least
        lines.append(
            f"nothing fits; the least is {least.layout}, {least.peak_bytes / GB:.0f} GB of "
            f"{least.usable_bytes / GB:.0f}: {suggest_savings(least)}"
        )
        return "\n".join(lines)
    rows = [("", "layout", "s a step", "in 4 of 5 cases", "tokens/s/GPU", "MFU", "GB", "free",
             "most of the rest goes to")]  # fmt: skip
    rows += [
        ("" if index else "→", str(planned.layout), f"{planned.seconds:.2f}",
         f"{planned.interval.low:.2f} to {planned.interval.high:.2f}", f"{planned.step.tokens_per_s:,.0f}",
         f"{planned.step.mfu:.1%}", f"{planned.peak_bytes / GB:.0f}", f"{planned.headroom:.0%}", _cost(planned))
        for index, planned in enumerate(answer.best)
    ]  # fmt: skip
    lines += ["", text_table(rows), *describe_trust(answer), ""]
    lines += card_line(answer.best[0])
    lines += [changed_line(name, *pair) for name, pair in changed.items()]
    lines += ["", *_front(answer, whole_front)]
    return "\n".join(lines + ([warning] if warning else []))


def changed_line(name: str, best: PlannedLayout, same: PlannedLayout) -> str:
    """Says what a changed assumption does to the best layout, and which layout is the best then."""
    verdict = f"{same.seconds:.2f} s" if same.has_room else "no longer fits"
    other = "still the best" if best.layout == same.layout else f"then {best.layout}, {best.seconds:.2f} s"
    return f"if {name}: {verdict}; {other}"


def suggest_savings(least: PlannedLayout) -> str:
    """Says what most of the least memory is, and what would take less of it."""
    line = max(least.memory.lines, key=least.memory.lines.__getitem__)
    less = _LESS.get(line, "take more GPUs, which share them, or a GPU with more memory")
    return f"{least.memory.lines[line] / GB:.0f} GB of it are {line}; {less}"


def describe_trust(answer: SearchResult) -> list[str]:
    """Says how far to trust the order: where intervals are from, which layouts are equal, why one is recommended."""
    best, others = answer.best[0], answer.best[1:]
    interval = best.interval
    lines = [f"how far times may be off: {interval.why}"]
    program = answer.job.program
    if program.release and not program.months_ahead and not answer.job.measured:
        lines.append(
            f"constants of release {program.release}; of a newer one the interval is wider: "
            f"--program {program.name}@YY.MM"
        )
    lines += describe_reach(answer)
    near = [candidate for candidate in others if candidate.seconds <= interval.high]
    if near:
        equal = "the first two are" if len(near) == 1 else f"the first {len(near) + 1} are"
        lines.append(f"{equal} equal within that: try them on 20 steps before you commit")
    quicker = min(answer.best, key=lambda candidate: candidate.seconds)
    if quicker is not best and not beyond_measured(quicker.job, quicker.layout):
        lines.append(
            f"{quicker.layout} is predicted quicker, but layouts of its kind (tensor parallel or pipelines over hosts) "
            "have taken longer than predicted"
        )
    if answer.job.machine.gpus <= FINE_TUNED:
        lines.append("as Transformers' Trainer runs the job, with ZeRO or FSDP2, pardemo plan --full says it")
    return lines


def describe_reach(answer: SearchResult) -> list[str]:
    """Says where a search goes beyond the hosts of any published run of its program; nothing where it does not."""
    job, known, best = answer.job, measured_hosts(answer.job.program.name), answer.best[0]
    if known is None or job.machine.hosts <= known[0]:
        return []
    hosts, stage = known
    over = f"{job.machine.hosts} hosts are more than any published run of {job.program.name} had ({hosts}, with a "
    over += f"pipeline stage's ranks over up to {stage}): "
    quickest = min(answer.best, key=lambda candidate: candidate.seconds)
    if beyond_measured(job, best.layout):
        return [f"{over}nobody has shown that {best.layout} scales so far"]
    if beyond_measured(job, quickest.layout):
        return [f"{over}{quickest.layout} is predicted quicker, but nobody has shown that it scales so far"]
    return [f"{over}the first layout's stages stay within that"]


def _front(answer: SearchResult, complete: bool) -> list[str]:
    """Returns how many layouts no other beats in both time and memory, and which: the ends and the middle, or all."""
    from pardemo.tables import text_table

    front = answer.front
    every = complete or len(front) <= FRONT
    shown = front if every else [front[i * (len(front) - 1) // (FRONT - 1)] for i in range(FRONT)]
    left = "" if every else f", {FRONT} of them here (--all shows all)"
    rows = [("layout", "s a step", "GB", "free")]
    rows += [
        (str(planned.layout), f"{planned.seconds:.2f}", f"{planned.peak_bytes / GB:.0f}", f"{planned.headroom:.0%}")
        for planned in shown
    ]
    return [f"{len(front)} layouts are such that none is quicker with less memory{left}:", text_table(rows)]


def _cost(candidate: PlannedLayout) -> str:
    """Returns the two largest parts beside products and attention."""
    useful = {"matrix multiplications", "attention"}
    rest = sorted(((s, name) for name, s in candidate.step.parts.items() if name not in useful), reverse=True)[:2]
    return ", ".join(f"{name} {seconds / candidate.seconds:.0%}" for seconds, name in rest)
