"""A dry run against the real step: every storage that is predicted, and none besides."""

import dataclasses
import gc

import pytest
import torch
from conftest import few
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from pardemo import World, compat
from pardemo.planner.dry_run import engines, fake, measured_peak, memory_curve
from pardemo.planner.dry_run.footprint import LINES
from pardemo.planner.dry_run.runner import dry_run
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.tuning import Tuning

WITHIN = 0.03  # the planner's promise


@pytest.fixture(scope="module")
def world_of():
    """Ranks of this file's own: what else a rank has run before would be counted with the step."""
    worlds = {}

    def get(n):
        if n not in worlds:
            worlds[n] = World(
                n, preload=["pardemo.peers.deepspeed.engine", "pardemo.planner.dry_run.measured_peak"], timeout_s=120
            )
        return worlds[n]

    yield get
    for world in worlds.values():
        world.close()


def error(world, job):
    return measured_peak.compare_peaks(world, [job])[0]["error"]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("name", few(["baichuan2", "llama", "qwen2"]))
def test_one_rank(name, lora, checkpointing, world_of):
    job = measured_peak.example_job(name, "plain", 1, lora, checkpointing)
    assert error(world_of(1), job) == pytest.approx(0, abs=0.005)


CASES = [
    ("baichuan2", "zero-0", 2, False, True),
    ("llama", "zero-1", 2, False, False),
    ("qwen2", "zero-2", 2, False, True),
    ("baichuan2", "zero-2", 2, True, True),
    ("qwen2", "fsdp2", 2, True, True),
    ("baichuan2", "fsdp2", 4, False, False),
    ("baichuan2", "zero-3", 4, True, False),
]


@pytest.mark.parametrize(("name", "engine", "ranks", "lora", "checkpointing"), few(CASES, 0, 4))
def test_sharded(name, engine, ranks, lora, checkpointing, world_of):
    assert abs(error(world_of(ranks), measured_peak.example_job(name, engine, ranks, lora, checkpointing))) <= WITHIN


@pytest.mark.nightly
def test_stage_3_of_lora_with_checkpointing_where_no_set_has_a_say(world_of):
    job = measured_peak.example_job("baichuan2", "zero-3", 2, True, True, prefetching=False)
    assert error(world_of(2), job) == pytest.approx(0, abs=0.005)


@pytest.mark.parametrize("engine", few(["plain", "zero-1", "zero-2", "zero-3", "fsdp2"], 0, 2, 3, 4))
def test_frozen_parameters_have_neither_gradients_nor_states(engine):
    before = torch.nn.Module._apply
    found = dry_run(measured_peak.example_job("llama", engine, 4, True, True))
    assert torch.nn.Module._apply is before, "nothing is left of a dry run"
    assert not torch.distributed.is_initialized()
    frozen, trained = 2 * (found.params - found.trained_params), found.trained_params
    shards = 4 if engine in ("zero-3", "fsdp2") else 1
    assert found.lines["frozen parameters"] == pytest.approx(frozen / shards, rel=0.02)
    assert found.lines["gradients"] <= 4 * trained
    assert found.lines["optimizer states"] <= 12 * trained + 1000


@pytest.mark.parametrize("engine", few(["plain", "zero-2", "zero-3", "fsdp2"], 1))
def test_the_short_cache_key_tells_apart_what_torchs_does(engine, monkeypatch):
    job = measured_peak.example_job("baichuan2", engine, 4, True, True)
    short = dry_run(job)
    monkeypatch.delattr(fake._Fake, "_prep_args_for_hash")
    fake.FakeTensorMode.cache_clear()
    whole = dry_run(job)
    assert (short.changes == whole.changes).all()
    assert (short.lines, short.flops) == (whole.lines, whole.flops)


def test_what_differs_has_another_cache_key():
    with fake._Fake() as mode, torch.inference_mode(False):
        plain = torch.empty(4, 6)
        tensors = [
            plain, torch._neg_view(plain), plain.double(), torch.empty(6, 4), torch.empty(6, 4).T, plain[:2],
            torch.empty(2, 6), plain[1:3],
            torch.empty(4, 6, requires_grad=True), torch.empty(4, 6, dtype=torch.complex64),
            torch.empty(4, 6, dtype=torch.complex64).conj(), torch.empty(4, 6, dtype=torch.complex64).conj().imag,
            torch.empty(4, 6, device="meta"),
        ]  # fmt: skip
        calls = [
            *((tensor,) for tensor in tensors),
            *((tensor, 1) for tensor in tensors),
            (1,),
            (1.0,),
            (True,),
            (None,),
        ]
        calls += [
            ([plain],),
            ((plain,),),
            ([plain, plain], plain),
            ([plain], plain, plain),
            (torch.float32,),
            {"dim": 1},
            {"end": 1},
            (torch.strided,),
        ]
        keys = []
        for call in calls:
            keys.append([])
            mode._prep_args_for_hash(keys[-1], call, None, [])
    assert len({tuple(key) for key in keys}) == len(calls)


