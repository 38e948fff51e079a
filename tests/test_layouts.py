"""Layouts: shapes of models, a step's time and memory, what is impossible, and the search."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING

from pardemo.pipeline_parallel import Schedule, interleaved, one_f_one_b, zb_h1
from pardemo.pipeline_parallel.timetable import chart
from pardemo.planner import hardware, models
from pardemo.planner.dry_run.engines import outline
from pardemo.planner.job import RankJob as DryJob
from pardemo.planner.layouts import configurations, explanations, programs
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import facts
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import in_flight, predict_memory
from pardemo.planner.layouts.search import layouts, search
from pardemo.planner.layouts.shape import Experts, Shape
from pardemo.planner.layouts.step import predict_step, stage_layers

LLAMA = configurations.shape_of_config(models.find("llama3-70b"))
SMALL = Shape(8, 1024, 16, 4, 2816, 32000)


def job(what=SMALL, gpus=8, gpu="H100", host_gpus=8, between=400e9, program="megatron-core", sequence=4096, **more):
    machine = Machine(hardware.gpu(gpu), gpus, min(gpus, host_gpus), between)
    return Job(what, machine, programs.find_program(program), sequence, **more)


@pytest.mark.parametrize(
    "name", [name for name in configurations.MODELS if not name.startswith(("baichuan", "llama3.1-405"))]
)
def test_a_shape_has_the_models_parameters(name):
    config = models.find(name)
    real = sum(p.numel() for p in outline(DryJob(config, sequence=8)).parameters())
    assert configurations.shape_of_config(config).params == pytest.approx(real, rel=2e-3), (
        "biases and heads' norms are left out"
    )


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}),
        ("deepseek_v3", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_group": 1,
                         "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64, "q_lora_rank": 96,
                         "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_shared_experts": 1}),
        ("falcon", {"multi_query": True}),
        ("gpt_neox", {}),
        ("opt", {"ffn_dim": 512, "word_embed_proj_dim": 256}),
        ("gemma2", {"head_dim": 64}),
    ],
)  # fmt: skip
def test_a_shape_of_another_architecture_has_its_parameters(kind, sizes):
    config = CONFIG_MAPPING[kind](
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512, vocab_size=1000,
        max_position_embeddings=128, **({"num_key_value_heads": 4} | sizes),
    )  # fmt: skip
    real = sum(p.numel() for p in outline(DryJob(config, sequence=8)).parameters())
    assert configurations.shape_of_config(config).params == pytest.approx(real, rel=0.02)


@pytest.mark.parametrize(
    ("kind", "told"), [("mamba", "state spaces"), ("jamba", "state spaces"), ("minimax", "linear attention")]
)
def test_layers_that_are_not_attention_are_refused(kind, told):
    if kind == "mamba":
        config = CONFIG_MAPPING["llama"](num_hidden_layers=2)
        config.model_type = kind
    else:
        config = CONFIG_MAPPING[kind]()
    with pytest.raises(ValueError, match=told) as error:
        configurations.shape_of_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("layout", "what", "told"),
    [
        (
            Layout(pp=4, dp=2, chunks=2, accumulation=4, schedule="zb-h1"),
            SMALL,
            "2 chunks are 1F1B's, interleaved",
        ),
        (Layout(pp=4, dp=2, chunks=2, accumulation=3), SMALL, "multiples of PP 4, not 3"),
        (Layout(dp=8, ep=8), replace(SMALL, experts=Experts(6, 2, 512)), "6 experts do not divide by EP 8; 1, 2, 3, 6"),
        (
            Layout(dp=2, tp=4, ep=16),
            replace(SMALL, experts=Experts(16, 2, 512)),
            "EP 16 does not divide the 8 ranks of TP",
        ),
        (Layout(dp=8, shard_group=4), SMALL, "groups of 4 that share states"),
        (Layout(dp=8, sharding="zero3", shard_group=3), SMALL, "groups of 3 that share states do not divide 8"),
    ],
)
def test_an_impossible_layout_is_one_line(layout, what, told):
    with pytest.raises(ValueError, match=told) as error:
        check_layout(layout, what, 8, 4096)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"tp": 0}, "tp must be a whole number of at least 1, not 0"),
        ({"pp": 2.0}, "pp must be"),
        ({"sharding": "zero4"}, "sharding must be one of none, zero1, zero2, zero3, not 'zero4'"),
        ({"recompute": "some"}, "recompute must be one of"),
        ({"schedule": "dual"}, "schedule must be one of"),
    ],
)
def test_a_value_that_is_none_is_told(values, told):
    with pytest.raises(ValueError, match=told):
        Layout(**values)


def test_tensor_parallelism_beyond_a_host_is_allowed_and_has_its_price():
    inside = predict_step(job(LLAMA, 64), Layout(tp=8, dp=8, micro_batch=1, sequence_parallel=True))
    across = predict_step(job(LLAMA, 64), Layout(tp=16, dp=4, micro_batch=2, sequence_parallel=True))
    slow = predict_step(job(LLAMA, 64, between=1e9), Layout(tp=16, dp=4, micro_batch=2, sequence_parallel=True))
    of = "tensor-parallel traffic"
    assert across.parts[of] > 2 * inside.parts[of], "of the same tokens"
    assert slow.parts[of] > 50 * across.parts[of], "what is between hosts counts"


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8), (4, 12), (8, 16)])
@pytest.mark.parametrize(
    ("order", "kind", "chunks"), [(one_f_one_b, "1f1b", 1), (interleaved, "1f1b", 2), (zb_h1, "zb-h1", 1)]
)
def test_a_pipelines_time_is_its_timetables(order, kind, chunks, ranks, micro):
    free = programs.MEGATRON.but(send_s=0.0)
    what = replace(SMALL, layers=16, vocabulary=1)
    fast = replace(hardware.gpu("H100"), link_bytes_per_s=1e30)
    given = Job(what, Machine(fast, ranks, ranks, 1e30, 0.0, 0.0), free, 4096)
    layout = Layout(pp=ranks, accumulation=micro, chunks=chunks, schedule=kind)
    found = predict_step(given, layout)
    alone = predict_step(given, Layout(pp=1, accumulation=1))
    busy = (alone.seconds - alone.parts["optimizer"]) / ranks  # a stage's micro-batch
    schedule = Schedule(order, ranks, micro, chunks)
    told = chart(schedule, forward=busy / 3, backward=2 * busy / 3).makespan
    assert found.seconds - found.parts["optimizer"] == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(("tp", "cp", "dp", "pp"), [(8, 1, 1, 8), (2, 2, 1, 16), (2, 1, 1, 32), (1, 1, 2, 32)])
def test_a_pipeline_across_hosts_waits_for_the_link_between_them(tp, cp, dp, pp):
    """Also where neighbouring stages share a host: those on its edge have their neighbour on the next one."""
    layout = Layout(tp=tp, cp=cp, dp=dp, pp=pp, accumulation=64, sharding="zero1", sequence_parallel=tp > 1)
    seconds = [
        predict_step(job(LLAMA, 64, between=rate), layout).parts["pipeline messages"] for rate in (400e9, 1e9, 1e6)
    ]
    assert seconds[0] < seconds[1] < seconds[2] / 100
    alone = job(LLAMA, 64, host_gpus=64, between=1e6)
    assert predict_step(alone, layout).parts["pipeline messages"] < seconds[0], "on one host nothing crosses"


def test_hops_between_hosts_are_counted_and_share_their_adapters():
    """8 GPUs a host: with every 4th rank a stage, stages 0 and 1 are on one host, and 4 ranks send to the next."""
    machine = Machine(hardware.gpu("H100"), 64, 8, between=8e9)
    assert [machine.crossings(pp, stride) for pp, stride in ((16, 4), (8, 8), (4, 16), (2, 4), (3, 4), (64, 1))] == [
        7, 7, 3, 0, 1, 7,
    ]  # fmt: skip
    nbytes, share = 10**9, machine.link_share
    assert machine.send(nbytes, 4, leaves=True) == pytest.approx(machine.latency_between + nbytes * 4 / 8e9 / share)
    assert machine.send(nbytes, 8) == pytest.approx(machine.latency_between + nbytes * 8 / 8e9 / share)
    assert machine.send(nbytes, 4) == machine.send(nbytes, 4, leaves=False)


def test_the_search_cuts_stages_into_chunks_of_one_size():
    given = replace(LLAMA, layers=30)
    found = [one for one in layouts(given, Machine(hardware.gpu("H100"), 64), 64, 4096) if one.chunks > 1]
    assert {(one.pp, one.chunks) for one in found if one.pp == 2} == {(2, 3), (2, 5)}
    assert all(-(-30 // one.pp) % one.chunks == 0 for one in found)


def test_the_slowest_stage_sets_the_pace():
    given = job(LLAMA, 64)
    even, uneven = Layout(tp=8, pp=8, accumulation=64), Layout(tp=4, pp=16, accumulation=64)
    assert stage_layers(given, even) == [10] * 8
    found = stage_layers(job(replace(LLAMA, layers=82), 64), uneven)
    assert found == [6] * 3 + [5] * 12 + [4], "the loss has a layer's place on the last one"


#: Korthikanti et al. 2022 (arXiv 2205.05198), figure 1: GiB of activations without anything, and with sequence
#: parallelism and selective recomputation. Layers, width, heads, pipeline, micro-batch; three chunks.
FIGURE_1 = {
    "22B": (48, 6144, 64, 1, 4, 59.25, 9.56),
    "175B": (96, 12288, 96, 8, 1, 66.84, 12.35),
    "530B": (105, 20480, 128, 35, 1, 114.02, 23.08),
    "1T": (128, 25600, 160, 64, 1, 131.25, 26.56),
}


@pytest.mark.parametrize("name", FIGURE_1)
def test_activations_are_korthikantis(name):
    layers, hidden, heads, pp, batch, plain, selective = FIGURE_1[name]
    what = Shape(layers, hidden, heads, heads, 4 * hidden, 51200, gated=False, tied=True)
    given = job(what, 8 * pp, "A100-80GB", program="megatron-2022", sequence=2048, fused=False)
    layout = Layout(tp=8, pp=pp, micro_batch=batch, accumulation=512, chunks=3 if 1 < pp < 64 else 1)
    for told, one in ((plain, layout), (selective, layout.but(recompute="selective", sequence_parallel=True))):
        assert predict_memory(given, one).lines["activations"] / 2**30 == pytest.approx(told, rel=0.06)


def test_states_are_16_or_18_bytes_and_are_shared():
    for sharding, whole in (("none", 18), ("zero1", 6 + 12 / 8), ("zero2", 2 + 16 / 8), ("zero3", 18 / 8)):
        lines = predict_memory(
            replace(job(), program=programs.MEGATRON.but(bucketed_gradients=0)), Layout(dp=8, sharding=sharding)
        ).lines
        states = sum(lines[name] for name in ("parameters", "gradients", "optimizer states"))
        assert states == pytest.approx(whole * SMALL.params, rel=1e-3)


def test_micro_batches_in_flight():
    layout = Layout(pp=4, accumulation=8)
    assert [in_flight(layout, place) for place in range(4)] == [4, 3, 2, 1]
    assert in_flight(layout.but(chunks=2), 0) == pytest.approx(4 + 3 / 2)
    assert {in_flight(layout.but(schedule="zb-h1"), place) for place in range(4)} == {4}
    assert in_flight(layout.but(accumulation=2), 0) == 2


@settings(max_examples=60, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]), pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    micro=st.sampled_from([1, 2, 4]), m=st.sampled_from([4, 8]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sharding=st.sampled_from(["none", "zero1", "zero3"]), experts=st.booleans(),
)  # fmt: skip
def test_more_work_takes_longer_and_nothing_is_negative(tp, pp, cp, micro, m, recompute, sharding, experts):
    what = replace(SMALL, experts=Experts(8, 2, 1024)) if experts else SMALL
    given = job(what, 64)
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=64 // (tp * pp * cp), micro_batch=micro, accumulation=m,
                    recompute=recompute, sharding=sharding)  # fmt: skip
    found, twice = predict_step(given, layout), predict_step(given, layout.but(accumulation=2 * m))
    assert all(value >= 0 and math.isfinite(value) for value in (*found.parts.values(), found.mfu))
    assert found.mfu < 1
    assert twice.seconds > found.seconds
    held = predict_memory(given, layout)
    assert all(value >= 0 for value in held.lines.values())
    assert predict_memory(given, layout.but(micro_batch=2 * micro)).peak_bytes > held.peak_bytes
    if recompute == "none":
        assert predict_memory(given, layout.but(recompute="full")).lines["activations"] < held.lines["activations"]


def test_experts_on_several_ranks_take_less_memory_and_talk():
    what = replace(SMALL, experts=Experts(16, 2, 4096))
    whole, spread = (predict_step(job(what), Layout(dp=8, ep=ep)) for ep in (1, 8))
    assert "expert-parallel traffic" not in whole.parts
    assert spread.parts["expert-parallel traffic"] > 0
    less = [predict_memory(job(what), Layout(dp=8, ep=ep)).lines["optimizer states"] for ep in (1, 8)]
    assert less[1] < less[0] / 4


@pytest.mark.parametrize(("ep", "sharding"), [(1, "zero1"), (8, "zero1"), (8, "zero3"), (4, "zero3"), (2, "zero2")])
def test_all_ranks_together_keep_each_experts_states_once(ep, sharding):
    """However experts are spread: what is shared is there once, by the formula's 12 bytes a parameter."""
    what = replace(SMALL, experts=Experts(16, 2, 4096))
    layout, bare = Layout(dp=8, ep=ep, sharding=sharding), programs.MEGATRON.but(state_bytes=12.0)
    lines = predict_memory(replace(job(what), program=bare), layout).lines
    assert 8 * lines["optimizer states"] == pytest.approx(12 * what.params, rel=1e-6)
    if sharding == "zero3":
        assert 8 * lines["parameters"] == pytest.approx(bare.weight_bytes * what.params, rel=1e-6)


