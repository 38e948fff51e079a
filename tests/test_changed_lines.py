"""Two scripts beside each other: what is new, what is gone, and what has only moved to the right."""

import pytest

from pardemo.draw.changed_lines import changed_lines

BEFORE = "a = 1\ndef train():\n    one()\n    two()\n\ndef parse():\n    pass\n"
AFTER = "a = 1\ndef train():\n    with all():\n        one()\n    three()\n\ndef parse():\n    pass\n"


def test_an_indented_line_is_the_same():
    found = changed_lines(BEFORE, AFTER)
    assert (found.new, found.gone) == (["with all():", "three()"], ["two()"])


def test_a_part_is_shown_and_all_is_counted():
    part = changed_lines(BEFORE, AFTER).part("def train", "def parse")
    shown = "  def train():\n+     with all():\n          one()\n-     two()\n+     three()"
    assert repr(part) == shown
    assert part.new == ["with all():", "three()"]
    page = part._repr_html_()
    assert page.count("<div") == 6, "one for each line, in one that is as wide as the widest"
    assert "&lt;" in changed_lines("", "a < b")._repr_html_()
    with pytest.raises(ValueError, match="def"):
        changed_lines(BEFORE, AFTER).part("def eval", "def parse")
