"""Plans a script's parallelism at full size with the planner: planned, not measured.

A recognised parallelism becomes a layout of the planner's, with the script's own bytes for each parameter; DeepSpeed's
stages are a dry run of its engine with the script's own settings.
"""

import contextlib
import logging
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pardemo.meters.snapshot import Block
from pardemo.script.runtime.call_sites import ROOT
from pardemo.script.step.parallelism import (
    MEGATRON,
    Fsdp1Options,
    Fsdp2Options,
    Parallelism,
    SeveralModels,
    ZeroOptions,
)
from pardemo.script.step.rank_trace import RankTrace
from pardemo.script.step.script_memory import block_changes
from pardemo.script.step.summary import Summary
from pardemo.script.words import count_text

if TYPE_CHECKING:  # the planner of layouts is loaded by those who ask it
    from pardemo.planner.layouts.layout import Layout
    from pardemo.planner.layouts.shape import Shape


#: Each line of a plan, and the kind that a measurement calls it. What has none is no tensor of the script.
MEASURED_AS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer states": "optimizer states",
    "gathered parameters": "gathered", "activations": "activations", "logits": "logits",
    "communication buffers": "communication buffers", "temporaries": "temporaries",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """``--full-size MODEL`` with ``--gpus``, ``--sequence``, ``--micro-batch``: None is what the script has."""

    model: str
    shape: "Shape"
    gpus: int | None = None
    sequence: int | None = None
    micro_batch: int | None = None


def full_size_question(
    model: str | None, gpus: int | None = None, sequence: int | None = None, micro_batch: int | None = None
) -> Question | None:
    """Reads the question from the options; None where there is none.

    Raises:
        ValueError: no such model, or numbers without one; said before anything runs.
    """
    if model is None:
        given = {"--gpus": gpus, "--sequence": sequence, "--micro-batch": micro_batch}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} is of the model at full size: say which, as --full-size llama3-8b")
        return None
    from pardemo.planner.layouts import configurations

    return Question(
        model, configurations.shape_of_config(configurations.find_configuration(model)), gpus, sequence, micro_batch
    )