def test_a_model_of_experts_that_does_not_fit_is_not_said_to():
    """Mixtral 8 × 7B in full: 46.7 billion parameters of 18 bytes are more than eight GPUs of 80 GB have."""
    mixtral = configurations.shape_of_config(CONFIG_MAPPING["mixtral"](num_hidden_layers=32, vocab_size=32000))
    assert mixtral.params == pytest.approx(46.7e9, rel=0.01)
    assert search(job(mixtral, 8, between=12.5e9), 8).best == ()


def test_a_layer_as_measured_takes_the_place_of_what_a_rank_computes():
    guessed = job(program="nanotron")
    measured = replace(guessed, program=guessed.program.but(layer_s=0.03))
    layout = Layout(tp=4, dp=2, sharding="zero1")
    before, after = predict_step(guessed, layout).parts, predict_step(measured, layout).parts
    assert after["layers as measured"] == pytest.approx(8 * 0.03)
    assert after["tensor-parallel traffic"] == before["tensor-parallel traffic"]
    assert not after.keys() & {"attention", "launching kernels"}
    again = predict_step(measured, layout.but(recompute="full")).parts
    assert again["layers as measured"] == pytest.approx(4 / 3 * 8 * 0.03)
    assert "0.03 s" in explanations.constants_of_parts(measured)["layers as measured"]


def test_links_reach_what_the_machine_says():
    usual, whole = (Machine(hardware.gpu("H100"), 16, link_share=share) for share in (0.8, 1.0))
    assert usual == Machine(hardware.gpu("H100"), 16)
    for ranks in (8, 16):
        assert usual.rate(ranks) == pytest.approx(0.8 * whole.rate(ranks))
    for share in (0, 1.2):
        with pytest.raises(ValueError, match="of a link's rate"):
            Machine(hardware.gpu("H100"), link_share=share)


@pytest.mark.parametrize("name", configurations.MODELS)
def test_a_model_that_needs_no_file_is_the_same_without_transformers(name):
    config, plain = models.find(name), configurations.find_configuration(name)
    assert type(plain) is not type(config)
    assert configurations.shape_of_config(plain) == configurations.shape_of_config(config)
    assert facts.model_of(plain, configurations.shape_of_config(plain), name) == facts.model_of(
        config, configurations.shape_of_config(config), name
    )
