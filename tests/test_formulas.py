"""The communication formulas against hand calculation and each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardemo.formulas import communication as c
from pardemo.formulas import context_parallel as x
from pardemo.formulas import low_precision as bits
from pardemo.formulas import memory as m
from pardemo.formulas import overlap, published, scaling
from pardemo.formulas import tensor_parallel as t

sizes = st.integers(0, 10**12)
ranks = st.integers(1, 1024)


def test_by_hand():
    assert c.ring_all_reduce(8, 4) == (12, 12)
    assert c.ring_half(8, 4) == (6, 6)
    assert c.parameter_server(8, 4) == (24, 24)
    assert c.parameter_worker(8, 4) == (8, 8)
    assert c.ring_all_reduce(8, 1) == c.parameter_server(8, 1) == c.parameter_worker(8, 1) == (0, 0)
    assert c.all_reduce_steps("ring", 4) == c.all_reduce_steps("torch", 4) == 6
    assert c.all_reduce_steps("parameter server", 4) == 2
    assert c.cluster_seconds("ring", 1000, 4, 100, 1) == 15 + 6
    assert c.cluster_seconds("parameter server", 1000, 4, 100, 1) == 60 + 2
    assert c.shared_host_seconds("ring", 1000, 4, 100, 1) == 60 + 6
    assert c.shared_host_seconds("parameter server", 1000, 4, 100, 1) == 60 + 2
    assert c.bus_bandwidth("all_reduce", 100, 4, 1) == 150
    assert c.bus_bandwidth("all_gather", 100, 4, 1) == c.bus_bandwidth("reduce_scatter", 100, 4, 1) == 75


@given(nbytes=sizes, n=ranks)
def test_what_is_sent_is_received(nbytes, n):
    ring = c.ring_all_reduce(nbytes, n)
    server, worker = c.parameter_server(nbytes, n), c.parameter_worker(nbytes, n)
    assert n * ring.sent == pytest.approx(n * ring.received)
    assert server.sent + (n - 1) * worker.sent == pytest.approx(server.received + (n - 1) * worker.received)
    assert n * ring.sent == pytest.approx(server.sent + (n - 1) * worker.sent), "the same total, another balance"
    assert ring.sent <= 2 * nbytes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: c.ring_half(1, 0), "at least 1, not 0"),
        (lambda: c.ring_half(-1, 2), "cannot have -1 bytes"),
        (lambda: c.parameter_server(1, -2), "at least 1, not -2"),
        (lambda: c.all_reduce_steps("tree", 2), "not 'tree'"),
        (lambda: c.cluster_seconds("tree", 1, 2, 1), "not 'tree'"),
        (lambda: c.bus_bandwidth("scan", 1, 2, 1), "not 'scan'"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_tensor_parallel_by_hand():
    assert t.phi(2, 3, 5, 4, 2) == 45
    assert t.phi(2, 3, 5, 1) == 0
    assert (t.half(), t.half(backward=False), t.rows_first()) == (4, 2, 8)
    assert [t.block(r) for r in ("none", "until needed", "all")] == [8, 10, 12]
    assert t.loss_elements(7) == 21
    assert t.flops_forward(1, 2, 3) == 24 * 2 * 9 + 4 * 4 * 3
    with pytest.raises(ValueError, match="'some'"):
        t.block("some")
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        t.phi(1, 1, 1, 0)


def test_activation_memory_by_hand():
    s, b, h, a = 8, 2, 4, 2
    unit = s * b * h
    assert m.block_activation_bytes(s, b, h, a) == unit * 34 + 5 * a * s * s * b
    norms, attention, mlp = 4, 11, 19  # the paper's parts
    assert m.block_activation_bytes(s, b, h, a, recompute="selective") == unit * (norms + attention + mlp)
    assert m.block_activation_bytes(s, b, h, a, 2) == unit * (10 + 12) + 5 * a * s * s * b / 2
    assert m.block_activation_bytes(s, b, h, a, 2, True) == m.block_activation_bytes(s, b, h, a) / 2
    assert m.block_activation_bytes(s, b, h, a, 2, True, "selective") == unit * 17
    assert m.block_activation_bytes(s, b, h, a, 2, False, "full") == 2 * unit
    assert m.block_activation_bytes(s, b, h, a, 2, True, "full") == unit
    with pytest.raises(ValueError, match=r"recompute.*selective"):
        m.block_activation_bytes(s, b, h, a, recompute="half")
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        m.block_activation_bytes(s, b, h, a, 0)


def test_megatrons_models_have_the_published_sizes():
    published = {1: 1.2135e9, 2: 2.4904e9, 4: 4.1991e9, 8: 8.3170e9}
    for tp, of in scaling.TABLE_1.items():
        assert of.parameters == pytest.approx(published[tp], rel=1e-4)
        assert of.hidden / of.heads == 96


@pytest.mark.parametrize("cell", list(published.zero_table_1()), ids=lambda cell: f"{cell.row} {cell.column}")
def test_zeros_table_1_cell_by_cell(cell):
    """The 7.5B column of the paper is rounded, the others are cut off; each cell to the digits it is printed with."""
    assert cell.follows, cell


def test_cells_are_judged_by_their_printed_digits():
    def follows(printed, exact):
        return published.TableFigure("", "", printed, exact).follows

    assert follows("4187", 4187.5), "cut off"
    assert follows("4188", 4187.5), "rounded"
    assert follows("1.88", 1.875)
    assert not follows("1.9", 1.8)
    assert not follows("41.3", 41.4)


@pytest.mark.parametrize("cell", list(published.zero_table_2()), ids=lambda cell: f"{cell.row} {cell.column}")
def test_zeros_table_2_cell_by_cell(cell):
    # the paper scales the first row, cut to a digit (7.6, 14.4), by MP; 512 and 1024 it prints as 0.5T and 1T
    assert float(cell.printed) == pytest.approx(cell.exact, rel=0.025)
    assert float(cell.printed) <= cell.exact


def test_megatrons_table_1_cell_by_cell():
    assert all(cell.follows for cell in published.megatron_table_1())


def test_figure_1_and_the_kinds_of_states():
    assert [round(m.model_states_bytes(7_500_000_000, 64, s) / 1e9, 1) for s in m.STAGES] == [120, 31.4, 16.6, 1.9]
    assert m.model_states(100, 4, 3) == {"parameters": 50, "gradients": 50, "optimizer states": 300}
    assert m.model_states(100, 4, 1)["optimizer states"] == 300
    assert isinstance(m.model_states_bytes(100, 4, 3), int)
    assert {name: states.total for name, states in m.STATES.items()} == {
        "Adam, mixed precision": 16,
        "Adam, fp32": 16,
        "Adam, bf16 states": 8,
        "Adam, 8-bit states": 10,
        "SGD with momentum, mixed precision": 12,
        "SGD, mixed precision": 8,
        "Adam, mixed precision, fp32 gradients": 18,
    }
    assert m.accelerate_estimate(10, 2) == 80


def test_estimators_are_deepspeeds():
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as three
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as two

    for params, ranks in ((10**9, 8), (7, 2), (123_456_789, 64)):
        assert m.deepspeed_zero2_estimate(params, ranks) == two(params, ranks, 1, cpu_offload=False)[1]
        _, theirs, _ = three(params, params // 7, ranks, 1, cpu_offload=False, cpu_offload_params=False)
        assert m.deepspeed_zero3_estimate(params, ranks, params // 7) == theirs


def test_activations_of_the_zero_paper():
    assert m.activation_checkpoints(1600, 32, 1024, 48) * 2 / 1e9 == pytest.approx(5.03, rel=0.001)
    checkpoints = m.activation_checkpoints(8192, 32, 1024, 125)
    assert checkpoints / 1e9 == pytest.approx(33.5, rel=0.01), "what 6.1 calls ~33 GB are elements"
    assert 2 * checkpoints / 1e9 == pytest.approx(67.1, rel=0.001)
    assert 2 * m.activation_checkpoints(8192, 32, 1024, 125, 16) / 1e9 == pytest.approx(4.2, rel=0.01)


@pytest.mark.parametrize("stage", [4, -1, 1.5, "2"])
def test_a_stage_that_does_not_exist(stage):
    for rule in (m.model_states, c.zero_step):
        with pytest.raises(ValueError, match=r"ZeRO.*0.*1.*2.*3"):
            rule(10, 2, stage)


def test_jobs_that_cannot_be():
    with pytest.raises(ValueError, match=r"number.*1.*0"):
        m.model_states(10, 0, 1)
    with pytest.raises(ValueError, match="cannot have -1 parameters"):
        m.model_states(-1, 2, 1)
    with pytest.raises(ValueError, match=r"least.*0"):
        c.zero_step(10, 2, 1, 0)


def test_communication_of_the_stages():
    assert [c.zero_step(100, 2, s) for s in m.STAGES] == [200, 200, 200, 300]
    assert [c.zero_step(100, 2, s, micro_batches=4) for s in m.STAGES] == [200, 200, 500, 1200]
    assert c.zero_step(100, 1, 3) == 0


def test_few_bits_by_hand():
    assert bits.largest(4, 3, 1) == 448
    assert bits.largest(4, 3, 8) == 240, "by IEEE's rule"
    assert bits.largest(5, 2, 4) == 57_344
    assert bits.largest(2, 1) == 6
    assert bits.largest(5, 10, 1 << 10) == 65_504, "fp16's"
    assert bits.smallest(4, 3) == 2**-9
    assert bits.smallest(5, 2) == 2**-16
    assert bits.smallest(2, 1) == 0.5
    assert bits.worst_error(3) == 1 / 17
    assert bits.sum_stands_still(7) == 256
    assert bits.sum_stands_still(10) == 2048
    assert bits.bits_a_number(8, 8, 32) == 8.25
    assert bits.bits_a_number(4, 8, 16) == 4.5
    assert bits.bits_a_number(8) == 8
    assert bits.half_bytes(1024, 4.5, 4) == 432
    with pytest.raises(ValueError, match=r"2.*exponent.*1.*1.*3"):
        bits.largest(1, 3)
    with pytest.raises(ValueError, match=r"number.*0"):
        bits.bits_a_number(8, 8, 0)


# --- a sequence that ranks share ----------------------------------------------------------------------------------


def test_a_ring_and_ulysses_by_hand():
    # 8 tokens on 4 ranks, 2 on each, of 3 numbers of keys; 2 bytes each: keys and values are 24 bytes, sent 3 times
    assert x.ring_bytes(1, 8, 3, 4, laps=x.FORWARD) == 3 * 24
    assert x.ring_bytes(1, 8, 3, 4) == 3 * 3 * 24
    # queries and outputs 5 wide: 2 · (5 + 3) · 2 tokens · 2 bytes are 64, of which 3 of 4 parts leave
    assert x.ulysses_bytes(1, 8, 5, 3, 4, passes=1) == 48
    assert x.ulysses_bytes(1, 8, 5, 3, 4) == 96
    assert x.ring_bytes(1, 8, 3, 1) == x.ulysses_bytes(1, 8, 5, 3, 1) == 0
    assert x.attention_flops(1, 8, 5, 4, passes=1) == 2 * 64 * 5 / 4


def test_heads_of_keys_are_repeated_until_each_rank_has_some():
    assert [x.kv_heads_sent(8, 2, n) for n in (1, 2, 4, 8)] == [2, 2, 4, 8]
    assert x.kv_heads_sent(32, 8, 16) == 16
    assert x.kv_heads_sent(12, 4, 6) == 12, "each rank needs whole heads of its own queries"
    with pytest.raises(ValueError, match=r"8.*divide.*3"):
        x.kv_heads_sent(8, 8, 3)


@given(inside=st.sampled_from([1, 2, 4]), across=st.integers(1, 8))
def test_both_together_are_each_alone_at_the_ends(inside, across):
    ranks = inside * across
    near, far = x.both_bytes(2, 64 * ranks, 256, 128, inside, across)
    if across == 1:
        assert (near, far) == (x.ulysses_bytes(2, 64 * ranks, 256, 128, ranks, passes=1), 0)
    if inside == 1:
        assert (near, far) == (0, x.ring_bytes(2, 64 * ranks, 128, ranks, laps=1))
    if across > 1 < inside:
        assert far < x.ring_bytes(2, 64 * ranks, 128, ranks, laps=1), "which is why they are combined"


@given(ranks=st.integers(1, 64))
def test_both_orders_compute_the_same_blocks_and_one_of_them_evenly(ranks):
    plain, zigzag = ([x.blocks_seen(rank, ranks, order) for rank in range(ranks)] for order in ("plain", "zigzag"))
    assert sum(plain) == sum(zigzag) == ranks * (2 * ranks + 1)
    assert len(set(zigzag)) == 1
    assert max(plain) == 4 * ranks - 1


def test_a_ring_is_hidden_from_as_many_tokens_on():
    flops, rate, width, ranks = 400e12, 50e9, 4096, 8
    least = x.tokens_that_hide_a_ring(0.25, flops, rate)
    assert least == 4000
    for tokens, hidden in ((0.9 * least, False), (1.1 * least, True)):
        whole = round(tokens * ranks)
        compute = x.attention_flops(1, whole, width, ranks, passes=1) / flops
        sent = x.ring_bytes(1, whole, width // 4, ranks, laps=1) * ranks / (ranks - 1)  # as if all N steps sent
        assert (x.ring_seconds(compute, sent, rate) == compute) == hidden
        assert x.ulysses_seconds(compute, sent, rate) == compute + sent / rate


@pytest.mark.parametrize("order", ["random", ""])
def test_an_order_that_is_none(order):
    with pytest.raises(ValueError, match=r"order.*zigzag"):
        x.blocks_seen(0, 2, order)
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        x.ring_bytes(1, 8, 3, 0)


def test_pieces_by_hand():
    assert overlap.computed_then_sent_s([2, 2, 2], [1, 1, 1]) == 7
    assert overlap.computed_then_sent_s([2, 2, 2], [3, 3, 3]) == 11
    assert overlap.pieces_s(8, 6, 0, 1) == 14
    assert overlap.pieces_s(8, 6, 0, 4) == 9.5
    assert overlap.pieces_s(8, 6, 1, 4) == 2 + 4 * 2.5
    with pytest.raises(ValueError, match=r"piece.*0"):
        overlap.pieces_s(8, 6, 0, 0)
    with pytest.raises(ValueError, match="3 pieces, 2 messages"):
        overlap.computed_then_sent_s([1, 1, 1], [1, 1])


times = st.floats(1e-3, 10)


@given(computing=times, sending=times, start=times, pieces=st.integers(1, 64))
def test_pieces_take_what_the_closed_form_says_and_never_less_than_either(computing, sending, start, pieces):
    compute, send = computing / pieces, sending / pieces + start
    closed = compute + (pieces - 1) * max(compute, send) + send
    assert overlap.pieces_s(computing, sending, start, pieces) == pytest.approx(closed)
    assert closed >= max(computing, sending)
    best = overlap.best_pieces(computing, sending, start)
    assert overlap.pieces_s(computing, sending, start, best) <= closed * (1 + 1e-9)


@given(product=times, hop=times, ranks=st.integers(1, 16))
def test_a_ring_hides_every_hop_that_is_no_longer_than_a_product(product, hop, ranks):
    whole = overlap.ring_s(product, hop, ranks)
    assert whole == pytest.approx(ranks * product + (ranks - 1) * max(0, hop - product))


def test_prefetching_by_hand():
    gathers, computes = [1, 3, 1, 3], [2, 2, 2, 2]
    assert overlap.prefetched_s(gathers, computes, 0) == 8 + 8
    assert overlap.prefetched_s(gathers, computes, 1) == 1 + 3 + 2 + 3 + 2  # the long gathers set the pace
    assert overlap.prefetched_s(gathers, computes, 2) == 1 + 3 + 3 * 2  # only the first long one is waited for
    assert overlap.prefetched_s([], [], 1) == 0
    assert [overlap.most_gathered([1, 3, 1, 3], depth) for depth in (0, 1, 2, 9)] == [3, 4, 7, 8]
    with pytest.raises(ValueError, match=r"0.*layers.*-1"):
        overlap.prefetched_s([1], [1], -1)


def test_halves_hide_all_exchanges_but_the_last():
    assert overlap.expert_layers_s(3, 3, 2, 3) == (3 * 20, 3 * 12 + 2)
    assert overlap.expert_layers_s(3, 3, 0, 2) == (24, 24)
    long = overlap.expert_layers_s(1, 1, 4, 2)
    assert long.halves == 1 + 8 * 4, "the link is never idle then"


def test_what_is_hidden_and_what_it_costs():
    assert overlap.hidden_share(9.5, 8, 6) == 0.75
    assert overlap.hidden_share(14, 8, 6) == 0
    assert overlap.price_of_hiding(0.1, 0.25) == 0.025
    with pytest.raises(ValueError, match="nothing can be hidden"):
        overlap.hidden_share(1, 1, 0)
    with pytest.raises(ValueError, match=r"0.*below.*1.*1"):
        overlap.price_of_hiding(1, 1)
    with pytest.raises(ValueError, match=r"0.*more.*-1"):
        overlap.ring_s(-1, 1, 2)
