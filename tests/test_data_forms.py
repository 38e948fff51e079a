"""Data as people have it: each form is read as rows of instruction, input and output, and trained on as it says."""

import json

import pytest
from conftest import tiny_folder

from pardemo import cli, headlines
from pardemo.finetune import samples
from pardemo.headlines import rows as data_rows

FORMS = {
    "article": {"instruction": "Write a headline.\n", "input": "It rains.", "output": "Rain", "source": "news"},
    "alpaca": {"instruction": "Name a colour.", "input": "", "output": "Blue"},
    "alpaca with an input": {"instruction": "Translate.", "input": "Regen", "output": "rain"},
    "alpaca without an input": {"instruction": "Name a bird.", "output": "Wren"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    "messages": {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "2"},
        ]
    },
    "prompt": {"prompt": "The sky is", "completion": " blue"},
    "prompt as messages": {
        "prompt": [{"role": "user", "content": "Why?"}],
        "completion": [{"role": "assistant", "content": "So."}],
    },
    "text": {"text": "A page of a book."},
}
#: Of each form what the user says last, what is learned.
EXPECTED = {
    "article": ("Write a headline.\nIt rains.", "Rain"),
    "alpaca": ("Name a colour.", "Blue"),
    "alpaca with an input": ("Translate.\nRegen", "rain"),
    "alpaca without an input": ("Name a bird.", "Wren"),
    "sharegpt": ("Hi", "Hello"),
    "messages": ("Two?", "2"),
    "prompt": ("The sky is", " blue"),
    "prompt as messages": ("Why?", "So."),
    "text": ("", "A page of a book."),
}


def written(path, *rows, lines=True):
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) if lines else json.dumps(rows)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_of_each_form_is_read(form, lines, tmp_path):
    (row,) = headlines.read(written(tmp_path / "train.json", FORMS[form], lines=lines))
    assert (samples.prompt_of(row), row["output"]) == EXPECTED[form]
    report = headlines.check(tmp_path / "train.json")
    assert dict(report.forms) == {form.split()[0]: 1}
    assert report.problems == []


def test_what_was_said_before_is_the_prompt_and_plain_text_has_none(tmp_path):
    rows = headlines.read(written(tmp_path / "train.json", *FORMS.values()))
    words = [row["input"] for row in headlines.generate(150, seed=3)]
    folder = tiny_folder(tmp_path / "model", words + [text for pair in EXPECTED.values() for text in pair])
    from pardemo.baichuan2 import Baichuan2Tokenizer

    tokenizer = Baichuan2Tokenizer(str(folder / "tokenizer.model"))
    by_form = dict(zip(FORMS, rows, strict=True))
    talked = samples.encode(by_form["messages"], tokenizer, 512)
    prompt = tokenizer.prompt_ids(FORMS["messages"]["messages"][:-1])
    assert talked["input_ids"][: len(prompt)] == prompt
    assert talked["labels"][: len(prompt)] == [samples.IGNORED] * len(prompt)
    assert [label for label in talked["labels"] if label >= 0] == [*tokenizer.text_ids("2"), tokenizer.eos_token_id]
    plain = samples.encode(by_form["text"], tokenizer, 512)
    assert plain["input_ids"] == [*tokenizer.text_ids("A page of a book."), tokenizer.eos_token_id]
    assert plain["labels"][1:] == plain["input_ids"][1:], "all of it is learned; nothing predicts a first token"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"conversations": []}, "turns"),
        ({"conversations": [{"from": "human", "value": "Hi"}]}, "answer"),
        ({"conversations": [{"from": "nobody", "value": "Hi"}, {"from": "gpt", "value": "x"}]}, "'nobody'"),
        ({"messages": [{"role": "user", "content": 3}]}, "turn 1"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"},
                       {"role": "assistant", "content": "c"}]}, "turn 2"),
        ({"prompt": "a", "completion": " "}, "completion"),
        ({"text": ""}, "text"),
        ({"instruction": "a", "output": 3}, "output"),
        ({"question": "a"}, "missing field instruction"),
    ],
)  # fmt: skip
def test_a_bad_row_of_any_form_is_named(row, named, tmp_path, capsys):
    path = written(tmp_path / "train.json", FORMS["alpaca"], row)
    with pytest.raises(ValueError, match="line 2"):
        headlines.read(path)
    assert cli.main(["data", "check", str(path)]) == 1
    printed = capsys.readouterr().out
    assert named in printed
    assert "1 of the form alpaca" in printed


def test_questions_that_come_twice_are_named_and_an_empty_input_is_none(tmp_path):
    other = {**FORMS["alpaca"], "instruction": "Name a fish."}
    assert len(headlines.read(written(tmp_path / "a.json", FORMS["alpaca"], other))) == 2
    with pytest.raises(ValueError, match=r"line 3.*duplicate"):
        headlines.read(written(tmp_path / "b.json", FORMS["alpaca"], other, {**other, "output": "Cod"}))


@pytest.mark.parametrize("form", FORMS)
def test_the_planners_script_reads_the_same_forms(form):
    from pardemo.planner.fine_tune.scripts import train

    row = train._row(FORMS[form], "train.json, line 1")
    told = [turn["content"] for turn in row["messages"]] if "messages" in row else [*row.values()]
    asked, answer = EXPECTED[form]
    assert told[-1] == answer
    assert asked.split() == [word for text in told[:-1][-1:] for word in text.split()]


def test_all_forms_are_documented():
    assert all(f"``{form}``" in data_rows.__doc__ for form in data_rows.FORMS)
