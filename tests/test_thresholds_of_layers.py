"""The thresholds that the pages on Megatron's layers print follow from the book's one table of rates."""

import json
import math

import pytest

from pardemo import project
from pardemo.book.contents import notebook_of
from pardemo.planner import hardware, rates

_H100, _H = hardware.gpu("H100"), 8192
_RATIO = rates.matrix(_H100) / rates.inside(_H100)  # F/B, in operations a byte
_CARD = rates.between(hardware.link("infiniband-400g"))


def text_of(chapter):
    notebook = json.loads((project.root() / "notebooks" / f"{notebook_of(chapter)}.ipynb").read_text(encoding="utf-8"))
    return "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")


@pytest.mark.parametrize(
    ("chapter", "printed"),
    [
        ("megatron_mlp", f"F/B is {round(_RATIO, -1):,.0f}"),
        ("megatron_mlp", f"{100 * 7 * _RATIO / (12 * _H):.0f} % for eight"),
        ("megatron_mlp", f"{round(rates.matrix(_H100) / (2 * _CARD), -3):,.0f} for each replica"),
        ("megatron_attention", f"{100 * 7 * _RATIO / (4.5 * _H):.0f} % for eight"),
        ("megatron_attention", f"h ≥ {round(7 * _RATIO / 0.45, -2):,.0f} for eight"),
        ("megatron_attention", f"{round(3 * _RATIO / 0.45, -2):,.0f} for four"),
        ("vocabulary", f"{round(0.1 * _H100.memory_bytes / 8 / 128_256, -2):,.0f} tokens"),
        ("vocabulary", f"{rates.inside(_H100) / 1e9:.0f} GB/s"),
    ],
)
def test_a_page_prints_what_the_rates_give(chapter, printed):
    assert printed in text_of(chapter)


def test_up_to_ten_ranks_the_sum_of_a_gradient_hides():
    assert 1 + math.floor(2 * _H / _RATIO) == 10
    assert "up to ten ranks" in text_of("megatron_mlp")
