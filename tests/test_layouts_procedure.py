"""The book's rule for a first layout: nearly as fast as the search's, never one that does not fit, the only one."""

import ast
import dataclasses
import re
import statistics

import nbformat
import pytest
from book import drawings
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo import project
from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.book.page.rule import rule
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.procedure import adds, candidates, choose, compare, job_of, jobs


@pytest.fixture(scope="module")
def thirty():
    return compare()


@pytest.mark.nightly
def test_the_rule_takes_little_longer_than_the_search(thirty):
    ratios = [row.ratio for row in thirty if row.chosen is not None]
    assert len(thirty) == 30
    assert len(ratios) == 29
    assert statistics.median(ratios) < 1.03
    assert sum(ratio <= 1.15 for ratio in ratios) >= 23, "the others: which_layout.rule_near says why"
    assert max(ratios) < 1.3
    assert min(ratios) >= 0.99, "the search tries all that the rule does"


def cuts(layout):
    return layout.tp > 1, layout.pp > 1, layout.cp > 1


def shared(layout):
    return layout.sharding, bool(layout.shard_group)


@pytest.mark.nightly
def test_the_page_counts_how_often_rule_and_search_take_one_kind(thirty):
    pairs = [(row.chosen.layout, row.best.layout) for row in thirty if row.chosen is not None]
    same_cuts = [(ours, theirs) for ours, theirs in pairs if cuts(ours) == cuts(theirs)]
    same_kind = [(ours, theirs) for ours, theirs in same_cuts if shared(ours) == shared(theirs)]
    said = f"in {len(same_cuts)} jobs both make the same cuts, and in {len(same_kind)} of these they shard the same"
    assert any(said in text for text in cells_of("which_layout", "markdown"))


@pytest.mark.nightly
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
        with pytest.raises(ValueError, match="powers"):
            choose(job, batch)
        return
    chosen = choose(job, batch)
    if chosen is None:
        assert candidates(job, batch) == []
        return
    assert chosen.layout.gpus == gpus
    assert chosen.layout.batch == batch
    assert predict_memory(job, chosen.layout).peak_bytes == chosen.nbytes <= job.machine.usable_bytes
    assert chosen.added <= min(one.added for one in candidates(job, batch)) + 0.03