def answer(question: Question, summary: Summary, traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Makes the plan that stands beside the measurement.

    Returns:
        ``planned`` True; ``model``, ``gpus``, ``peak_bytes``, ``kinds`` (bytes by kind of the fullest GPU),
        ``measured`` (by kind the bytes at the small run's peak and the most in its step), ``taken_over`` from the
        script, ``assumed``, ``command`` of ``pardemo plan`` for what is nearest to it; ``why_not``, and no bytes, where
        the planner has no counterpart.
    """
    fullest = next(trace for trace in traces if trace.rank == summary.memory["rank"])
    peak, most = summary.memory["kinds"], most_by_kind(fullest.memory.blocks)
    at_small_size = {line: {"peak": peak.get(kind, 0), "most": most.get(kind, 0)} for line, kind in MEASURED_AS.items()}
    result: dict[str, Any] = {
        "planned": True, "model": question.model, "gpus": question.gpus or summary.ranks, "peak_bytes": None,
        "kinds": {}, "measured": at_small_size, "taken_over": [], "assumed": [], "command": "", "why_not": "",
    }  # fmt: skip
    plan: Callable[..., dict[str, Any]] = _planned_layout
    if any(parallelism.kind.startswith("DeepSpeed") for parallelism in summary.parallelism):
        plan = _planned_deepspeed
    try:
        planned = plan(question, summary, traces, fullest)
    except NoCounterpart as why:
        return result | {"why_not": str(why)}
    except ValueError as wrong:  # the planner's own: heads that do not divide, a sequence that is too long
        return result | {"why_not": f"the planner refuses it: {wrong}"}
    order = [*MEASURED_AS, *planned["kinds"]]
    kinds = {kind: round(planned["kinds"].get(kind, 0.0)) for kind in dict.fromkeys(order)}
    kinds = {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
    return result | planned | {"kinds": kinds, "peak_bytes": sum(kinds.values())}


def most_by_kind(blocks: Sequence[Block]) -> Mapping[str, int]:
    """The most bytes of each kind at one time of the followed step; others may have theirs at other times."""
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, kind, nbytes in block_changes(blocks):
        alive[kind] += nbytes
        most[kind] = max(most[kind], alive[kind])
    return most


HALF = ("bfloat16", "float16")
#: Parallelisms that share a batch, and maybe the model's states.
DATA = ("DDP", "FSDP2", "HSDP", "FSDP1")
#: Whose activations are taken: torch's own parallelism, in 16 bits.
PROGRAM = "torchtitan"
LOGITS = {2: 14, 4: 12}  # bytes of a token and word: in 16 bits, in 32, their log-softmax, its gradient, and both ways


class NoCounterpart(Exception):
    """Raised where the planner has nothing like the script; the message says what in one line."""


def refuse(unlike: object, why: str) -> None:
    """Raises :class:`NoCounterpart` where the script is unlike anything that the planner has.

    Raises:
        NoCounterpart: it is.
    """
    if unlike:
        raise NoCounterpart(why)


def _planned_layout(
    question: Question, summary: Summary, traces: Sequence[RankTrace], fullest: RankTrace
) -> dict[str, Any]:
    """Plans the fullest GPU's bytes by kind; also returns assumptions and the planner's own command.

    Raises:
        NoCounterpart: the planner's layouts have nothing like it.
        ValueError: the layout cannot be run with the model or the GPUs.
    """
    from pardemo.planner import hardware
    from pardemo.planner.layouts import layout
    from pardemo.planner.layouts.job import Job
    from pardemo.planner.layouts.machines import Machine
    from pardemo.planner.layouts.memory import predict_memory
    from pardemo.planner.layouts.programs import find_program

    trained = trained_of(fullest, summary)
    of_rank = [parallelism for parallelism in summary.parallelism if fullest.rank in parallelism.ranks]
    chosen, data = _degrees(of_rank, summary, question)
    samples, sequence = tokens(question, traces, chosen.cp)
    chosen = chosen.but(micro_batch=samples, recompute=recomputed(trained))
    gpus = question.gpus or summary.ranks
    layout.check_layout(chosen, question.shape, gpus, sequence)
    compute, how = _computed_in(fullest, data)
    weight, gradient = trained["weight"], trained["gradient"] or trained["weight"]
    program = find_program(PROGRAM).but(
        weight_bytes=weight, gradient_bytes=gradient, state_bytes=trained["state"], logit_bytes=LOGITS[compute]
    )
    job = Job(question.shape, Machine(hardware.gpu("H100"), gpus, min(gpus, 8)), program, sequence)
    plan = predict_memory(job, chosen)
    kinds = dict(plan.lines)
    kinds["activations"] *= compute / 2  # the planner's are of 16 bits
    if data is not None and data.kind != "DDP":
        moved = 2 if set(_gathered_in(data) or [f"float{8 * compute}"]) <= set(HALF) else 4
        root = question.shape.embedding_params + (0 if question.shape.tied else question.shape.head_params)
        kinds["gathered parameters"] *= moved / 2
        if chosen.pp == 1 and ROOT in data.wraps:
            kinds["gathered parameters"] += moved * root / chosen.tp
            layers = "the layer that runs and the next are gathered, and the root's embedding and head"
        else:
            layers = "the layer that runs and the next are gathered" if chosen.pp == 1 else "stages stay gathered"
    else:
        layers = ""
    assumed = [
        f"activations as {PROGRAM} keeps them, with attention that is fused; gradients are whole at the peak",
        "the program's own: CUDA, nccl and what the allocator wastes",
    ]
    elements = kinds["parameters"] / weight
    if data is not None and data.kind == "DDP" and not trained["bucket_view"]:
        kinds["communication buffers"] = gradient * elements
    if compute == 2 < weight and fullest.model["computed_in"]:
        cast = 2 * max(
            0.0, elements - question.shape.embedding_params / chosen.tp * (chosen.pp == 1 and not question.shape.tied)
        )
        kinds["activations"] += cast
        assumed.append("autocast's 16-bit copies of the weights stay from forward to backward: among activations")
    if chosen.tp > 1:
        assumed.append("tensor parallelism cuts each layer, the embedding and the head")
    if chosen.pp > 1:
        assumed.append("a pipeline in 1F1B; where all micro-batches go forward first, each stage holds all of them")
    taken = [
        how,
        *([layers] if layers else []),
        f"{', '.join(trained['optimizers'])}: {weight:g} bytes of parameters, {gradient:g} of gradients and "
        f"{trained['state']:g} of states for each",
        tokens_taken(question, samples, sequence, summary.micro_batches),
        {"none": "nothing is recomputed", "full": "each layer is recomputed"}[chosen.recompute],
    ]
    return {
        "kinds": kinds, "taken_over": taken, "assumed": assumed, "layout": str(chosen),
        "command": _command(question, chosen, gpus, sequence),
    }  # fmt: skip


def trained_of(fullest: RankTrace, summary: Summary) -> dict[str, Any]:
    """Returns what the fullest rank's script trains.

    Raises:
        NoCounterpart: some parameters are frozen, or an optimizer's states are not of its parameters' shapes.
    """
    trained, model = fullest.model["trained"], summary.model
    refuse(
        model["frozen"],
        f"{model['frozen']:,} of {model['parameters']:,} parameters are frozen, and a layout of the planner trains "
        "all; pardemo plan without --explain plans LoRA",
    )
    refuse(not trained["elements"], "no optimizer of torch's was seen to step, so its states are not known")
    refuse(
        trained["unlike"],
        f"{', '.join(trained['optimizers'])} keeps states of other shapes than its parameters, which do not grow as "
        "they do",
    )
    return trained


def tokens(question: Question, traces: Sequence[RankTrace], cp: int) -> tuple[int, int]:
    """Returns the samples of a micro-batch and the tokens of each: as asked, else as in the script.

    Raises:
        NoCounterpart: neither is known.
    """
    known = next((trace.model["trained"]["tokens"] for trace in traces if trace.model["trained"]["tokens"]), None)
    unknown = known is None and (question.micro_batch is None or question.sequence is None)
    refuse(unknown, "no embedding was seen to take samples of tokens: say --micro-batch and --sequence")
    samples, length = known or (0, 0)
    return question.micro_batch or samples, question.sequence or length * cp


def tokens_taken(question: Question, samples: int, sequence: int, micro_batches: int) -> str:
    options = [name.replace("_", "-") for name in ("micro_batch", "sequence") if getattr(question, name) is not None]
    source = ("as in the script", f"{''.join(options)} as you said", "as you said")[len(options)]
    return f"{micro_batches} × {count_text(samples, 'sample')} of {sequence:,} tokens a step and rank, {source}"


def recomputed(trained: dict[str, Any]) -> str:
    """Returns ``none``, or ``full`` where each layer is recomputed.

    Raises:
        NoCounterpart: some layers alone.
    """
    count, layers = trained["layers_recomputed"], trained["layers"]
    refuse(0 < count < layers, f"{count} of {layers} layers are recomputed; the planner has all of them or none")
    inside = trained["recomputed_inside"] and not count
    refuse(inside, "parts of layers are recomputed; the planner has whole layers or none")
    return "full" if count else "none"


def _degrees(
    parallelisms: list[Parallelism], summary: Summary, question: Question
) -> tuple["Layout", Parallelism | None]:
    """Returns the script's degrees, with data-parallel ranks for all GPUs that are asked for."""
    from pardemo.planner.layouts.layout import Layout

    by_kind: dict[str, list[Parallelism]] = {}
    for parallelism in parallelisms:
        refuse(
            parallelism.options.by == MEGATRON,
            "Megatron-core's optimizer and buffers are not translated; pardemo plan --explain tp=…,sharding=zero1 "
            "has its constants",
        )
        by_kind.setdefault(parallelism.kind, []).append(parallelism)
    twice = [kind for kind, of_kind in by_kind.items() if len(of_kind) > 1]
    refuse(twice, f"a rank is in several groups of {''.join(twice[:1])}, and a layout has one")
    sizes = {kind: len(of_kind[0].ranks) for kind, of_kind in by_kind.items()}
    strange = sorted(set(sizes) - {*DATA, "TP", "PP", "CP"})
    refuse(strange, f"{', '.join(strange)} is not translated into a layout of the planner")
    shared = [kind for kind in DATA if kind in sizes]
    refuse(len(shared) > 1, f"{' and '.join(shared)} together have no counterpart in a layout")
    tp, pp, cp = (sizes.get(kind, 1) for kind in ("TP", "PP", "CP"))
    data, degrees = by_kind[shared[0]][0] if shared else None, f"TP {tp} × PP {pp} × CP {cp}"
    replicas, rest = divmod(summary.ranks, tp * pp * cp)
    unknown = rest or (replicas > 1 and data is None)
    refuse(unknown, f"what the groups of {summary.ranks} ranks share was not recognised")
    dp, rest = divmod(question.gpus or summary.ranks, tp * pp * cp)
    refuse(rest or not dp, f"{question.gpus} GPUs do not divide by {degrees} of the script")
    refuse(dp > 1 and data is None, f"the script has no data parallelism, and {degrees} are not {question.gpus} GPUs")
    sharding, group = ("none", 0) if data is None else _sharing(data, replicas, cp, summary)
    stages = len(by_kind["PP"][0].wraps) if pp > 1 else 1
    return Layout(
        tp=tp, cp=cp, dp=dp, pp=pp, sharding=sharding, shard_group=group, accumulation=summary.micro_batches,
        chunks=stages, sequence_parallel=tp > 1 and _along_the_sequence(summary, by_kind["TP"][0].ranks),
    ), data  # fmt: skip


def _sharing(data: Parallelism, replicas: int, cp: int, summary: Summary) -> tuple[str, int]:
    """Returns what data-parallel ranks share of the states, and in groups of how many, where not all share them."""
    if data.kind == "DDP":
        several = isinstance(data.options, SeveralModels) or len(data.ranks) not in (replicas, replicas * cp)
        refuse(several, "several models, or groups, under DDP have no counterpart in a layout")
        return "none", 0
    options, layers = data.options, summary.model["trained"]["layers"]
    strategy = options.sharding_strategy if isinstance(options, Fsdp1Options) else "FULL_SHARD"
    refuse(strategy not in ("FULL_SHARD", "HYBRID_SHARD"), f"FSDP1's {strategy} has no counterpart in a layout")
    reshard = options.reshard_after_forward if isinstance(options, Fsdp2Options) else {}
    for name, back in reshard.items():
        kept = name != ROOT and not back
        refuse(kept, f"{name} stays gathered from its forward to its backward pass, and a layout's units do not")
    units = sum(name != ROOT for name in data.wraps)
    refuse(
        units < layers, f"{units} units besides the root are not the {layers} layers; a layout gathers layer by layer"
    )
    return "zero3", 0 if len(data.ranks) == replicas * cp else len(data.ranks)


def _along_the_sequence(summary: Summary, ranks: tuple[int, ...]) -> bool:
    """Whether a cut layer's output is left in parts of the sequence: sequence parallel."""
    return any(
        row.kind == "reduce-scatter" and row.ranks == ranks and row.site.phase == "forward"
        for row in summary.collectives
    )


def _gathered_in(data: Parallelism) -> list[str]:
    """Returns the dtypes in which FSDP2 gathers parameters."""
    return data.options.gathered_in if isinstance(data.options, Fsdp2Options) else []


def _computed_in(fullest: RankTrace, data: Parallelism | None) -> tuple[int, str]:
    """Returns the bytes of the type that the forward computes in, and how that is known."""
    model = fullest.model
    if model["computed_in"]:
        names, why = model["computed_in"], "by autocast"
    elif data is not None and _gathered_in(data):
        names, why = _gathered_in(data), "as parameters are gathered"
    else:
        names, why = sorted(model["dtypes"]), "as parameters are"
    unknown = len(names) != 1 or names[0] not in (*HALF, "float32")
    refuse(unknown, f"the forward computes in {', '.join(names) or 'an unknown dtype'}, of which no plan is made")
    return (2 if names[0] in HALF else 4), f"{names[0]} in the forward, {why}"


def _command(question: Question, chosen: "Layout", gpus: int, sequence: int) -> str:
    """Writes the planner's own command that is nearest; there the program sets the bytes of a parameter."""
    from pardemo.planner.layouts.layout import Layout

    usual = Layout().as_words()
    words = [
        f"{name}={'yes' if value is True else value}"
        for name, value in chosen.as_words().items()
        if value != usual[name]
    ]
    return (
        f"pardemo plan --explain {','.join(words) or 'dp=1'} --program {PROGRAM} --model {question.model} "
        f"--gpus {gpus} --sequence {sequence} --gpu H100"
    )


#: Lines of a dry run, and the kinds of a measurement that they are beside.
KINDS = {
    "frozen parameters": "parameters",
    "gathered parameters": "gathered parameters",
    "buckets": "communication buffers",
}
ADAM = {"Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam"}


def _planned_deepspeed(
    question: Question, summary: Summary, traces: Sequence[RankTrace], fullest: RankTrace
) -> dict[str, Any]:
    """Plans DeepSpeed's engine; as :func:`_planned_layout`.

    Raises:
        NoCounterpart: it is not run dry in this way. ValueError: the planner refuses the job.
    """
    from pardemo.planner import models
    from pardemo.planner.dry_run.memory_curve import Curve
    from pardemo.planner.job import RankJob
    from pardemo.planner.layouts.layout import Layout

    trained = trained_of(fullest, summary)
    settings = trained["deepspeed"]
    (engine,) = (p for p in summary.parallelism if p.kind.startswith("DeepSpeed") and fullest.rank in p.ranks)
    others = sorted({p.kind for p in summary.parallelism} - {engine.kind})
    refuse(others, f"{engine.kind} together with {', '.join(others)} is not run dry")
    refuse(
        not settings or settings["offloads"],
        "an engine that offloads, or one of several, is not translated: pardemo plan --zero plans it",
    )
    refuse(
        not settings["half"] or not set(trained["optimizers"]) <= ADAM,
        f"DeepSpeed is run dry in 16 bits with Adam alone, not with {', '.join(trained['optimizers'])}"
        + ("" if settings["half"] else " in fp32"),
    )
    assert isinstance(engine.options, ZeroOptions)
    stage, gpus = engine.options.stage, question.gpus or summary.ranks
    refuse(gpus < 2 <= stage + 1, f"stage {stage} shards over data-parallel ranks, and there is one")
    samples, sequence = tokens(question, traces, 1)
    micro_batches, again = engine.options.micro_batches, recomputed(trained)
    job = RankJob(
        models.find(question.model), samples, sequence, checkpointing=again == "full", engine=f"zero-{stage}",
        ranks=gpus, accumulation=min(2, micro_batches), clipping=settings["clipping"], zero=settings["zero"],
    )  # fmt: skip
    with _warnings_off(), contextlib.redirect_stdout(sys.stderr):
        lines = Curve(job).estimate(Layout(micro_batch=samples, accumulation=micro_batches)).lines
    kinds: dict[str, float] = defaultdict(float)
    for name, nbytes in lines.items():
        kinds[KINDS.get(name, name)] += nbytes
    how = "on" if again == "full" else "off"
    return {
        "kinds": kinds,
        "taken_over": [
            f"ZeRO-{stage} with Adam in 16 bits and its settings: "
            + (", ".join(f"{name} {value}" for name, value in settings["zero"].items()) or "DeepSpeed's own"),
            tokens_taken(question, samples, sequence, micro_batches),
            f"{'each layer' if how == 'on' else 'nothing'} is recomputed",
        ],
        "assumed": ["the model and its loss as Transformers has them, all parameters trained, fused attention"],
        "layout": f"{job.engine} over {gpus}, {samples}×{micro_batches}",
        "command": f"pardemo plan --model {question.model} --full --zero {stage} --checkpointing {how} "
        f"--batch {samples} --sequence {sequence} --per-step {samples * micro_batches * gpus} --gpus {gpus} --gpu H100",
    }  # fmt: skip


@contextlib.contextmanager
def _warnings_off() -> Any:
    """Turns warnings and logging below errors off within the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
