"""``pardemo plan --validate``: compares the planner with runs whose outcome is known."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import LlamaConfig

from pardemo.baichuan2 import Baichuan2Config
from pardemo.formulas import scaling
from pardemo.planner import hardware, models
from pardemo.planner.dry_run.runner import dry_run
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.job import Job, engine_name, fine_tune
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.published import finetune_runs, megatron_2019
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import predict_step
from pardemo.planner.layouts.tuning import Tuning
from pardemo.tables import text_table

#: ms-swift's table for baichuan2-13b-chat on one A100-80GB: samples/s and GiB by the longest length.
SWIFT = {512: (5.32, 31.0), 1024: (3.91, 31.6), 2048: (1.77, 32.4), 4096: (0.65, 49.6)}
#: nanotron on 8 H100s of one host, 256 samples of 4,096 tokens a step, nothing recomputed: tokens/s and GPU by
#: micro-batch (vinjn/nanotron-ultrascale-playbook at 924e4d0, Apache-2.0). The smaller one was not sharded.
NANOTRON = {
    ("none", Shape(16, 2048, 32, 32, 8192, 131_072, tied=True, name="1.34B")): {1: 39273, 2: 40150},
    ("zero1", Shape(28, 3072, 32, 32, 8192, 131_072, tied=True, name="3.57B")): {1: 16341, 2: 15997},
}
ROUNDS = 5


@dataclass(frozen=True)
class Check:
    """One comparison: ``error`` is predicted over known (measured or published), less 1.

    ``within`` is the largest that is promised, either way, or above 0 where ``bound`` is "at most"; None where another
    rule stands for comparison, or nothing is promised. ``met`` says whether the promise is kept.
    """

    what: str
    predicted: float
    known: float
    unit: str
    error: float
    bound: str
    within: float | None
    met: bool | None
    source: str


def _check(
    what: str, predicted: float, known: float, unit: str, source: str, within: float | None, bound: str = ""
) -> Check:
    error = predicted / known - 1
    met = None if within is None else (error if bound == "at most" else abs(error)) <= within
    return Check(what, predicted, known, unit, error, bound, within, met, source)


def megatron() -> list[Check]:
    """Checks the model-parallel half of Megatron's study, on V100s in 2019: one GPU's rate, and that of several.

    By the constants of Megatron on A100s in 2022. Nothing is promised of the rate, which the younger program has far
    higher. Of the share of linear scaling half of what tensor parallelism costs is promised.
    """
    rows, alone = [], 0.0
    for tp, model in scaling.TABLE_1.items():
        planned = predict_step(megatron_2019.job(model, find_program("megatron-2022")), megatron_2019.layout(model, tp))
        rate = model.flops / tp / planned.seconds
        label = f"Megatron, {model.parameters / 1e9:.1f}B, {tp}-way"
        if tp == 1:
            alone, known = rate, scaling.BASELINE_FLOPS
            rows.append(_check(label, rate / 1e12, known / 1e12, "TFLOP/s per GPU", "1909.08053 5.1", None))
        else:
            known = scaling.FIGURE_5_MP[tp] / 100
            rows.append(_check(label, rate / alone, known, "of linear", "1909.08053 figure 5", (1 - known) / 2))
    return rows


def a800() -> list[Check]:
    """Checks LLaMA-7B on the article's GPUs, with and without offload, by micro-batch."""
    rows, machine = [], Machine(hardware.gpu("A800-80GB"), 8)
    shape = configurations.shape_of_config(models.find("llama2-7b"))
    for (stage, checkpointing), runs in finetune_runs.A800.items():
        for host_states, batch, samples_per_s in runs:
            seconds = predict_step(*fine_tune(
                shape, machine, engine=f"zero-{stage}", ranks=8, batch=batch, sequence=4096,
                checkpointing=checkpointing, accumulation=64 // 8 // batch, host_states=host_states,
            )).seconds  # fmt: skip
            label = f"LLaMA-7B, ZeRO {stage}, offload {host_states}, micro-batch {batch}"
            rows.append(_check(label, 64 / seconds, samples_per_s, "samples/s", "a gist's table, 8 × A800-80GB", 0.25))
    return rows


