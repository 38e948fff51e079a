"""The planner's time and bytes against arithmetic by hand, DeepSpeed's own classes, and published runs."""

import dataclasses

import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers import MixtralConfig

from pardemo.planner import examples, hardware, models, timing, validate
from pardemo.planner.dryrun import dry_run
from pardemo.planner.job import Adapter, RankJob
from pardemo.planner.layouts import engine_rules
from pardemo.planner.records import Recorder
from pardemo.planner.timing import Rates

PLAIN = {
    "shares": (("forward", 1.0), ("recomputation", 1.0), ("backward", 1.0)), "memory_share": 1.0, "small_tokens": 0,
    "launch_s": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def small():
    """One rank's step of 4 × 128 tokens, full fine-tuning, nothing recomputed."""
    return dry_run(examples.job("llama", "plain", 1, False, False).but(on_gpu=True))


def sharded(found, engine, ranks, each=0.0, once=0.0, **zero):
    """``found`` as if it had been made under an engine that sends so many bytes."""
    job = found.job.but(engine=engine, ranks=ranks, zero=zero)
    return dataclasses.replace(found, job=job, sent={"backward": each, "step": once})


def test_time_is_work_over_rates(small):
    rates = Rates(1e12, 1e30, 1e9, 1e9, **PLAIN)
    one = timing.step_time(small, 4, 1, 1, rates)
    assert one.products == pytest.approx(sum(small.flops.values()) / 1e12)
    assert timing.step_time(small, 8, 3, 1, rates).products == pytest.approx(6 * one.products)
    piped = timing.step_time(small, 4, 4, 1, rates, pp=2)
    assert piped.bubble == pytest.approx((piped.products + piped.memory) / 4)  # (p − 1)/m of the ideal time


def test_the_update_is_counted_once_a_step(small):
    rates = Rates(1e30, 1e9, 1e9, 1e9, **PLAIN)
    one, four = (timing.step_time(small, 4, m, 1, rates).memory for m in (1, 4))
    update = small.step_traffic / 1e9
    # parameter, gradient and two moments read and written, in the plain engine's bf16; the kernel may write gradients
    assert update == pytest.approx(2 * 4 * 2 * small.trained_params / 1e9, rel=0.01)
    assert four - update == pytest.approx(4 * (one - update))


def test_small_micro_batches_take_longer(small):
    rates = Rates(1e12, 1e30, 1e9, 1e9, **PLAIN | {"small_tokens": 512})
    large, little = (timing.step_time(small, b, 8 // b, 1, rates).products for b in (8, 1))
    tokens = small.job.sequence
    assert little / large == pytest.approx((1 + 512 / tokens) / (1 + 512 / (8 * tokens)))


def test_a_micro_batch_takes_as_long_as_launching_its_kernels(small):
    assert small.kernels["forward"] > 4 * 10  # four layers of more than ten operations
    launched = small.kernels["forward"] + small.kernels["backward"]
    fast = Rates(1e30, 1e30, 1e9, 1e9, **PLAIN | {"launch_s": 1e-5})
    assert timing.step_time(small, 4, 3, 1, fast).launching == pytest.approx(3 * launched * 1e-5)
    slow = Rates(1e9, 1e30, 1e9, 1e9, **PLAIN | {"launch_s": 1e-5})  # the GPU is busy for longer than that
    assert timing.step_time(small, 4, 3, 1, slow).launching == 0


def test_a_ring_leaves_each_host_once():
    rates = Rates(1e12, 1e12, within=200e9, between=12.5e9, host_gpus=8)
    share = timing.LINK_SHARE
    assert rates.ring(8) == 200e9 * share  # inside
    assert rates.ring(16) == 12.5e9 * share  # two hosts: all of the adapters' rate, not an eighth
    assert rates.ring(8, beside=2) == 12.5e9 / 2 * share  # tp 2: two rings of 8 leave each host
    assert rates.ring(4, beside=2) == 200e9 * share
    assert rates.ring(2, beside=16) == 12.5e9 / 8 * share  # tp over two hosts: each GPU has a ring of its own


def test_a_ring_between_hosts_takes_what_an_emulated_cluster_took():
    """8 MiB all-reduced by 2 hosts × 2 ranks, 200 Mbit/s a host: 0.451 to 0.486 s (tbf on a veth), a flat ring."""
    rates = Rates(1e12, 1e12, within=250e6, between=25e6, host_gpus=2)
    seconds = 2 * 3 / 4 * (8 << 20) / (rates.ring(4) / timing.LINK_SHARE)
    assert seconds == pytest.approx(0.47, rel=0.1)  # the first segments wait in buffers


def test_two_hosts_by_hand(small):
    """13.9e9 gradients of 2 bytes on 16 GPUs: 3Ψ·15/16 = 78.2 GB through 100 Gbit/s a host."""
    psi = 2 * 13.9e9
    found = sharded(small, "zero-2", 16, 2 * 15 / 16 * psi, 15 / 16 * psi)
    rates = Rates(312e12, 2039e9, 200e9, 100e9 / 8, 8)
    time = timing.step_time(found, 1, 1, 16, rates)
    assert time.data_parallel == pytest.approx(3 * 15 / 16 * psi / (12.5e9 * timing.LINK_SHARE))


@pytest.mark.parametrize(
    ("engine", "zero", "psi"),
    [
        # measured on real ranks in *ZeRO's traffic*: 2, 3, 2m + 1 and, with a reduce to each owner, m + 1 on a ring
        ("zero-0", {}, lambda m: 2),
        ("zero-1", {}, lambda m: 3),
        ("zero-2", {}, lambda m: 2 * m + 1),
        ("zero-2", {"use_multi_rank_bucket_allreduce": False}, lambda m: m + 1),
        ("zero-3", {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0,
                    "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}, lambda m: 3 * m),
    ],
)  # fmt: skip
def test_what_deepspeed_sends(engine, zero, psi):
    job = examples.job("llama", engine, 4, False, False).but(zero=zero)
    found = dry_run(job)
    unit = 2 * found.params * 3 / 4
    for m in (1, 4):
        sent = timing.step_time(found, 4, m, 4, Rates(1e12, 1e12, 1e9, 1e9)).sent_bytes
        assert sent == pytest.approx(psi(m) * unit, rel=0.01)  # norms and flags besides
    wider = timing.step_time(found, 4, 1, 64, Rates(1e12, 1e12, 1e9, 1e9)).sent_bytes
    assert wider == pytest.approx(psi(1) * 2 * found.params * 63 / 64, rel=0.01)


def test_bytes_of_several_ranks_are_not_told_by_one(small):
    with pytest.raises(ValueError, match="does not tell what 4 send"):
        timing.step_time(small, 4, 1, 4, Rates(1e12, 1e12, 1e9, 1e9))


@pytest.mark.parametrize("told", [None, True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlap_is_what_deepspeed_reads_of_the_configuration(small, stage, told):
    zero = {} if told is None else {"overlap_comm": told}
    job = small.job.but(engine=f"zero-{stage}", ranks=4, zero=zero)
    assert timing.overlaps(job) == DeepSpeedZeroConfig(stage=stage, **zero).overlap_comm


def test_only_what_overlaps_is_hidden(small):
    rates = Rates(1e9, 1e30, 1e9 / timing.LINK_SHARE, 1e9, 8, **PLAIN)
    busy = sum(small.flops.values()) / 1e9
    for overlap, expected in ((False, 2.5), (True, max(1.5 - 0.8 * 2 / 3 * busy, 0.2 * 1.5) + 1.0)):
        found = sharded(small, "zero-2", 4, 1.5e9, 1.0e9, overlap_comm=overlap)  # 1.5 s a micro-batch, 1 s at the end
        assert timing.step_time(found, 4, 1, 4, rates).data_parallel == pytest.approx(expected)
    stage_1 = sharded(small, "zero-1", 4, 1.5e9, 1.0e9)
    assert timing.step_time(stage_1, 4, 5, 4, rates).data_parallel == pytest.approx(2.5)  # once, however many


@pytest.mark.parametrize(("checkpointing", "reduces"), [(False, 4), (True, 6)])
@pytest.mark.parametrize("pp", [1, 2])
def test_tensor_parallel_traffic_by_hand(small, pp, checkpointing, reduces):
    """Attention and MLP: an all-reduce forward, one backward, and one when they are made again (2205.05198, 4.2)."""
    config, rates = small.job.config, Rates(1e12, 1e12, 50e9, 1e9, 8)
    found = dataclasses.replace(small, job=small.job.but(checkpointing=checkpointing))
    time = timing.step_time(found, 4, 3, 1, rates, tp=2, pp=pp)
    one = 2 * (2 - 1) / 2 * 4 * 128 * config.hidden_size * 2  # an all-reduce of 4 × 128 × h in bf16
    sent = 3 * config.num_hidden_layers / pp * reduces * one
    assert time.tensor_parallel == pytest.approx(sent / (50e9 * timing.LINK_SHARE))
    assert time.sent_bytes == pytest.approx(sent)


def test_tensor_parallel_ranks_each_move_the_whole_residual_stream(small):
    """Norms and sums of the stream are made on all ranks (1909.08053, 3); heads and the MLP's width are cut."""
    traffic = {"model.layers.0.self_attn": 6e9, "model.layers.1.mlp.act_fn": 2e9, "model.layers.1.mlp.down_proj": 3e9,
               "model.layers.0.input_layernorm": 5e9, "model.norm": 4e9}  # fmt: skip
    found = dataclasses.replace(small, traffic=traffic, step_traffic=0)
    rates = Rates(1e30, 1e9, 1e9, 1e9, **PLAIN)
    for tp, seconds in ((1, 20), (2, (6 + 2) / 2 + 3 + 5 + 4), (4, (6 + 2) / 4 + 3 + 5 + 4)):
        assert timing.step_time(found, 4, 1, 1, rates, tp=tp).memory == pytest.approx(seconds)


def test_the_update_is_of_the_parameters_that_a_rank_has(small):
    rates = Rates(1e30, 1e9, 1e9, 1e9, **PLAIN)
    alone = dataclasses.replace(small, traffic={})
    update = 2 * 4 * 2 * small.trained_params / 1e9  # as in test_the_update_is_counted_once_a_step
    cut = timing.step_time(alone, 4, 1, 1, rates, tp=2, pp=2)
    assert cut.memory == pytest.approx(update / 4, rel=0.01)
    assert timing.step_time(alone, 4, 1, 1, rates, offload="optimizer").memory == 0  # the host's, and in its time


# Published runs. Full fine-tuning of LLaMA-7B (6.74e9) on 8 A800s, 64 samples of 4,096 tokens a step, in samples/s.
PSI = 6.738e9
RATES_A800 = validate.rates_of(hardware.gpu("A800-80GB"))


@pytest.mark.parametrize(
    ("stage", "accumulation", "without", "offloaded"),
    [(2, 8, 4.19, 1.81), (3, 4, 4.45, 2.05)],
)
def test_offload_costs_what_a_published_run_paid(small, stage, accumulation, without, offloaded):
    found = dataclasses.replace(small, params=int(PSI), trained_params=int(PSI))
    found = sharded(found, f"zero-{stage}", 8)
    seconds = timing.offload_seconds(found, "optimizer", accumulation, 8, 1, RATES_A800)
    assert seconds == pytest.approx(64 / offloaded - 64 / without, rel=0.25)  # of 20.1 s and of 16.8 s
    assert timing.offload_seconds(found, "none", accumulation, 8, 1, RATES_A800) == 0


def test_offload_by_hand(small):
    """Falcon-7B, 7.2e9, one micro-batch (DeepSpeed issue 3901): 9.60 s a step of which 2.9 are the same without."""
    found = dataclasses.replace(small, params=int(7.2e9), trained_params=int(7.2e9))
    found = sharded(found, "zero-2", 8)
    seconds = timing.offload_seconds(found, "optimizer", 1, 8, 1, RATES_A800)
    copied = 7.2e9 * (4 + 2) / engine_rules.HOST_COPY_BYTES_PER_S
    assert seconds == pytest.approx(copied + 7.2e9 / engine_rules.HOST_ADAM_PARAMS_PER_S)
    assert seconds == pytest.approx(9.60 - 2.9, rel=0.3)
    # two hosts update half each; under stage 1 gradients wait on the GPU for the last micro-batch
    assert timing.offload_seconds(sharded(found, "zero-2", 16), "optimizer", 1, 16, 1, RATES_A800) == seconds / 2
    stage_1 = sharded(found, "zero-1", 8)
    assert timing.offload_seconds(stage_1, "optimizer", 4, 8, 1, RATES_A800) == pytest.approx(seconds)


def test_offloaded_parameters_come_for_every_pass(small):
    """Forward and backward, and again to make a layer's activations again: 2 bytes of each, frozen or not."""
    frozen = dataclasses.replace(small, params=int(13.9e9), trained_params=int(6.6e6))
    for checkpointing, passes in ((True, 3), (False, 2)):
        found = sharded(frozen, "zero-3", 8)
        found = dataclasses.replace(found, job=found.job.but(checkpointing=checkpointing))
        some, all_of_it = (
            timing.offload_seconds(found, how, 4, 8, 1, RATES_A800) for how in ("optimizer", "optimizer+parameters")
        )
        assert all_of_it - some == pytest.approx(4 * passes * 2 * 13.9e9 / engine_rules.HOST_COPY_BYTES_PER_S)


def test_offloaded_parameters_cost_what_a_published_run_paid(small):
    """Stage 3, recomputed, micro-batches of 4: 2.06 samples/s; without offload 4.45 with those of 2, 4.73 of 8."""
    found = dataclasses.replace(small, params=int(PSI), trained_params=int(PSI))
    found = sharded(found, "zero-3", 8)
    found = dataclasses.replace(found, job=found.job.but(checkpointing=True))
    seconds = timing.offload_seconds(found, "optimizer+parameters", 2, 8, 1, RATES_A800)
    assert seconds == pytest.approx(64 / 2.06 - 64 / 4.6, rel=0.25)  # of 17.2 s


@pytest.fixture(scope="module")
def llama():
    found = dry_run(RankJob(models.find("llama2-7b"), batch=2, sequence=4096))
    return sharded(found, "zero-2", 8, 2 * 7 / 8 * 2 * PSI, 7 / 8 * 2 * PSI)


def samples_per_s(found, batch):
    return 64 / timing.step_time(found, batch, 8 // batch, 8, RATES_A800).seconds


def test_samples_a_second_of_published_runs_on_the_articles_gpus(llama):
    for batch, known in ((1, 4.19), (4, 4.69)):
        assert samples_per_s(llama, batch) == pytest.approx(known, rel=0.15)
    assert samples_per_s(llama, 4) / samples_per_s(llama, 1) == pytest.approx(4.69 / 4.19, rel=0.05)


def test_samples_a_second_of_a_published_run_with_offload(llama):
    seconds = timing.step_time(llama, 1, 8, 8, RATES_A800, offload="optimizer").seconds
    assert 64 / seconds == pytest.approx(1.81, rel=0.15)


def test_tokens_a_second_of_published_runs_on_h100():
    sizes, runs = validate.NANOTRON["1.34B"]
    found = dry_run(RankJob(validate.nanotron_config(*sizes), batch=2, sequence=4096, checkpointing=False))
    rates = validate.rates_of(hardware.gpu("H100"))
    for batch, known in runs.items():
        seconds = timing.step_time(found, batch, 32 // batch, 1, rates).seconds
        assert 32 * 4096 / seconds == pytest.approx(known, rel=0.12)


def test_an_a800_is_an_a100_with_a_slower_link():
    a800, a100 = hardware.gpu("A800-80GB"), hardware.gpu("A100-80GB")
    assert a800.flops == a100.flops == 312e12  # dense bf16, NVIDIA's A100 datasheet
    assert a800.memory_bytes_per_s == a100.memory_bytes_per_s == 2039e9
    assert (a800.link_bytes_per_s, a100.link_bytes_per_s) == (200e9, 300e9)  # one way of 400 and 600 GB/s


def test_experts_operations_are_those_of_the_chosen_ones():
    hidden, middle, layers, vocabulary, tokens, chosen = 64, 96, 2, 128, 2 * 32, 2
    config = MixtralConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=middle, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=chosen,
        max_position_embeddings=512,
    )  # fmt: skip
    found = dry_run(RankJob(config, batch=2, sequence=32, checkpointing=False))
    products = layers * (4 * hidden**2 + 8 * hidden + chosen * 3 * hidden * middle) + hidden * vocabulary
    attention = layers * 2 * 2 * 32 * 32 * hidden * 2
    forward = 2 * tokens * products + attention
    assert found.flops["forward"] == forward
    # twice the products backward, and of attention five products for two: the scores are made again
    assert found.flops["backward"] == pytest.approx(2 * 2 * tokens * products + 2.5 * attention, rel=0.02)


def test_a_product_that_nobody_counts_is_refused():
    recorder = Recorder()
    a = torch.zeros(32, 32, dtype=torch.int8)
    with recorder, recorder.phase("forward"), pytest.raises(ValueError, match="uses aten::_int_mm: nobody counts"):
        torch._int_mm(a, a)


def test_lora_sends_and_updates_the_adapters_alone():
    job = examples.job("llama", "zero-2", 4, True, True)
    found = dry_run(job.but(adapter=Adapter(target=("q_proj", "v_proj"))))
    sent = timing.step_time(found, 4, 1, 4, Rates(1e12, 1e12, 1e9, 1e9)).sent_bytes
    assert sent == pytest.approx(3 * 3 / 4 * 2 * found.trained_params, rel=0.01)
