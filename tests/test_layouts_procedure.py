"""The book's rule for a first layout: right about the kind of layout, and never one that does not fit."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo.planner.layouts import Layout
from pardemo.planner.layouts.against import room
from pardemo.planner.layouts.memory import memory
from pardemo.planner.layouts.procedure import adds, candidates, choose
from pardemo.planner.layouts.procedure_check import compare, job_of, jobs


@pytest.fixture(scope="module")
def thirty():
    return compare()


def test_the_rule_takes_little_longer_than_the_search(thirty):
    ratios = [row.ratio for row in thirty if row.chosen is not None]
    assert len(thirty) == 30
    assert len(ratios) == 29
    assert statistics.median(ratios) < 1.03
    assert sum(ratio <= 1.15 for ratio in ratios) >= 27
    assert max(ratios) < 1.5
    assert min(ratios) >= 0.99, "the search tries all that the rule does"


def test_where_the_rule_finds_nothing_the_search_finds_nothing(thirty):
    assert [row.name for row in thirty if row.chosen is None] == [row.name for row in thirty if row.best is None]
    assert [row.name for row in thirty if row.best is None] == ["llama3-70b, 8 H100, 8k"]


@pytest.mark.parametrize(
    ("case", "batch", "kind"),
    [
        (("llama3.2-1b", "H100", 8, 50, 8192), 64, "replicas"),
        (("llama3.2-3b", "H100", 8, 50, 8192), 64, "ZeRO-1"),
        (("llama3-8b", "H100", 8, 50, 4096), 256, "ZeRO-2"),
        (("llama3-8b", "H100", 8, 50, 8192), 64, "ZeRO-3"),
        (("baichuan2-13b", "H100", 32, 100, 4096), 512, "HSDP"),
        (("baichuan2-13b", "H100", 32, 12.5, 4096), 512, "PP 4, ZeRO-1"),
        (("llama3-8b", "4090", 8, 1.25, 4096), 256, "TP 4, PP 2"),
    ],
)
def test_each_kind_has_its_job(case, batch, kind):
    assert choose(job_of(*case), batch).kind == kind


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["llama3-8b", "qwen2.5-14b", "llama3-70b"]),
    st.sampled_from(["H100", "A100-40GB", "4090"]),
    st.sampled_from([1, 4, 8, 24, 64]),
    st.sampled_from([1.25, 50, 400]),
    st.integers(1, 96),
)
def test_what_it_takes_divides_the_job_and_fits(model, gpu, gpus, network, batch):
    job = job_of(model, gpu, gpus, network)
    if all(batch % (gpus // cut) for cut in (2**k for k in range(20)) if gpus % cut == 0):
        with pytest.raises(ValueError, match="no cut by powers of two"):
            choose(job, batch)
        return
    chosen = choose(job, batch)
    if chosen is None:
        assert candidates(job, batch) == []
        return
    assert chosen.layout.gpus == gpus
    assert chosen.layout.batch == batch
    assert memory(job, chosen.layout).peak_bytes == chosen.nbytes <= room(job)
    assert chosen.added <= min(one.added for one in candidates(job, batch)) + 0.03


def test_the_terms_are_the_chapters_formulas():
    job = job_of("llama3-8b", "H100", 64, 400)
    flops, inside, across = 0.5 * 989e12, job.machine.gpu.link_bytes_per_s, 0.5 * 400e9
    of = {
        "recompute": Layout(dp=64, recompute="full", accumulation=8),
        "tp": Layout(tp=8, dp=8, sequence_parallel=True, accumulation=8, sharding="zero1"),
        "pp": Layout(pp=4, dp=16, accumulation=12, chunks=2, sharding="zero1"),
        "zero3": Layout(dp=64, sharding="zero3", micro_batch=1, accumulation=8),
    }
    shares = {name: adds(job, layout) for name, layout in of.items()}
    assert shares["recompute"]["recomputation"] == pytest.approx(1 / 3)
    assert shares["tp"]["tensor parallel"] == pytest.approx(7 * flops / (4.5 * 4096 * inside))
    assert shares["pp"]["pipeline"] >= 3 / 24
    assert shares["zero3"]["data parallel"] == pytest.approx(max(0, flops / across / 4096 - 1))


def test_a_slower_network_never_takes_less():
    layout = Layout(dp=64, sharding="zero3", accumulation=8)
    shares = [sum(adds(job_of("llama3-8b", "H100", 64, network), layout).values()) for network in (1, 10, 100, 1000)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("batch", "said"), [(0, "at least 1 sample, not 0"), (7, "no cut by powers of two divides 7")])
def test_what_cannot_be_asked(batch, said):
    with pytest.raises(ValueError, match=said):
        choose(job_of("llama3-8b", "H100", 24, 50), batch)


def test_the_thirty_jobs_have_names_of_their_own():
    assert len({name for name, _, _ in jobs()}) == 30
