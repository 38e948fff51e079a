"""The thresholds that pages print follow from the book's one table of rates."""

import json
import math

import pytest

from pardemo import project
from pardemo.book.chapters.scorecard.thresholds import few_tokens, restarts, states, thresholds
from pardemo.book.contents import notebook_of
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

H100, HIDDEN = hardware.gpu("H100"), 8192
FLOPS, INSIDE = rates.matrix(H100), rates.inside(H100)
CARD, PLAIN = hardware.link("infiniband-400g"), hardware.link("ethernet-100g")
FEW = rates.LINK_SHARE
RATIO = FLOPS / INSIDE  # operations a byte


def remembered(chapter):
    return text_of(chapter).partition("## Remember")[2].partition("\n## ")[0]


def text_of(chapter):
    notebook = json.loads((project.root() / "notebooks" / f"{notebook_of(chapter)}.ipynb").read_text(encoding="utf-8"))
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


@pytest.mark.parametrize(
    ("chapter", "tokens", "digits"),
    [
        ("data_parallel", RATIO, -1),  # (N − 1)/N is 1 for many ranks
        ("data_parallel", FLOPS / rates.between(8 * CARD), -2),
        ("data_parallel", FLOPS / rates.between(PLAIN), -3),
        ("cluster", 1 / 2 * FLOPS / (FEW * PLAIN), -2),  # two nodes
        ("cluster", 1 / 2 * FLOPS / (FEW * 8 * CARD), -2),
        ("cluster", 7 / 8 * RATIO, -1),
        ("zero_communication", RATIO, -2),
        ("zero_communication", FLOPS / rates.between(8 * CARD), -2),
        ("zero_communication", FLOPS / rates.between(PLAIN), -3),
        ("which_layout", FLOPS / rates.between(8 * CARD), -2),
        ("which_layout", FLOPS / rates.between(CARD), -2),
        ("scorecard", RATIO, -2),
        ("scorecard", FLOPS / rates.between(8 * CARD), -2),
        ("overlap", RATIO, -1),  # columns
        ("fewer_bits", 5 * FLOPS / H100.memory_bytes_per_s, -1),  # bytes of a conversion
    ],
)
def test_what_is_to_be_remembered_is_the_threshold_of_the_table(chapter, tokens, digits):
    assert f"{round(tokens, digits):,.0f}" in remembered(chapter)


@pytest.mark.parametrize(
    ("chapter", "printed"),
    [
        ("megatron_mlp", f"F/B is {round(RATIO, -1):,.0f}"),
        ("megatron_mlp", f"{100 * 7 * RATIO / (12 * HIDDEN):.0f} % for eight"),
        ("megatron_mlp", f"{round(FLOPS / (2 * rates.between(CARD)), -3):,.0f} for each replica"),
        ("megatron_attention", f"{100 * 7 * RATIO / (4.5 * HIDDEN):.0f} % for eight"),
        ("megatron_attention", f"eight need {round(7 * RATIO / 0.45, -2):,.0f}"),
        ("megatron_attention", f"four ranks need h ≥ {round(3 * RATIO / 0.45, -2):,.0f}"),
        ("vocabulary", f"{round(0.1 * H100.memory_bytes / 8 / 128_256, -2):,.0f} tokens"),
        ("vocabulary", f"{INSIDE / 1e9:.0f} GB/s"),
        ("scorecard", f"{FLOPS / 1e12:.0f} TFLOP/s, {INSIDE / 1e9:.0f} GB/s inside a node"),
        ("scorecard", f"{rates.between(8 * CARD) / 1e9:.0f} GB/s between"),
    ],
)
def test_a_page_prints_what_the_rates_give(chapter, printed):
    assert printed in " ".join(text_of(chapter).split())


def test_up_to_ten_ranks_the_sum_of_a_gradient_hides():
    assert 1 + math.floor(2 * HIDDEN / RATIO) == 10
    assert "up to ten ranks" in text_of("megatron_mlp")


def test_the_scorecard_s_threshold_of_fp8_is_its_page_s():
    (line,) = (row for row in thresholds().rows if row.chapter == "fewer_bits")
    assert line.values["H100"] == f"{5 * FLOPS / H100.memory_bytes_per_s:,.0f}"


def line(question):
    (found,) = (row for row in thresholds().rows if row.question.startswith(question))
    return found.values["H100"]


def test_how_large_a_model_may_be_is_one_number_on_both_pages():
    """The peak in Adam's step on a node of eight H100s, which *ZeRO's memory* prints for each stage."""
    largest = [states(H100, 8, stage) / 1e9 for stage in range(4)]
    assert all(f"{n:.1f}" in remembered("zero_memory") for n in largest)
    lines = ("One GPU holds", "ZeRO-1 on one node", "ZeRO-3 on one node")
    assert [line(one) for one in lines] == [f"{largest[stage]:.1f} billion" for stage in (0, 1, 3)]


def test_what_nodes_need_is_one_number_on_both_pages():
    two_nodes = float(line("… between two nodes").split()[0].replace(",", ""))
    assert f"{round(two_nodes, -2):,.0f} on eight of 400" in remembered("cluster")
    assert f"inside: {round(float(line('An all-reduce of gradients').split()[0].replace(',', '')), -1):,.0f}" in (
        remembered("cluster")
    )


def test_how_wide_an_expert_has_to_be_is_one_number_on_both_pages():
    width = float(line("Experts on the GPUs").split()[0].replace(",", ""))
    assert f"{round(width, -1):,.0f} over an H100's NVLink" in remembered("experts")


def test_from_where_on_restarts_cost_one_per_cent():
    assert f"from {round(restarts(600), -3):,.0f} GPUs on" in remembered("host_fails")
    assert line("Restarts of ten minutes") == f"{restarts(600):,.0f} GPUs"


def test_fewer_tokens_than_a_pipeline_needs_are_those_of_the_pages():
    four_nodes = 3 / 4 * few_tokens(shape_of("baichuan2-13b"))
    assert f"here {four_nodes / 1e6:.1f} million" in text_of("zero_communication")
    assert "fewer than (H−1)/H · Ψ/h tokens" in remembered("zero_communication")


@pytest.mark.parametrize("chapter", ["zero_communication", "which_layout", "scorecard"])
def test_the_threshold_is_of_zero_3_alone(chapter):
    (said,) = (point for point in remembered(chapter).split("\n- ") if "Threshold" in point)
    assert "T ≥ F/B" in said.partition("Threshold")[2]
    assert "ZeRO-3" in said.partition("Threshold")[2].partition("T ≥ F/B")[0]
