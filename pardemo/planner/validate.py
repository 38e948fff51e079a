"""``pardemo plan --validate``: what the planner says of runs whose outcome is known, and by how much it is off."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import GPT2Config, LlamaConfig

from pardemo.baichuan2 import Baichuan2Config
from pardemo.formulas import scaling
from pardemo.planner import hardware, models
from pardemo.planner.dryrun import dry_run
from pardemo.planner.job import Adapter, RankJob
from pardemo.planner.layouts import configurations, finetune_runs
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuned_memory import FineTune, peak
from pardemo.planner.layouts.tuned_step import tuned_step
from pardemo.planner.layouts.tuning import Tuning
from pardemo.planner.timing import Rates, step_time

#: ms-swift's table for baichuan2-13b-chat on one A100-80GB: samples/s and GiB by the longest length.
SWIFT = {512: (5.32, 31.0), 1024: (3.91, 31.6), 2048: (1.77, 32.4), 4096: (0.65, 49.6)}
#: LLaMA-7B in full on 8 A800s of one host, 4,096 tokens, 64 samples a step, DeepSpeed 0.14.2 (gist chenyaofo/d4cd6a2):
#: (stage, checkpointing) -> (offload, micro-batch, samples/s).
A800 = {
    (2, True): (("none", 1, 4.19), ("optimizer", 1, 1.81), ("none", 4, 4.69)),
    (3, True): (("none", 2, 4.45), ("optimizer", 2, 2.05), ("optimizer+parameters", 4, 2.06), ("none", 8, 4.73)),
}
#: nanotron on 8 H100s of one host, 256 samples of 4,096 tokens a step, nothing recomputed: tokens/s and GPU by
#: micro-batch (vinjn/nanotron-ultrascale-playbook at 924e4d0, Apache-2.0). Layers, hidden size, heads, MLP.
NANOTRON = {
    "1.34B": ((16, 2048, 32, 8192), {1: 39273, 2: 40150}),
    "3.57B": ((28, 3072, 32, 8192), {1: 16341, 2: 15997}),
}
ROUNDS = 5


@dataclass(frozen=True)
class Check:
    """One comparison: ``error`` is predicted over known (measured or published), less 1.

    ``within`` is the largest that is promised, either way, or above 0 where ``bound`` is "at most"; None where another
    rule stands for comparison. ``met`` says whether the promise is kept.
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


def rates_of(gpu: hardware.Gpu, host_gpus: int = 8) -> Rates:
    return Rates(gpu.flops, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, 12.5e9, host_gpus)


def megatron() -> list[Check]:
    """TFLOP/s of each V100 in the model-parallel half of Megatron's study, its operations counted as the paper does."""
    rows, rates = [], rates_of(hardware.gpu("V100"), 16)
    for tp, job in scaling.TABLE_1.items():
        config = GPT2Config(
            n_embd=job.hidden, n_head=job.heads, n_layer=job.layers, n_positions=1024, vocab_size=job.vocabulary
        )
        footprint = dry_run(RankJob(config, batch=2, sequence=1024, precision="fp16"))
        seconds = step_time(footprint, job.batch, 1, 1, rates, tp=tp).seconds
        published = scaling.BASELINE_FLOPS * scaling.FIGURE_5_MP[tp] / 100
        label = f"Megatron, {job.parameters / 1e9:.1f}B, {tp}-way"
        predicted = job.flops / tp / seconds / 1e12
        rows.append(_check(label, predicted, published / 1e12, "TFLOP/s per GPU", "1909.08053 5.1", 0.3))
    return rows


