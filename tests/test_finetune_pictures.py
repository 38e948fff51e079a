"""The pictures of Baichuan2's fine-tune and of its evaluation: what is told in words is what is drawn."""

import pytest
from book import drawings, figures
from conftest import says

from pardemo.book.chapters.baichuan2_finetune.drawings import common_in_order
from pardemo.draw import palette


def test_only_labelled_tokens_are_coloured():
    pieces = ["<reserved_106>", *"新闻", "<reserved_107>", *"标题", "</s>"]
    drawn = drawings.labelled_tokens(pieces, [False] * 4 + [True] * 3)
    svg = drawn._repr_html_()
    assert svg.count(f'fill="{palette.KEPT["gradients"]}"') == 3 + 1, "and once in the legend"
    assert all(word in svg for word in ("user:", "assistant:", ">end<", ">标<"))
    assert "标题end, have a label" in drawn.alt


@pytest.mark.parametrize(
    ("text", "other", "length"), [("abcd", "acbd", 3), ("abc", "xyz", 0), ("", "abc", 0), ("abcab", "cab", 3)]
)
def test_the_longest_common_subsequence(text, other, length):
    pairs = common_in_order(text, other)
    assert all(text[i] == other[j] for i, j in pairs)
    assert pairs == sorted(pairs)
    assert len(pairs) == len({i for i, _ in pairs}) == len({j for _, j in pairs}) == length


def test_words_out_of_order_are_dashed():
    drawn = drawings.shared_words(["a", "b", "c"], ["c", "a", "b"])
    assert says(drawn.alt, "3", "words", "2")
    assert drawn._repr_html_().count("stroke-dasharray") == 1 + 1, "and once in the legend"


def test_a_word_that_is_there_twice_is_joined_once():
    assert says(drawings.shared_words(["a", "a"], ["a"]).alt, "1", "words", "1")


def test_charts_tell_their_numbers(out):
    losses = {name: {0: 4.0, 10: last} for name, last in (("a", 0.1), ("b", 0.2), ("c", 1.0))}
    assert says(figures.losses_on_groups(losses).alt, "4.00", "1.00")
    kept = {kind: dict.fromkeys(range(4), 1e6) for kind in ("parameters", "gradients", "optimizer states")}
    assert says(figures.lora_by_stage(kept, dict.fromkeys(range(4), 2e6), 0.9).alt, "MB", "3", "3.00", "3", "2.00")
    formats = {("fp32", 10): 7.0, ("fp32", 100): 7.0, ("fp16", 10): 7.0, ("fp16", 100): float("nan")}
    assert "fp16 at 100: nan" in figures.losses_by_format(formats).alt
    ways = {way: {"new rows": loss, "plain headlines": 0.1} for way, loss in (("LoRA", 0.2), ("all", 0.084))}
    picture = figures.losses_of_ways(ways)
    assert says(picture.alt, "0.084", "headlines", "0.1")
    assert ">0.084<" in picture.svg, "of a word no digit is dropped"
    assert "prompt, labelled and padding" in figures.padded_batches({"x": [[-100, 7], [-100, 7, 2]], "y": [[7, 2]]}).alt
    shares = {group: {"the section": 0.5, "both": 0.25} for group in ("a", "b", "c")}
    assert says(figures.where_it_stops(shares, 100).alt, "section", "50%", "25%")
    assert "x 75.0%" in figures.draws({"x": [1.0, 2.0, -1.0, 3.0]}).alt
    score = {"rouge-l": 40.0, "intervals": {"rouge-l": [30.0, 50.0]}}
    scores = {answer: dict.fromkeys(("a", "b", "c"), score) for answer in ("base", "tuned")}
    picture = figures.scores_of_answers(scores, {"rouge-l": "ROUGE-L"})
    assert says(picture.alt, "40", "40", "40", "tuned", "40", "40", "40")
    assert len(list((out / "figures").iterdir())) == 8
