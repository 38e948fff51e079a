"""What ranks send each other: parameters, gradients, keys and values; and what waits to be sent."""

from dataclasses import replace

import pytest
from test_layouts import LLAMA, SMALL, job

from pardemo.planner.layouts import programs
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.micro_batch import layer_seconds
from pardemo.planner.layouts.per_rank import owned_params
from pardemo.planner.layouts.shape import Experts, Layer
from pardemo.planner.layouts.step import predict_step, stage_layers


def test_gradients_wait_in_a_queue_until_it_is_full():
    """Megatron-FSDP's, of 10⁹: stages 2 and 3 hold as many beside their shards, stage 3 gathers half as many ahead."""
    given, bare = job(LLAMA, 64), replace(job(LLAMA, 64), program=programs.MEGATRON.but(bucketed_gradients=0))
    each = 2 * 4 * LLAMA.layer_params(Layer())  # of stage 3 at least two layers', which are 1.7·10⁹ here
    for sharding, more in (("zero1", {}), ("zero2", {"gradients": 4e9}), ("zero3", {"gradients": each})):
        one = Layout(dp=64, sharding=sharding)
        now, before = predict_memory(given, one).lines, predict_memory(bare, one).lines
        assert {name: now[name] - before[name] for name in now if now[name] != before[name]} == pytest.approx(more)
    small = predict_memory(job(SMALL, 64), Layout(dp=64, sharding="zero3")).lines  # all of it, less what is here anyway
    assert small["gathered parameters"] == pytest.approx(2 * SMALL.params * 63 / 64, rel=1e-3)
    assert small["gradients"] == pytest.approx(4 * SMALL.params * (1 + 1 / 64), rel=1e-3)


def test_sequences_are_shared_by_a_ring_or_by_all_to_alls():
    given, ring = job(LLAMA, 8, sequence=65536), Layout(cp=8)
    others = ring.but(context="all-to-all")
    of = "context-parallel traffic"
    width = 2 * 65536 / 8 * (64 + 8) * 2 * 128  # queries, keys, values, and attention's output, of a rank
    expected = 80 * 2 * (given.machine.all_to_all(width, 8) + 3 * given.machine.latency(8))
    assert predict_step(given, others).parts[of] == pytest.approx(expected)
    machine, keys = given.machine, 2 * 65536 * 8 * 2 * 128
    assert machine.ring(keys, 8) == pytest.approx(7 * (50e-6 + keys / 8 / machine.rate(8)))
    round_and_back = machine.ring(keys, 8) + machine.ring(2 * keys, 8)  # with their gradients
    assert predict_step(given, ring).parts[of] == pytest.approx(80 * 0.2 * round_and_back), (
        "attention hides four fifths"
    )
    again = machine.ring(keys, 8)
    assert predict_step(given, ring.but(recompute="full")).parts[of] == pytest.approx(
        80 * 0.2 * (round_and_back + again)
    )
    gathers = replace(given, program=given.program.but(gathers_context=True))
    assert predict_step(gathers, ring).parts[of] == pytest.approx(80 * 0.2 * 3 * machine.gather(keys, 8))
    with pytest.raises(ValueError, match=r"64.*attention.*TP.*8.*CP.*16"):
        check_layout(Layout(tp=8, cp=16, context="all-to-all"), LLAMA, 128, 65536)
    with pytest.raises(ValueError, match=r"8.*divide.*TP.*2.*CP.*8"):
        check_layout(Layout(tp=2, cp=8, context="all-to-all"), LLAMA, 16, 65536)
    latent = replace(LLAMA, kv_heads=64, head_dim=192, value_dim=128)
    with pytest.raises(ValueError, match=r"192.*128.*through"):
        check_layout(Layout(cp=8, context="all-to-all"), latent, 8, 65536)
    check_layout(Layout(tp=16, context="all-to-all"), LLAMA, 16, 65536)  # nobody shares a sequence


def test_stage_two_sends_gradients_with_each_micro_batch():
    """Parameters go once a step (Megatron-FSDP's optim_grads), or with each micro-batch (FSDP's SHARD_GRAD_OP)."""
    of, p, ranks = "data-parallel traffic", LLAMA.params, 64
    for again, program in ((0, programs.MEGATRON.but(sharded_dp_overlap=False)), (3, programs.FOUNDRY)):
        given = replace(
            job(LLAMA, ranks), program=program.but(reduce_efficiency=1.0, ring_bytes_per_s=1e15, reduce_s=0.0)
        )
        gradients, parameters = (given.machine.gather(n * p, ranks) for n in (program.gradient_bytes, 2))
        traffic = [predict_step(given, Layout(dp=ranks, sharding="zero2", accumulation=m)).parts[of] for m in (1, 4)]
        assert traffic[0] == pytest.approx(gradients + parameters, rel=1e-3)
        assert traffic[1] == pytest.approx(4 * gradients + (1 + again) * parameters, rel=1e-3)
        one = predict_step(given, Layout(dp=ranks, sharding="zero1", accumulation=4)).parts[of]
        assert one == pytest.approx(gradients + parameters, rel=1e-3)