def qwen() -> list[Check]:
    """Checks peaks of those of Qwen's fine-tunes that no constant was fitted to."""
    rows = []
    runs = list(finetune_runs.read_fine_tunes(finetune_runs.folder() / "finetunes.csv"))
    for run in finetune_runs.halves(runs)[1]:
        job, ranks, planned = run.job, run.layout.dp, predict_memory(run.job, run.layout).peak_bytes / 1e9
        how = f"{'LoRA' if job.tuning.lora else 'full'} on {job.tuning.base}, {ranks} × {job.sequence:,} tokens"
        label = f"{job.shape.name}, {how}, {engine_name(job, run.layout)}{', embeddings' * job.tuning.embeddings}"
        rows.append(_check(label, planned, run.peak_gb or 0.0, "GB", "Qwen's table of fine-tunes, A100-80GB", 0.15))
    return rows


def nanotron() -> list[Check]:
    """Checks nanotron's tokens/s of each H100; its constants are fitted to runs of this table."""
    rows, machine = [], Machine(hardware.gpu("H100"))
    for (sharding, shape), runs in NANOTRON.items():
        job = Job(shape, machine, find_program("nanotron"))
        for batch, tokens_per_s in runs.items():
            layout = Layout(dp=8, sharding=sharding, micro_batch=batch, accumulation=256 // 8 // batch)
            predicted = predict_step(job, layout).tokens_per_s
            label = f"nanotron, {shape.name}, micro-batch {batch}"
            rows.append(_check(label, predicted, tokens_per_s, "tokens/s and GPU", "the playbook's benchmarks", 0.15))
    return rows


def swift() -> list[Check]:
    """Checks ms-swift's Baichuan2-13B rows. Its samples are shorter than the maximum; ours are not, and take longer."""
    rows, machine = [], Machine(hardware.gpu("A100-80GB"), 1)
    shape = configurations.shape_of_config(Baichuan2Config.b13(loss_head="full"))
    for length, (speed, gib) in SWIFT.items():
        planned = fine_tune(shape, machine, Tuning(8, ("W_pack",)), sequence=length, accumulation=16)
        seconds, held = predict_step(*planned).seconds / 16, predict_memory(*planned).peak_bytes / 2**30
        source = "ms-swift's table, 1 × A100-80GB"
        label = f"Baichuan2-13B LoRA, {length} tokens"
        rows.append(_check(label, 1 / seconds, speed, "samples/s", source, 0.0, "at most"))
        rows.append(_check(label, held, gib, "GiB", source, 0.35))
    return rows


def this_machine() -> list[Check]:
    """Checks steps on one core of this machine in fp32: what a dry run counts, over the rates of its profile."""
    from pardemo import World, machine

    machine_profile, rows = machine.profile(), []
    with World(1) as world:
        for width, layers, checkpointing in ((512, 4, False), (512, 4, True), (768, 3, False)):
            config = LlamaConfig(
                vocab_size=2048, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                num_attention_heads=width // 64, num_key_value_heads=width // 64,
            )  # fmt: skip
            job = RankJob(config, batch=4, sequence=256, checkpointing=checkpointing, precision="fp32", on_gpu=False)
            run = dry_run(job)
            predicted = sum(run.flops.values()) / machine_profile.matmul_flops
            predicted += (run.traffic + run.step_traffic) / machine_profile.copy_bytes_per_s
            label = f"Llama, {layers} layers of {width}, checkpointing {'on' if checkpointing else 'off'}"
            measured = world.run(seconds_of, job, timeout_s=120)[0]
            rows.append(_check(label, predicted, measured, "s a step", "this machine, one core, fp32", 0.15))
    return rows


def seconds_of(job: RankJob) -> float:
    """Measures the median time of a step on a rank."""
    from pardemo.planner.dry_run import engines, measured_peak

    module = engines.materialize(engines.outline(job), "cpu")
    measured_peak.fill_uniformly(module)
    running = engines.start(job, module)
    ids, labels = measured_peak.random_batch(job)
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        engines.one_step(job, running, ids, labels, contextlib.nullcontext)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


#: Small jobs (architecture, engine, ranks, LoRA, checkpointing, prefetching), one of each kind; the tests have more.
#: The peak of ``CHANCE`` is up to the order of a Python set: see
#: :func:`pardemo.planner.dry_run.measured_peak.example_job`.
MEMORY = (
    ("baichuan2", "plain", 1, True, True),
    ("llama", "zero-1", 2, False, False),
    ("qwen2", "zero-2", 2, True, True),
    ("baichuan2", "zero-3", 2, False, True),
    ("llama", "fsdp2", 2, False, True),
    ("baichuan2", "zero-3", 2, True, True, False),
    CHANCE := ("baichuan2", "zero-3", 2, True, True),
)


def peaks() -> list[Check]:
    """Checks peaks on this machine's CPU ranks by torch's allocator, and beside the planner's those of other rules."""
    from pardemo import World
    from pardemo.planner.dry_run import measured_peak

    rows = []
    for case in MEMORY:
        name, engine, ranks, lora, checkpointing, *prefetching = case
        job = measured_peak.example_job(name, engine, ranks, lora, checkpointing, *prefetching)
        with World(ranks, preload=["pardemo.peers.deepspeed.engine", "pardemo.planner.dry_run.measured_peak"]) as world:
            comparison = measured_peak.compare_peaks(world, [job])[0]
        measured = comparison.pop("measured") / 1e6
        how = f"{name}, {'LoRA' if lora else 'full'}, {engine} on {ranks}{', checkpointing' * checkpointing}"
        how += ", no prefetching" * (prefetching == [False])
        predictions = {"": comparison.pop("planned") / 1e6}
        comparison.pop("error")
        predictions |= {f"; {rule}": measured * (1 + error) for rule, error in comparison.items()}
        within = 0.1 if case == CHANCE else 0.03
        for rule, predicted in predictions.items():
            promised = None if rule else within
            rows.append(_check(how + rule, predicted, measured, "MB", "this machine, torch's allocator", promised))
    return rows


def emulated() -> list[Check]:
    """Checks steps of a model that waits, on emulated clusters: traffic, pipelines and overlap in the time model."""
    from pardemo.planner import emulated_steps

    rows = []
    for case, predicted, measured in emulated_steps.compare_steps():
        rows.append(
            _check(f"{case.label}, {case.cluster}", predicted, measured, "s a step", emulated_steps.SOURCE, 0.1)
        )
    return rows


PARTS: dict[str, Callable[[], list[Check]]] = {
    "memory on CPU ranks": peaks,
    "time on this machine": this_machine,
    "time on emulated clusters": emulated,
    "Megatron": megatron,
    "LLaMA-7B on A800s": a800,
    "Qwen's fine-tunes": qwen,
    "nanotron": nanotron,
    "ms-swift": swift,
}


def validate(progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """Makes all checks; returns a dict of :class:`Check` for each."""
    rows = []
    for name, part in PARTS.items():
        progress(name)
        rows += [asdict(check) for check in part()]
    return rows


def as_text(rows: list[dict[str, Any]]) -> str:
    """Returns the checks as a table: what is promised of each, and whether it is met."""
    shown = [("what", "predicted", "known", "unit", "error", "promised", "", "source")]
    for row in rows:
        promised = "no promise of ours" if row["within"] is None else row["bound"] or f"± {100 * row['within']:g} %"
        met = {True: "met", False: "not met", None: ""}[row["met"]]
        error = f"{100 * row['error']:+.1f} %"
        shown.append((row["what"], f"{row['predicted']:.4g}", f"{row['known']:.4g}", row["unit"], error, promised, met,
                      row["source"]))  # fmt: skip
    return text_table(shown)
