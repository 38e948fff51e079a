"""The plan read backwards, against the plan read forwards: the largest that fits, and one more that does not."""

import dataclasses
import itertools
import math

import pytest
from test_plan import request, wide

from pardemo.planner import backwards, layers, memory, table
from pardemo.planner.memory import Curve


def with_room(asked, room):
    """The same request of GPUs that have so many bytes, and no more."""
    gpu = dataclasses.replace(asked.cluster.gpu, memory_bytes=room / (1 - table.RESERVE))
    return dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, gpu=gpu))


def planned(asked, **changes):
    """The only row of a request for one engine and one micro-batch."""
    (one,) = table.plan(dataclasses.replace(asked, **changes)).rows
    return one


def piped(**changes):
    """Two stages that have four micro-batches to do, of which each holds two; nothing recomputed."""
    asked = request(
        **{"gpus": 4, "pp": 2, "engines": ("zero-0",), "checkpointing": (False,), "batches": (4,)} | changes
    )
    return dataclasses.replace(asked, job=asked.job.but(adapter=None))


def test_the_longest_sequence_of_a_pipeline_has_micro_batches_in_flight():
    asked = piped()
    long = dataclasses.replace(asked, job=asked.job.but(sequence=448))
    bounded = with_room(asked, planned(long).peak_bytes)
    longest = backwards.longest_sequence(bounded, "zero-0", False, 4)
    assert longest >= 448
    at_most, longer = (
        planned(bounded, job=asked.job.but(sequence=tokens)) for tokens in (longest, longest + backwards.TOKENS)
    )
    assert at_most.accumulation == 4
    assert at_most.fits
    assert not longer.fits


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (2, 1), (2, 2)])
def test_the_largest_batch_of_cut_models_is_the_last_row_that_fits(tp, pp):
    """A pipeline's stages hold several micro-batches, a tensor-parallel rank its part of each."""
    asked = piped(gpus=2 * tp * pp, tp=tp, pp=pp)  # two data-parallel ranks

    def of(batch):
        return {"batches": (batch,), "samples_per_step": 2 * 4 * batch}

    bounded = with_room(asked, planned(asked, **of(12)).peak_bytes)
    most = backwards.largest_batch(bounded, "zero-0", False)
    assert most >= 12
    assert planned(bounded, **of(most)).fits
    assert not planned(bounded, **of(most + 1)).fits


def test_more_gpus_take_less_of_each():
    asked = request(engines=("zero-3",), checkpointing=(True,), config=wide())
    asked = dataclasses.replace(asked, job=asked.job.but(adapter=None))
    assert backwards.least_bytes(asked, 4) < backwards.least_bytes(asked, 1)


def test_largest_batch():
    asked = request(engines=("zero-2",), checkpointing=(True,))
    curve = Curve(asked.job.but(engine="zero-2", ranks=4, accumulation=2))
    room = curve.estimate(6).peak_bytes
    most = backwards.largest_batch(with_room(asked, room), "zero-2", True)
    assert 6 <= most < 10
    fits, more = (curve.estimate(batch, room=room).peak_bytes for batch in (most, most + 1))
    assert fits <= room < more


@pytest.mark.parametrize("guess", [1, 5, 6, 7, 8, 40, 100])
@pytest.mark.parametrize("last", [0, 1, 6, 39, 40])
def test_the_last_that_fits_whatever_the_guess(guess, last):
    asked = []
    assert backwards.last_that_fits(lambda n: asked.append(n) or n <= last, guess, 40) == last
    assert len(asked) <= 2 if guess == last else len(asked) <= 14
    assert all(1 <= n <= 40 for n in asked)