def test_a_backward_pass_hides_gradients_of_stage_two():
    """Each micro-batch's own; what is left over waits."""
    of, ranks = "data-parallel traffic", 64
    given = replace(
        job(LLAMA, ranks, between=25e9),
        program=programs.MEGATRON.but(reduce_efficiency=1.0, ring_bytes_per_s=1e15),
    )
    layouts = {m: Layout(dp=ranks, sharding="zero2", accumulation=m) for m in (1, 4)}
    hidden = given.program.dp_overlap * 2 / 3 * LLAMA.layers * layer_seconds(given, layouts[1]).total
    gradients, parameters = (given.machine.gather(n * LLAMA.params, ranks) for n in (4, 2))
    assert 0.5 * gradients < gradients - hidden < 0.95 * gradients
    found = {m: predict_step(given, one).parts[of] for m, one in layouts.items()}
    assert found[1] == pytest.approx(gradients + parameters - hidden, rel=1e-3)
    assert found[4] - found[1] == pytest.approx(3 * (gradients - hidden), rel=1e-3)
    quick = replace(given, machine=replace(given.machine, between=4e12))
    assert predict_step(quick, layouts[4]).parts.get(of, 0.0) == 0.0


@pytest.mark.parametrize(
    ("nbytes", "program"),
    [
        (4, programs.MEGATRON),
        (4, programs.TORCHTITAN),
        (4, programs.FOUNDRY),
        (2, programs.MEGATRON.but(gradient_bytes=2)),
    ],
)
def test_stage_three_sends_gradients_as_they_are_kept(nbytes, program):
    """Parameters twice in 2 bytes, and gradients: all that is on no rank, where nothing hides it."""
    given = replace(job(LLAMA, 64), program=program.but(reduce_efficiency=1.0, ring_bytes_per_s=1e15, dp_overlap=0.0))
    machine = replace(given.machine, latency_within=0.0, latency_between=0.0)
    found = predict_step(replace(given, machine=machine), Layout(dp=64, sharding="zero3")).parts[
        "data-parallel traffic"
    ]
    sent = LLAMA.layers * LLAMA.layer_params(Layer()) + LLAMA.embedding_params
    assert found == pytest.approx(machine.gather((4 + nbytes) * sent, 64), rel=1e-6)


def test_experts_are_summed_over_the_groups_that_have_them():
    """On 64 ranks 16 share the experts: each is on four, in groups of eight on one rank of every second group."""
    what = replace(SMALL, experts=Experts(16, 2, 4096))
    program = programs.MEGATRON.but(sharded_dp_overlap=False, reduce_efficiency=1.0, ring_bytes_per_s=1e15)
    given = replace(job(what, 64), program=program)
    layout = Layout(dp=64, ep=16, sharding="zero1", shard_group=8)
    owned, machine = owned_params(given, layout, stage_layers(given, layout), 0), given.machine
    expected = machine.gather(4 * owned.dense, 8) + machine.gather(2 * owned.dense, 8)
    expected += machine.all_reduce(4 * owned.dense / 8, 8, 8) + machine.all_reduce(4 * owned.experts, 4, 16)
    assert predict_step(given, layout).parts["data-parallel traffic"] == pytest.approx(expected)


def test_groups_that_share_states_meet_once_a_step():
    """Within a host gradients are scattered and parameters gathered; over the hosts an eighth of the gradients is."""
    given = replace(
        job(LLAMA, 64),
        program=programs.MEGATRON.but(sharded_dp_overlap=False, reduce_efficiency=1.0, ring_bytes_per_s=1e15),
    )
    machine, p, of = given.machine, LLAMA.params, "data-parallel traffic"
    gradients, parameters = machine.gather(4 * p, 8), machine.gather(2 * p, 8)
    over = machine.all_reduce(4 * p / 8, 8, 8)
    for sharding, times in (("zero1", 1), ("zero2", 6)):
        found = predict_step(given, Layout(dp=64, sharding=sharding, shard_group=8, accumulation=6)).parts[of]
        assert found == pytest.approx(times * gradients + parameters + over, rel=1e-3)