def test_flops_are_torchs_own_count():
    job = measured_peak.example_job("llama", "plain", 1, False, False)
    found = dry_run(job)
    module = engines.materialize(engines.outline(job), "cpu")
    measured_peak.fill_uniformly(module)
    running = engines.start(job, module)
    ids, labels = measured_peak.random_batch(job)
    with FlopCounterMode(display=False) as counter:
        running.forward(ids, labels).backward()
    # the CPU's kernel, which torch's counter knows in 2.15 and left out before
    attention = 0 if compat.attention_cpu in flop_registry else 3.5 * 4 * job.batch * 4 * job.sequence**2 * 64 * 4
    assert sum(found.flops.values()) == pytest.approx(counter.get_total_flops() + attention, rel=0.001)


@pytest.mark.parametrize("batch", [3, 8])
def test_two_dry_runs_give_any_micro_batch(batch):
    job = measured_peak.example_job("qwen2", "zero-2", 2, True, True)
    guessed = memory_curve.Curve(job).estimate(Layout(micro_batch=batch))
    real = dry_run(job.but(batch=batch))
    assert sum(guessed.lines[name] for name in LINES) == pytest.approx(real.peak_bytes, rel=0.002)


@pytest.mark.parametrize("engine", few(["zero-2", "zero-3", "fsdp2"]))
def test_the_same_events_happen_whatever_the_micro_batch(engine):
    """Else each row of a plan would be a dry run of its own, which takes minutes."""
    job = measured_peak.example_job("baichuan2", engine, 4, True, True).but(accumulation=2, zero={})
    assert memory_curve.Curve(job)._slope is not None


@pytest.mark.parametrize("stage", few([1, 2, 3], 1, 2))
def test_an_update_on_the_host_takes_nothing_of_the_gpu(stage):
    """So few tokens that the update would be the peak: fp32 gradients, the states, and what Adam makes of them."""
    job = RankJob(
        measured_peak.example_config("llama"),
        batch=1,
        sequence=16,
        engine=f"zero-{stage}",
        ranks=2,
        zero=measured_peak.BUCKETS,
    )
    curve = memory_curve.Curve(job, scales=False)
    on_gpu, on_host = (curve.estimate(Layout(host_states=states)) for states in ("none", "optimizer"))
    assert (on_gpu.phase, on_host.phase) == ("step", "backward")
    whole = 2 * curve.low.params  # in bf16
    parameters, gradients = whole / (2 if stage == 3 else 1), whole
    tensors = sum(on_host.lines[name] for name in LINES)
    assert tensors < 1.05 * (parameters + gradients) + 2 * measured_peak.BUCKETS["reduce_bucket_size"]


def test_nccl_has_buffers_for_each_group_of_several_ranks():
    curve = memory_curve.Curve(measured_peak.example_job("llama", "zero-1", 2, True, True), scales=False)
    for tp, pp, groups in ((1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 3)):
        assert curve.estimate(Layout(tp=tp, pp=pp, micro_batch=2)).lines["NCCL"] == groups * 0.69e9  # NVIDIA/nccl#964
    alone = memory_curve.Curve(measured_peak.example_job("llama", "plain", 1, True, True), scales=False)
    assert "NCCL" not in alone.estimate(Layout(micro_batch=2)).lines


@pytest.mark.parametrize("frozen", [False, True])
def test_the_collector_is_left_as_it_was(frozen):
    """What somebody else froze, as tests/conftest.py does, stays frozen; what the dry run froze does not."""
    gc.unfreeze()
    try:
        if frozen:
            gc.freeze()
        dry_run(measured_peak.example_job("llama", "plain", 1, False, False))
        assert gc.isenabled()
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()


def test_bad_jobs_are_refused():
    config = measured_peak.example_config("llama")
    for changes, told in (
        ({"batch": 0}, "batch must be a whole number of at least 1"),
        ({"sequence": 0}, "sequence must be a whole number of at least 1"),
        ({"engine": "zero-4"}, "engine must be one of plain"),
        ({"labels": 0.0}, "labels is a share above 0"),
        ({"sequence": 10**6}, "longer than the model's context"),
        ({"precision": "fp32", "engine": "zero-1"}, "precision must be bf16"),
    ):
        with pytest.raises(ValueError, match=told):
            RankJob(config, **changes)
    with pytest.raises(ValueError, match=r"'W_pack'.*q_proj"):
        dry_run(RankJob(config, tuning=Tuning(8, ("W_pack",)), sequence=8))
    with fake._ranks(2), pytest.raises(RuntimeError, match="process"):
        dry_run(dataclasses.replace(measured_peak.example_job("llama", "zero-1", 2, False, True)))


def test_a_dry_run_in_a_process_of_its_own_is_the_one_of_this_process():
    job = measured_peak.example_job("qwen2", "zero-2", 2, True, True).but(batch=memory_curve.LOW)  # as of a curve above
    alone = memory_curve.run(job)
    del memory_curve._DONE[job.described]
    memory_curve.begin(job)
    memory_curve.begin(job)  # once is enough
    apart = memory_curve.run(job)
    assert not memory_curve._AHEAD
    assert apart.lines == alone.lines
    assert (apart.changes == alone.changes).all()
