"""Failures, intervals and goodput: against counts, simulations and one another."""

import itertools
import random

import pytest
import torch

from pardemo.formulas import failures, memory


def test_by_hand():
    assert failures.between_failures(1000, 10) == 100
    assert failures.young_interval(2, 100) == 20
    assert failures.lost_shares(20, 2, 100, 5) == (0.1, 0.1, 0.05)
    assert failures.lost_shares(20, 2, 100, 5).all == pytest.approx(0.25)
    assert failures.saved_bytes(10) == 140
    assert failures.saved_bytes(10, 4, 8) == 120


@pytest.mark.parametrize(("interval", "save", "restart"), [(10, 1, 0), (30, 3, 5), (150, 10, 20)])
def test_goodput_is_what_a_simulated_job_gets(interval, save, restart):
    draw, between, saved, total = random.Random(1), 100.0, 0.0, 0.0
    for _ in range(40_000):
        until = draw.expovariate(1 / between)
        saved += until // (interval + save) * interval
        total += until + restart
    assert saved / total == pytest.approx(failures.goodput(interval, save, between, restart), rel=0.03)


@pytest.mark.parametrize(
    ("rows", "before", "now"), [(12, 4, 3), (12, 3, 4), (10, 4, 2), (5, 4, 7), (0, 2, 3), (9, 2, 1)]
)
def test_what_is_read_is_each_row_once_from_the_shard_that_has_it(rows, before, now):
    whole, taken = torch.arange(rows), []
    saved = [whole[slice(*memory.shard_of(rows, before, rank))] for rank in range(before)]
    for rank in range(now):
        begin, end = memory.shard_of(rows, now, rank)
        mine = []
        for read in failures.resharded(rows, before, now, rank):
            first, _ = memory.shard_of(rows, before, read.shard)
            mine += saved[read.shard][read.begin - first : read.end - first].tolist()
        assert mine == list(range(begin, end))
        taken += mine
    assert taken == list(range(rows))


@pytest.mark.parametrize(("rows", "ranks"), [(12, 4), (10, 4), (5, 4), (3, 4)])
def test_shards_are_those_of_torch(rows, ranks):
    chunks = torch.arange(rows).chunk(ranks)
    for rank in range(ranks):
        mine = range(*memory.shard_of(rows, ranks, rank))
        assert list(mine) == (chunks[rank].tolist() if rank < len(chunks) else [])


@pytest.mark.parametrize("hosts", [2, 4, 6, 16])
def test_which_pairs_of_hosts_lose_a_state(hosts):
    pairs = list(itertools.combinations(range(hosts), 2))
    ring = sum(b in ((a + 1) % hosts, (a - 1) % hosts) for a, b in pairs)
    assert failures.pairs_that_lose(hosts) == pytest.approx(ring / len(pairs))
    mutual = sum(a // 2 == b // 2 for a, b in pairs)
    assert failures.pairs_that_lose(hosts, "pairs") == pytest.approx(mutual / len(pairs))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: failures.between_failures(0, 1), "this time is above 0 s, not 0"),
        (lambda: failures.between_failures(1, 0), "one part or more, not 0"),
        (lambda: failures.young_interval(-1, 1), "this time is above 0 s, not -1"),
        (lambda: failures.goodput(0, 1, 1), "this time is above 0 s, not 0"),
        (lambda: failures.goodput(1, -1, 1), "a time is 0 s or more, not -1"),
        (lambda: failures.saved_bytes(1, -2), "0 or more, not -2"),
        (lambda: memory.shard_of(4, 2, 2), "no shard of 4 rows for rank 2 of 2"),
        (lambda: failures.pairs_that_lose(1), "2 hosts or more, not 1"),
        (lambda: failures.pairs_that_lose(3, "pairs"), "an even number of hosts, not 3"),
        (lambda: failures.pairs_that_lose(4, "star"), "a placement is ring or pairs, not 'star'"),
    ],
)
def test_what_is_no_job_is_refused(call, told):
    with pytest.raises(ValueError, match=told):
        call()
