"""The communication formulas against hand calculation and each other."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pardemo.formulas import communication as c

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
    assert c.algorithm_bandwidth(10, 2) == 5
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


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=20))
def test_overlap_lies_between_the_longer_part_and_the_sum(buckets):
    compute, exchange = zip(*buckets, strict=True)
    taken = c.overlapped_seconds(compute, exchange)
    assert max(sum(compute), sum(exchange)) <= taken + 1e-9
    assert taken <= sum(compute) + sum(exchange) + 1e-9


def test_overlap_by_hand():
    assert c.overlapped_seconds([2, 2, 2], [1, 1, 1]) == 7
    assert c.overlapped_seconds([1, 1, 1], [2, 2, 2]) == 7
    assert c.overlapped_seconds([], []) == 0
    with pytest.raises(ValueError, match="2 buckets computed, but 1 exchanged"):
        c.overlapped_seconds([1, 2], [1])


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


def test_formulas_load_no_torch():
    code = "import sys, pardemo.formulas.communication; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