def test_the_longest_sequence_fits_and_a_longer_one_does_not():
    """Checked by dry runs of just these lengths; offload makes room, which the answer takes."""
    full = request(samples_per_step=8, engines=("zero-2",), checkpointing=(True,), config=wide())
    full = dataclasses.replace(full, job=full.job.but(adapter=None))

    def peak(sequence, offload, room=math.inf):
        curve = Curve.at_one(full.job.but(engine="zero-2", ranks=4, sequence=sequence, batch=2))
        return curve.estimate(2, offload=offload, room=room).peak_bytes

    room = peak(448, "none")
    bounded = with_room(full, room)
    longest, longer = (backwards.longest_sequence(bounded, "zero-2", True, 2, how) for how in ("none", "optimizer"))
    assert 448 <= longest < longer
    for sequence, how in ((longest, "none"), (longer, "optimizer")):
        assert peak(sequence, how, room) <= room < peak(sequence + 64, how, room)


@pytest.mark.parametrize(("offload", "longest"), [("none", 1856), ("optimizer", 1792)])
def test_the_longest_sequence_is_run_and_not_only_foretold(offload, longest, monkeypatch):
    """Where need bends upwards, 256 and 512 tokens foretell too much."""
    asked = []

    def need(request, job, how, *rest):
        asked.append(job.sequence)
        return {"none": 4e9, "optimizer": 1e9}[how] + 1e6 * job.sequence + 500 * job.sequence**2

    monkeypatch.setattr(backwards, "_peak", need)
    room = {"none": 7.6e9, "optimizer": 4.4e9}[offload]
    bounded = request(room=room / (1 - table.RESERVE))
    assert backwards.longest_sequence(bounded, "zero-2", True, 2, offload) == longest
    fits, more = (need(bounded, bounded.job.but(sequence=tokens), offload) for tokens in (longest, longest + 64))
    assert fits <= room < more
    assert len(set(asked)) < 8


def test_where_need_bends_few_lengths_are_run(monkeypatch):
    """Short samples need what the update does, long ones their activations: bisected, it would be 269 dry runs."""
    cases = list(itertools.product((300, 1500, 3000), (1e5, 1e6, 1e7), (4.2e9, 5e9, 9e9)))
    runs = 0
    for bend, steep, room in cases:
        asked = []

        def need(tokens, bend=bend, steep=steep):
            return 4e9 + max(1e3 * tokens, steep * (tokens - bend))

        def peak(request, job, *how, asked=asked, need=need):
            asked.append(job.sequence)
            return need(job.sequence)

        monkeypatch.setattr(backwards, "_peak", peak)
        bounded = request(room=room / (1 - table.RESERVE), config=wide())
        fit = [tokens for tokens in range(64, wide().max_position_embeddings + 1, 64) if need(tokens) <= room]
        assert backwards.longest_sequence(bounded, "zero-2", True, 2) == fit[-1]
        runs += len(set(asked))
    assert runs < 7 * len(cases)


def test_backwards_too_gradients_of_earlier_micro_batches_are_kept(monkeypatch):
    asked = []
    monkeypatch.setattr(backwards, "_peak", lambda request, job, *how: asked.append(job.accumulation) or 0.0)
    for samples, kept in ((32, 2), (8, 1)):  # of four ranks: eight each, or two, two at a time
        backwards.longest_sequence(request(samples_per_step=samples), "zero-1", True, 2)
        backwards.least_bytes(request(samples_per_step=samples), 4)
        assert set(asked) == {kept}
        asked.clear()


def test_many_gpus_are_not_dry_run_one_by_one(monkeypatch):
    """Of more ranks than a dry run has, the shards of one with fewer are scaled: here eight from four."""
    seen, own = [], layers.dry_run
    for module in (layers, memory):  # of few layers, and of all
        monkeypatch.setattr(module, "dry_run", lambda job: seen.append(job.ranks) or own(job))
    asked = request(engines=("zero-3",), checkpointing=(True,), config=wide())
    asked = dataclasses.replace(asked, job=asked.job.but(adapter=None))
    exact = backwards.least_bytes(asked, 8)
    monkeypatch.setattr(memory, "DATA_PARALLEL_MOST", 4)
    needed = {n: backwards.least_bytes(asked, n) for n in (8, 32, 100_000)}
    assert set(seen) == {4, 8}
    assert needed[8] > needed[32] > needed[100_000] > 0
    # 3 %: of segments of 2 and of 20 MiB; a shard of an eighth of the states is 40 % of it
    assert needed[8] == pytest.approx(exact, rel=0.03)
