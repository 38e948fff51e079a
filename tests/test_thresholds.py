"""The thresholds that pages print follow from the book's one table of rates."""

import json
import math

import pytest

from pardemo import project
from pardemo.book.chapters.scorecard.thresholds import thresholds
from pardemo.book.contents import notebook_of
from pardemo.planner import hardware, rates

H100, HIDDEN = hardware.gpu("H100"), 8192
FLOPS, INSIDE = rates.matrix(H100), rates.inside(H100)
CARD, PLAIN = hardware.link("infiniband-400g"), hardware.link("ethernet-100g")
FEW = rates.LINK_SHARE
RATIO = FLOPS / INSIDE  # operations a byte


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
        ("overlap", RATIO, -1),  # columns
        ("fewer_bits", 5 * FLOPS / H100.memory_bytes_per_s, -1),  # bytes of a conversion
    ],
)
def test_what_is_to_be_remembered_is_the_threshold_of_the_table(chapter, tokens, digits):
    remembered = text_of(chapter).partition("## Remember")[2].partition("\n## ")[0]
    assert f"{round(tokens, digits):,.0f}" in remembered


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