def test_the_terms_are_the_chapters_formulas():
    job = job_of("llama3-8b", "H100", 64, 400)
    flops, inside, across = 0.8 * 794.5e12, 0.8 * 450e9, 0.48 * 400e9
    r = flops / across / 8192  # a gather's time over a forward pass's
    assert r < 1 < 2 * flops / across / 4096

    def adds_of(part, tokens=8192, **cut):
        return adds(dataclasses.replace(job, sequence=tokens), Layout(**cut))[part]

    assert adds_of("recomputation", dp=64, recompute="full", accumulation=8) == pytest.approx(1 / 3)
    cut = adds_of("tensor parallel", tp=8, dp=8, sequence_parallel=True, accumulation=8)
    assert cut == pytest.approx(7 * flops / (4.5 * 4096 * inside))
    assert adds_of("pipeline", pp=4, dp=16, accumulation=12, chunks=2) >= 3 / 24
    of_sharding = {
        ("zero3", 1): 0, ("zero3", 4): 4 * r - 1, ("zero2", 1): r / 24, ("zero2", 8): (8 * r - 2) / 3 + 8 * r / 24,
        ("zero1", 1): r / 24, ("none", 1): 0, ("none", 8): 2 * (8 * r - 1) / 24,
    }  # fmt: skip
    for (sharding, shorter), added in of_sharding.items():
        found = adds_of("data parallel", 8192 // shorter, dp=64, sharding=sharding, accumulation=8)
        assert found == pytest.approx(added), (sharding, shorter)


def test_messages_are_the_term_of_the_drawing():
    """⅔ · h · p · v · F / (Ψ · B): between nodes B is one GPU's part of its node's cards, however many ranks it has."""
    flops, card = 0.8 * 794.5e12, 0.48 * 400e9 / 8
    job = job_of("llama3-70b", "H100", 64, 400)
    for cut in ({"tp": 4, "pp": 8, "dp": 2, "chunks": 2}, {"tp": 8, "pp": 4, "dp": 2}):
        layout = Layout(sequence_parallel=True, accumulation=16, **cut)
        p, v = layout.pp, layout.chunks
        messages = adds(job, layout)["pipeline"] - (p - 1) / (16 * v)
        assert messages == pytest.approx(2 / 3 * 8192 * p * v * flops / (job.shape.params * card))
    assert "⅔ · h · p · v · F / (Ψ · B)" in rule().alt


def test_hsdp_or_stages_on_the_nodes():
    """Baichuan2-13B on four nodes with a plain card each: what *ZeRO's traffic* and *Which layout?* say of it."""
    job = job_of("baichuan2-13b", "H100", 32, 12.5)
    kappa = 0.8 * 794.5e12 / (0.48 * 12.5e9 * 4096)
    hsdp, stages = Layout(dp=32, sharding="zero3", shard_group=8, accumulation=16), Layout(pp=4, dp=8, accumulation=64)
    added = {"HSDP": sum(adds(job, hsdp).values()), "stages": sum(adds(job, stages.but(sharding="zero1")).values())}
    assert added["HSDP"] == pytest.approx((2 * kappa - 2) / 48)
    exact = (2 * 3 / 4 * kappa - 2) / 48
    messages = adds(job, stages)["pipeline"] - 3 / 64
    tokens, fewest = 512 * 4096, job.shape.params / job.shape.hidden
    assert tokens < fewest
    assert messages / (2 * kappa / 48) == pytest.approx(tokens / fewest), "per byte, both are as quick"
    assert 3 / 4 * fewest < tokens, "counted exactly, HSDP sends a little less"
    (text,) = (
        text for text in cells_of("zero_communication", "markdown") if "fewer than (H−1)/H · Ψ/h tokens**" in text
    )
    assert f"Four stages add {100 * added['stages']:.0f} %: messages {100 * messages:.0f} (" in text
    assert f"the bubble {100 * 3 / 64:.0f} (3/64" in text
    between, under_hsdp = 4 * job.shape.hidden * tokens, 4 * job.shape.params * 3 / 4
    assert f"{between / 1e9:.0f} GB between stages, {under_hsdp / 1e9:.0f} under HSDP" in text
    for share in (exact, added["HSDP"]):
        assert f"{100 * share:.0f} %" in text
    compute_s, in_fp32 = 16 * 6 * job.shape.params * 4096 / (0.8 * 794.5e12), (4 * 3 / 4 * kappa - 2) / 48
    said = f"HSDP takes {compute_s * (1 + in_fp32):.0f} s, not {compute_s * (1 + exact):.0f}"
    assert any(said in text for text in cells_of("zero_communication", "markdown"))


def test_few_tokens_a_step_put_stages_on_the_nodes_and_many_take_hsdp():
    for tokens, kind in ((2**20, "PP"), (2**22, "HSDP")):
        job = job_of("llama3-8b", "H100", 32 if kind == "HSDP" else 16, 12.5, 8192)
        assert (tokens > job.shape.params / job.shape.hidden) == (kind == "HSDP")
        assert choose(job, tokens // 8192).kind.startswith(kind)


def test_a_threshold_is_a_matter_of_each_pass():
    """With recomputation the backward pass has room for more traffic, the forward pass has not."""
    job = job_of("llama3-8b", "H100", 64, 400, 2048)
    r = 0.8 * 794.5e12 / (0.48 * 400e9) / 2048
    plain, again = (adds(job, Layout(dp=64, sharding="zero3", recompute=how)) for how in ("none", "full"))
    assert plain["data parallel"] == pytest.approx(r - 1)
    assert again["data parallel"] == pytest.approx((r - 1) / 3 + max(0, 2 * r / 3 - 1))


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


#: The chapters that choose a layout, and show the rule or ask it.
CHOOSING = ("zero_communication", "which_layout", "scorecard")
LAYOUTS = {"DDP", "replicas", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2", "HSDP", "TP", "PP", "TP PP"}
FOLDER = project.root() / "pardemo" / "book" / "chapters"


def cells_of(chapter, kind):
    cells = nbformat.read(project.notebooks()[notebook_of(chapter)], 4).cells
    return [cell.source for cell in cells if cell.cell_type == kind]


def python_of(chapter):
    """The chapter's modules, and its notebook's cells without their magics."""
    modules = [path.read_text(encoding="utf-8") for path in sorted((FOLDER / chapter).glob("*.py"))]
    cells = [re.sub(r"(?m)^\s*%.*$", "", source) for source in cells_of(chapter, "code")]
    return [*modules, *cells]


@pytest.mark.parametrize("chapter", CHOOSING)
def test_each_chapter_that_chooses_asks_the_rule(chapter):
    asks = re.compile(r"from pardemo\.(planner\.layouts\.procedure|book\.page\.rule) import")
    assert any(asks.search(source) for source in python_of(chapter))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_no_chapter_has_a_rule_of_its_own(chapter):
    """A function that answers with names of layouts asks the rule for them."""
    for source in python_of(chapter):
        for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
            returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
            named = {value.value for value in returned if isinstance(value, ast.Constant)} & LAYOUTS
            called = {getattr(node.func, "id", "") for node in ast.walk(function) if isinstance(node, ast.Call)}
            assert len(named) < 2 or called & {"choose", "candidates", "taken_of", "search"}, function.name


def test_what_a_chapter_draws_of_the_rule_is_the_whole_rule():
    drawn = drawings.layout_choice, drawings.sharding_choice
    assert {draw().alt for draw in drawn} == {rule().alt}


def answer_for_8b(sequence):
    """Of Llama 3 8B on eight H100s, a million tokens a step."""
    return choose(job_of("llama3-8b", "H100", 8, 50, sequence), 2**20 // sequence).kind


def test_8b_on_eight_h100s():
    assert [answer_for_8b(sequence) for sequence in (2048, 4096, 8192)] == ["ZeRO-1", "ZeRO-2", "ZeRO-3"]


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_8b_on_eight_h100s_has_one_answer_for_each_length(chapter):
    """What a text says that this job takes is the rule's answer for one of the lengths of samples that it names."""
    for text in cells_of(chapter, "markdown"):
        for paragraph in re.split(r"\n\s*(?:\n|- )", text):
            if "8B" in paragraph and re.search(r"(8|eight) H100", paragraph):
                lengths = {4096} | {int(n.replace(",", "")) for n in re.findall(r"([248],\d{3}) tokens", paragraph)}
                taken = re.findall(r"takes? \*{0,2}(ZeRO-\d|FSDP2|HSDP|DDP|replicas)", paragraph)
                answers = {answer_for_8b(sequence) for sequence in lengths}
                assert {name.replace("FSDP2", "ZeRO-3") for name in taken} <= answers, paragraph


def test_the_text_says_the_answer():
    said = re.compile(r"8B on (8|eight|one node of eight) H100s\*\*.*takes? \**ZeRO-2")
    assert any(said.search(text) for text in cells_of("which_layout", "markdown"))


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_8_per_cent_stay_free_everywhere(chapter):
    for text in cells_of(chapter, "markdown"):
        for share, sentence in re.findall(r"(\d+) (?:%|per cent)([^.]*\bfree\b[^.]*)", text):
            if "memory" in sentence and "paper" not in sentence:
                assert share == "8", sentence
