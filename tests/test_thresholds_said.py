"""The thresholds that pages print under *Remember* follow from the book's one table of rates."""

import json

import pytest

from pardemo import project
from pardemo.book.contents import notebook_of
from pardemo.planner import hardware, rates

_H100 = hardware.gpu("H100")
_F, _INSIDE = rates.matrix(_H100), rates.inside(_H100)
_CARD, _PLAIN = hardware.link("infiniband-400g"), hardware.link("ethernet-100g")
_FEW = rates.LINK_SHARE


def remembered(chapter):
    notebook = json.loads((project.root() / "notebooks" / f"{notebook_of(chapter)}.ipynb").read_text(encoding="utf-8"))
    text = "\n\n".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return text.partition("## Remember")[2].partition("\n## ")[0]


@pytest.mark.parametrize(
    ("chapter", "tokens", "digits"),
    [
        ("data_parallel", _F / _INSIDE, -1),  # (N − 1)/N is 1 for many ranks
        ("data_parallel", _F / rates.between(8 * _CARD), -2),
        ("data_parallel", _F / rates.between(_PLAIN), -3),
        ("cluster", 1 / 2 * _F / (_FEW * _PLAIN), -2),  # two nodes
        ("cluster", 1 / 2 * _F / (_FEW * 8 * _CARD), -2),
        ("cluster", 7 / 8 * _F / _INSIDE, -1),
        ("overlap", _F / _INSIDE, -1),  # columns
    ],
)
def test_a_page_prints_the_threshold_of_the_table(chapter, tokens, digits):
    assert f"{round(tokens, digits):,.0f}" in remembered(chapter)
