"""The planner's memory against arithmetic written out by hand: no line of it comes from the planner."""

import pytest
from dry_rows import dry_rows
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig

from pardemo.planner import hardware
from pardemo.planner.dry_run import allocator, footprint, memory_curve
from pardemo.planner.fine_tune import plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuning import Tuning

V, H, MIDDLE, LAYERS, HEADS = 32_000, 2048, 5632, 2, 16
B, S = 8, 1024
AT_B = Layout(micro_batch=B)
BLOCK = 4 * H * H + 3 * H * MIDDLE + 2 * H  # q, k, v, o; gate, up, down; two norms
PSI = 2 * V * H + LAYERS * BLOCK + H
#: Cross-entropy in fp32: log-softmax, its gradient, and the gradient that has just been made of it.
LOGITS = 12 * B * S * V
#: What checkpointing keeps: each layer's input, in bf16.
CHECKPOINTS = LAYERS * B * S * H * 2
MIB = 1 << 20


def llama(**changes):
    sizes = {"hidden_size": H, "intermediate_size": MIDDLE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    return LlamaConfig(vocab_size=V, **{**sizes, **changes})


def job(engine="zero-1", ranks=4, **changes):
    return RankJob(changes.pop("config", None) or llama(), **{"batch": B, "sequence": S} | changes).but(
        engine=engine, ranks=ranks
    )


def at_b(engine, ranks=4):
    """The curve at the micro-batch of :func:`job` alone, from one dry run in place of two."""
    return memory_curve.Curve(job(engine, ranks), scales=False)


@pytest.fixture(scope="module")
def plain():
    return memory_curve.Curve(job("plain", 1))


def test_a_plain_step_line_by_line(plain):
    lines = plain.estimate(AT_B).lines
    assert lines["parameters"] == pytest.approx(2 * PSI, rel=0.001)
    assert lines["optimizer states"] == pytest.approx(2 * 2 * PSI, rel=0.001)  # torch's AdamW keeps bf16's type
    assert lines["logits"] == LOGITS
    # beside them the last norm's input and output: in bf16, in fp32, normalised, and its gradient
    assert CHECKPOINTS < lines["activations"] < CHECKPOINTS + 20 * B * S * H
    assert lines["gradients"] == 0  # none is there yet when the logits' gradient is


def test_gradients_at_the_end_of_a_backward_pass_without_many_logits():
    found = memory_curve.run(job("plain", 1, batch=1, sequence=16))
    assert found.peak_phase == "backward"
    assert found.lines["gradients"] == pytest.approx(2 * PSI, rel=0.01)
    assert found.peak_bytes == pytest.approx(2 * PSI + 2 * PSI + 4 * PSI, rel=0.01)


def test_gradients_of_earlier_micro_batches_stay():
    asked = request(gpus=4, samples_per_step=16 * B, batches=(B,))
    (one,) = dry_rows(asked)
    assert one.layout.accumulation == 4
    lines = one.memory.lines
    assert lines["logits"] == LOGITS
    assert lines["gradients"] == pytest.approx(2 * PSI, rel=0.001)
    assert lines["optimizer states"] == pytest.approx(12 * PSI / 4, rel=0.001)
    alone = dry_rows(request(gpus=4, samples_per_step=4 * B, batches=(B,)))[0]
    assert (alone.layout.accumulation, alone.memory.lines["gradients"]) == (1, 0)


def request(gpus, room=None, **changes):
    gpu = hardware.gpu("A800-80GB")
    if room is not None:
        gpu = hardware.Gpu("toy", room, gpu.flops, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, "made up")
    whole = {"checkpointing": (True,), "host_states": ("none",), "engines": ("zero-1",), "steps": 1}
    return plan_table.Request(job("zero-0", 1), Machine(gpu, gpus), **whole | changes)


def test_states_are_cut_by_data_parallel_ranks_not_by_all_gpus():
    asked = request(gpus=8, tp=2, samples_per_step=4 * B, batches=(B,))
    (one,) = dry_rows(asked)
    assert one.memory.lines["parameters"] == pytest.approx(2 * PSI / 2, rel=0.001)
    assert one.memory.lines["optimizer states"] == pytest.approx(12 * PSI / 2 / 4, rel=0.001)


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_have_their_part_of_the_vocabulary(plain, tp):
    lines = plain.estimate(AT_B.but(tp=tp)).lines
    assert lines["logits"] == LOGITS / tp
    assert lines["parameters"] == plain.estimate(AT_B).lines["parameters"] / tp
    # checkpoints are the residual stream, whole on each rank
    assert CHECKPOINTS <= lines["activations"] <= plain.estimate(AT_B).lines["activations"]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_pipeline_stage_holds_the_activations_of_micro_batches_in_flight(plain, in_flight):
    step = AT_B.but(accumulation=in_flight)
    whole, stage = plain.estimate(step).lines, plain.estimate(step.but(pp=2)).lines
    assert stage["activations"] == whole["activations"] * in_flight / 2
    assert stage["activations"] >= in_flight * CHECKPOINTS / 2
    assert stage["parameters"] == pytest.approx(2 * PSI / 2, rel=0.001)


def test_the_plan_counts_micro_batches_in_flight():
    def activations(samples):
        asked = request(gpus=8, pp=2, samples_per_step=samples, batches=(B,))
        (one,) = dry_rows(asked)
        return one.layout.accumulation, one.memory.lines["activations"]

    (alone, few), (more, many) = activations(4 * B), activations(16 * B)
    assert (alone, more) == (1, 4)
    assert few >= CHECKPOINTS / 2
    assert many == pytest.approx(2 * few, rel=0.01)  # two stages hold two micro-batches


def test_an_engines_buckets_are_cut_with_the_layers():
    found = at_b("fsdp2")
    whole, half = found.estimate(AT_B).lines, found.estimate(AT_B.but(tp=2)).lines
    assert whole["buckets"] > 2 * BLOCK / 4
    assert half["buckets"] == whole["buckets"] / 2
    assert half["gathered parameters"] == whole["gathered parameters"] / 2
    deepspeeds = at_b("zero-3")  # its bucket of 5e8 elements has one size
    assert deepspeeds.estimate(AT_B.but(tp=2)).lines["buckets"] >= 2 * 500_000_000


@pytest.mark.parametrize("engine", ["zero-3", "fsdp2"])
def test_a_sharded_step_is_not_measured_by_how_the_model_was_built(engine):
    found = at_b(engine).estimate(AT_B)
    tensors = sum(found.lines[name] for name in memory_curve.LINES)
    built = (2 if engine == "zero-3" else 4) * PSI
    assert built <= found.building_bytes - memory_curve.CONTEXT_BYTES <= 1.5 * built + 1.1e9  # and what is cut already
    # blocks of layers of 100 MB that come and go in tens of different sizes
    assert 0 < found.lines["allocator"] <= 0.35 * tensors
    assert memory_curve.Curve(job("zero-1", 4)).estimate(AT_B).building_bytes is None


@pytest.mark.nightly
def test_what_building_left_free_is_not_reserved_in_the_step():
    """FSDP2 with LoRA: a rank keeps an eighth, and in pieces what is gathered; it was built of all."""
    layers = 16
    deep = llama(num_hidden_layers=layers)
    small = job("fsdp2", 8, config=deep, batch=1, sequence=64, tuning=Tuning(8, ("q_proj", "v_proj")))
    found = memory_curve.Curve(small, scales=False).estimate(Layout())
    whole = 2 * (2 * V * H + layers * BLOCK + H)
    assert found.building_bytes - memory_curve.CONTEXT_BYTES >= whole
    kept = whole / 8 + 2 * (2 * 2 * V * H) + 2 * 2 * BLOCK  # embedding and head are gathered and copied; two layers
    assert sum(found.lines[name] for name in (*memory_curve.LINES, "allocator")) < 1.1 * kept < 0.6 * whole


def test_the_allocators_segments_by_hand():
    mib = MIB
    # three of 3 MiB lie in one segment of 20, five more need another; 30.5 MiB have their own, rounded up to 2 MiB
    assert allocator.reserved_bytes([(n, 3 * mib) for n in range(3)], []) == 20 * mib
    assert allocator.reserved_bytes([(n, 3 * mib) for n in range(8)], [(8, 30.5 * mib)]) == (20 + 20 + 32) * mib
    # small ones: four of half a MiB in a segment of 2
    assert allocator.reserved_bytes([(n, mib / 2) for n in range(5)], []) == (2 + 2) * mib
    # 40 MiB go, 12 and 30 come: 28 are left beside the 12, so that 30 need a segment of their own
    assert allocator.reserved_bytes([(0, 40 * mib)], [(0, -40 * mib), (1, 12 * mib), (2, 30 * mib)]) == 70 * mib
    # 40 go, 10 and 30 come: they fit
    assert allocator.reserved_bytes([(0, 40 * mib)], [(0, -40 * mib), (1, 10 * mib), (2, 30 * mib)]) == 40 * mib


def test_where_room_is_scarce_free_segments_are_given_back():
    mib = MIB
    goes, comes = [(0, 40 * mib), (1, 4 * mib)], [(0, -40 * mib), (2, 50 * mib)]
    assert allocator.reserved_bytes(goes, comes) == (40 + 20 + 50) * mib
    assert allocator.reserved_bytes(goes, comes, room=110 * mib) == (40 + 20 + 50) * mib
    assert allocator.reserved_bytes(goes, comes, room=100 * mib) == (20 + 50) * mib
    # 17 of the 40 are in use again: that segment stays, and the room is not enough
    again = [(0, -40 * mib), (3, 17 * mib), (2, 50 * mib)]
    assert allocator.reserved_bytes(goes, again, room=100 * mib) == (40 + 20 + 50) * mib


def test_a_plan_knows_how_much_room_the_allocator_has(monkeypatch):
    told = []
    own = memory_curve.reserved_bytes
    monkeypatch.setattr(memory_curve, "reserved_bytes", lambda *how: told.append(how[-1]) or own(*how))
    asked = request(gpus=4, room=50e9, samples_per_step=4 * B, batches=(B,))
    dry_rows(asked)
    assert told == [asked.machine.most_bytes - memory_curve.CONTEXT_BYTES - memory_curve.NCCL_BYTES]


def test_an_estimate_is_tensors_the_allocators_rest_cudas_and_nccls(plain):
    found = plain.estimate(AT_B)
    tensors = sum(found.lines[name] for name in memory_curve.LINES)
    assert found.peak_bytes == tensors + found.lines["allocator"] + memory_curve.CONTEXT_BYTES
    assert (tensors + found.lines["allocator"]) % (2 * MIB) == 0  # whole segments
    assert found.lines["allocator"] > 0
    shared = memory_curve.Curve(job("zero-1", 4)).estimate(AT_B).lines
    assert shared["NCCL"] == memory_curve.NCCL_BYTES


def test_the_allocator_is_replayed_at_the_micro_batch_that_is_asked():
    """A rest in proportion to another batch's would be off: large tensors' rounding does not grow with them."""
    curve = memory_curve.Curve(job("plain", 1))
    for batch in (2, 8):
        exact, layout = memory_curve.Curve(job("plain", 1, batch=batch), scales=False), Layout(micro_batch=batch)
        assert curve.estimate(layout).lines["allocator"] == exact.estimate(layout).lines["allocator"]


def test_part_of_the_memory_stays_free():
    gpu = hardware.gpu("H100")
    assert 79.0 < gpu.memory_bytes / 2**30 < 79.7  # an "80 GB" board: torch's total_memory
    machine = Machine(gpu, 8)
    assert machine.usable_bytes == 0.92 * gpu.memory_bytes
    assert machine.most_bytes == 0.98 * gpu.memory_bytes
    curve = memory_curve.Curve(job("zero-1", 4))
    room = sum(curve.estimate(AT_B).lines[name] for name in memory_curve.LINES)
    while (least := curve.estimate(AT_B, room).peak_bytes) > room:
        room += 50e6
    assert not dry_rows(request(gpus=4, room=least, samples_per_step=4 * B, batches=(B,)))[0].fits
    assert dry_rows(request(gpus=4, room=1.05 * room, samples_per_step=4 * B, batches=(B,)))[0].fits


@pytest.mark.parametrize(("engine", "of_parameters", "of_states"), [("zero-1", None, 12), ("fsdp2", 4, 8)])
def test_more_ranks_than_a_dry_run_has(engine, of_parameters, of_states):
    ranks = 100_000
    found = at_b(engine, ranks)
    assert found.low.job.ranks == footprint.DATA_PARALLEL_MOST
    lines = found.estimate(AT_B).lines
    assert lines["optimizer states"] == pytest.approx(of_states * PSI / ranks, rel=0.01)
    parameters = 2 * PSI if of_parameters is None else of_parameters * PSI / ranks
    assert lines["parameters"] == pytest.approx(parameters, rel=0.01)


def test_offload_takes_shards_of_gradients_along():
    curve = at_b("zero-3")
    kept, left = curve.estimate(AT_B).lines, curve.estimate(AT_B.but(host_states="optimizer")).lines
    # DeepSpeed's stage 3 has one flat buffer of its shards' gradients, wherever the states are
    assert kept["gradients"] == pytest.approx(2 * PSI / 4, rel=0.05)
    assert left["gradients"] == left["optimizer states"] == 0
    bare = curve.estimate(AT_B.but(host_states="optimizer+parameters")).lines
    assert left["parameters"] == pytest.approx(2 * PSI / 4, rel=0.05)
    assert bare["parameters"] == 0


def test_attention_with_dropout_keeps_no_scores_on_a_gpu():
    kept = {}
    for dropout in (0.0, 0.1):
        config = GPT2Config(n_layer=2, attn_pdrop=dropout)
        found = memory_curve.run(RankJob(config, batch=2, sequence=512, checkpointing=False))
        kept[dropout] = found.lines["activations"]
        scores = 2 * 2 * 12 * 512**2  # two layers, in bytes of one copy at a byte each
        assert found.lines["activations"] < 2 * 2 * 512 * 768 * 60 + scores  # 60 bytes an element of the stream
    assert kept[0.1] == kept[0.0]


def test_soft_capped_attention_keeps_its_scores():
    """Gemma 2's has no fused kernel in Transformers: tanh in bf16, softmax in fp32 and again in bf16, of all scores."""
    heads, layers, batch, sequence = 4, 2, 2, 256
    config = Gemma2Config(
        vocab_size=V, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip
    short, long = (
        memory_curve.run(RankJob(config, batch=batch, sequence=tokens, checkpointing=False)).lines["activations"]
        for tokens in (sequence, 2 * sequence)
    )
    scores = layers * batch * heads * sequence**2 * (2 + 4 + 2)
    assert long - 2 * short == pytest.approx(2 * scores, rel=0.02)  # all else grows with the length, not its square


EXPERTS, TOP = 4, 2
MIXTRAL = 2 * V * 256 + 2 * (2 * 256**2 + 2 * 256 * 128 + EXPERTS * 256 + EXPERTS * 3 * 256 * 512 + 2 * 256) + 256


def mixtral():
    return MixtralConfig(
        vocab_size=V, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=EXPERTS, num_experts_per_tok=TOP,
    )  # fmt: skip


def test_experts_are_kept_whole_and_used_in_part():
    found = memory_curve.run(RankJob(mixtral(), batch=2, sequence=256, checkpointing=False))
    assert found.params == MIXTRAL
    assert found.lines["parameters"] == pytest.approx(2 * MIXTRAL, rel=0.001)
    tokens = 2 * 256
    active = V * 256 + 2 * (2 * 256**2 + 2 * 256 * 128 + EXPERTS * 256 + TOP * 3 * 256 * 512)
    attention = 2 * 4 * tokens * 256 * 256
    assert found.flops["forward"] == pytest.approx(2 * tokens * active + attention, rel=0.001)
    # a row of each expert's inner width for each token that it gets: gate and up, activated, their product
    inside = 2 * TOP * tokens * 2 * (2 + 1 + 1) * 512
    assert inside < found.lines["activations"] < inside + 2 * tokens * 256 * 2 * 20


def test_lora_beside_experts_trains_the_adapters_alone():
    found = memory_curve.run(RankJob(mixtral(), batch=2, sequence=256, tuning=Tuning(8, ("q_proj", "v_proj"))))
    trained = 2 * 8 * ((256 + 256) + (256 + 128))
    assert found.trained_params == trained
    assert found.lines["frozen parameters"] == pytest.approx(2 * MIXTRAL, rel=0.001)
    assert found.lines["gradients"] + found.lines["optimizer states"] <= 6 * trained + 1000