def a800() -> list[Check]:
    """LLaMA-7B on the article's GPUs, with and without offload, by micro-batch."""
    rows, rates = [], rates_of(hardware.gpu("A800-80GB"))
    for (stage, checkpointing), runs in A800.items():
        footprint = dry_run(RankJob(models.find("llama2-7b"), batch=2, sequence=4096, checkpointing=checkpointing,
                            engine=f"zero-{stage}", ranks=8))  # fmt: skip
        for offload, batch, samples_per_s in runs:
            seconds = step_time(footprint, batch, 64 // 8 // batch, 8, rates, offload=offload).seconds
            label = f"LLaMA-7B, ZeRO {stage}, offload {offload}, micro-batch {batch}"
            rows.append(_check(label, 64 / seconds, samples_per_s, "samples/s", "a gist's table, 8 × A800-80GB", 0.25))
    return rows


def reckoned() -> list[Check]:
    """What ``pardemo plan`` says without a dry run: the same steps on A800s, and Qwen's peaks that were not fitted."""
    rows, shape = [], configurations.of(models.find("llama2-7b"))
    machine = Machine(hardware.gpu("A800-80GB"))
    for (stage, checkpointing), runs in A800.items():
        for offload, batch, samples_per_s in runs:
            job = FineTune(
                shape, Tuning(), f"zero-{stage}", 8, batch, 4096, checkpointing=checkpointing,
                accumulation=64 // 8 // batch, offload=offload,
            )  # fmt: skip
            seconds = tuned_step(job, machine, overlap=False if stage == 2 else None).seconds
            label = f"LLaMA-7B, ZeRO {stage}, offload {offload}, micro-batch {batch}, without a dry run"
            rows.append(_check(label, 64 / seconds, samples_per_s, "samples/s", "a gist's table, 8 × A800-80GB", 0.25))
    for run in finetune_runs.halves(list(finetune_runs.read(finetune_runs.folder() / "finetunes.csv")))[1]:
        job, planned = run.job, peak(run.job).peak_bytes / 1e9
        how = f"{'LoRA' if job.tuning.lora else 'full'} on {job.tuning.base}, {job.ranks} × {job.sequence:,} tokens"
        label = f"{job.shape.name}, {how}, {job.engine}{', embeddings' * job.tuning.embeddings}"
        rows.append(_check(label, planned, run.peak_gb or 0.0, "GB", "Qwen's table of fine-tunes, A100-80GB", 0.15))
    return rows


def nanotron() -> list[Check]:
    """Tokens/s of each H100; the gradients' exchange, under 1 % of the step, is left out."""
    rows, rates = [], rates_of(hardware.gpu("H100"))
    for name, (sizes, runs) in NANOTRON.items():
        footprint = dry_run(RankJob(nanotron_config(*sizes), batch=2, sequence=4096, checkpointing=False))
        for batch, tokens_per_s in runs.items():
            seconds = step_time(footprint, batch, 32 // batch, 1, rates).seconds
            label = f"nanotron, {name}, micro-batch {batch}"
            rows.append(
                _check(label, 32 * 4096 / seconds, tokens_per_s, "tokens/s and GPU", "the playbook's benchmarks", 0.15)
            )
    return rows


def nanotron_config(layers: int, hidden: int, heads: int, middle: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=131_072, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


def published() -> list[Check]:
    """ms-swift's Baichuan2-13B rows. Its samples are shorter than the maximum, ours are not: they take longer."""
    rows, rates = [], rates_of(hardware.gpu("A100-80GB"))
    for length, (speed, gib) in SWIFT.items():
        job = RankJob(Baichuan2Config.b13(loss_head="full"), batch=1, sequence=length, adapter=Adapter())
        footprint = dry_run(job)
        seconds = step_time(footprint, 1, 16, 1, rates).seconds / 16
        source = "ms-swift's table, 1 × A100-80GB"
        label = f"Baichuan2-13B LoRA, {length} tokens"
        rows.append(_check(label, 1 / seconds, speed, "samples/s", source, 0.0, "at most"))
        rows.append(_check(label, footprint.peak_bytes / 2**30, gib, "GiB", source, 0.35))
    return rows


def here(profile: Any = None) -> list[Check]:
    """Steps on this machine in fp32 on one core, predicted from the profile of *Your machine*."""
    from pardemo import World, machine

    machine_profile = profile or machine.profile()
    rates = Rates(
        machine_profile.matmul_flops, machine_profile.copy_bytes_per_s, 1e9, 1e9, 1,
        shares=tuple(dict.fromkeys(("forward", "recomputation", "backward"), 1.0).items()), memory_share=1.0,
        small_tokens=0.0, launch_s=0.0,
    )  # fmt: skip
    rows = []
    with World(1) as world:
        for width, layers, checkpointing in ((512, 4, False), (512, 4, True), (768, 3, False)):
            config = LlamaConfig(
                vocab_size=2048, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
                num_attention_heads=width // 64, num_key_value_heads=width // 64,
            )  # fmt: skip
            job = RankJob(config, batch=4, sequence=256, checkpointing=checkpointing, precision="fp32", on_gpu=False)
            predicted = step_time(dry_run(job), 4, 1, 1, rates).seconds
            label = f"Llama, {layers} layers of {width}, checkpointing {'on' if checkpointing else 'off'}"
            measured = world.run(seconds_of, job, timeout_s=120)[0]
            rows.append(_check(label, predicted, measured, "s a step", "this machine, one core, fp32", 0.15))
    return rows


def seconds_of(job: RankJob) -> float:
    """On a rank: the median time of a step."""
    from pardemo.planner import engines, truth

    module = engines.materialize(engines.outline(job), "cpu")
    truth.fill(module)
    running = engines.start(job, module)
    ids, labels = truth.batch(job)
    times = []
    for _ in range(ROUNDS + 1):
        begin = time.perf_counter()
        engines.one_step(job, running, ids, labels, truth.no_phase)
        times.append(time.perf_counter() - begin)
    return median(times[1:])


#: Small jobs (architecture, engine, ranks, LoRA, checkpointing, prefetching), one of each kind; the tests have more.
#: The peak of ``CHANCE`` is up to the order of a Python set (see :func:`pardemo.planner.examples.job`).
MEMORY = (
    ("baichuan2", "plain", 1, True, True),
    ("llama", "zero-1", 2, False, False),
    ("qwen2", "zero-2", 2, True, True),
    ("baichuan2", "zero-3", 2, False, True),
    ("llama", "fsdp2", 2, False, True),
    ("baichuan2", "zero-3", 2, True, True, False),
    CHANCE := ("baichuan2", "zero-3", 2, True, True),
)


def memory() -> list[Check]:
    """Peaks on this machine's CPU ranks as the allocator counts them; beside the planner's what other rules say."""
    from pardemo import World
    from pardemo.planner import examples

    rows = []
    for case in MEMORY:
        name, engine, ranks, lora, checkpointing, *prefetching = case
        job = examples.job(name, engine, ranks, lora, checkpointing, *prefetching)
        with World(ranks, preload=["pardemo.peers.deepspeed.engine", "pardemo.planner.truth"]) as world:
            comparison = examples.compare(world, [job])[0]
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
    """Steps of a model that waits, on clusters of this machine: traffic, pipelines and overlap in the time model."""
    from pardemo.planner import network

    rows = []
    for case, predicted, measured in network.compare():
        rows.append(_check(f"{case.what}, {case.cluster}", predicted, measured, "s a step", network.SOURCE, 0.1))
    return rows


PARTS: dict[str, Callable[[], list[Check]]] = {
    "memory on CPU ranks": memory,
    "time on this machine": here,
    "time on emulated clusters": emulated,
    "Megatron": megatron,
    "LLaMA-7B on A800s": a800,
    "fine-tunes without a dry run": reckoned,
    "nanotron": nanotron,
    "ms-swift": published,
}


def validate(progress: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """All checks, as rows: a dict of :class:`Check` each."""
    rows = []
    for name, part in PARTS.items():
        progress(name)
        rows += [asdict(check) for check in part()]
    return rows
