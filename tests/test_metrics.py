"""Scores by the arithmetic of the article's tool, their intervals, the baseline, and ``pardemo score``."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import says
from hypothesis import strategies as st

from pardemo import cli
from pardemo.finetune.headline_scores import HeadlineScores
from pardemo.finetune.metrics import NAMES, intervals, lead_baseline, runtime_figures, score, score_rows
from pardemo.finetune.predict import ROWS

WEATHER = "今天天气很好"
#: prediction, reference, ROUGE-1, -2, -L, BLEU-4 as the tool's own code computes them
GOLDEN = [
    (WEATHER, WEATHER, 100, 100, 100, 100),
    ("今天天气不错", WEATHER, 40, 0, 40, 50.8133),
    ("好", WEATHER, 50, 0, 50, 0.2382),
    ("", WEATHER, 0, 0, 0, 0),
    (WEATHER, "", 0, 0, 0, 0),
    ("The cat sat on the mat.", "The cat is on the mat.", 85.7143, 66.6667, 85.7143, 79.4484),
    ("你好。", "你好。", 100, 100, 100, 84.0896),  # three characters have no 4-gram
]
TEXT = st.text(st.sampled_from("今天气很好不错，。！？”’… \n\tab3.-\u3000\ud800") | st.characters(), max_size=24)


@pytest.mark.parametrize(("prediction", "reference", "one", "two", "longest", "bleu"), GOLDEN)
def test_golden_values_of_the_articles_tool(prediction, reference, one, two, longest, bleu):
    (row,) = score_rows([prediction], [reference])
    assert [row[name] for name in ("rouge-1", "rouge-2", "rouge-l", "bleu-4")] == [one, two, longest, bleu]


def test_the_score_is_the_mean_of_the_rounded_rows():
    before, after = zip(*[(g[0], g[1]) for g in GOLDEN], strict=True)
    rows, whole = score_rows(before, after), score(before, after)
    for name in NAMES:
        assert whole[name] == pytest.approx(sum(row[name] for row in rows) / len(rows), rel=1e-12)
        low, high = whole["intervals"][name]
        assert low < whole[name] < high
    assert whole["samples"] == len(GOLDEN)
    assert all(row[name] == round(row[name], 4) for row in rows for name in NAMES)


def test_character_rouge_by_hand():
    # a space is no character; n-grams count once: 今天气不错, 今天气很好
    (row,) = score_rows(["今天 天气不错"], [WEATHER])
    assert row["char-rouge-1"] == 60
    assert row["char-rouge-2"] == 60  # 今天 天天 天气 of five
    assert row["char-rouge-l"] == pytest.approx(100 * 4 / 6, abs=1e-4)


@pytest.mark.parametrize(
    ("given_predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "2 predictions, but 1 references"),
        ([], [], "nothing to score"),
        ("ab", ["a", "b"], "predictions must be a sequence of texts, not one text"),
        (["a"], [None], r"references\[0\] must be a text, not None"),
    ],
)
def test_what_cannot_be_scored_is_named(given_predictions, references, message):
    with pytest.raises(ValueError, match=message):
        score(given_predictions, references)


def test_intervals_are_reproducible_and_as_wide_as_theory_says():
    values = np.random.default_rng(1).normal(50, 10, size=(400, 2))
    bounds = intervals(values)
    assert (bounds == intervals(values)).all()
    assert (bounds != intervals(values, seed=1)).any()
    half = 1.96 * values.std(axis=0) / 20  # the normal interval of a mean of 400
    expected = np.stack([values.mean(axis=0) - half, values.mean(axis=0) + half], axis=1)
    assert np.abs(bounds - expected).max() < 0.1  # 2,000 resamples find a 2.5 % quantile to about 0.02


def test_one_sample_has_the_interval_of_its_own_value():
    assert score(["今天天气不错"], [WEATHER])["intervals"]["bleu-4"] == [50.8133, 50.8133]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("股市上涨。投资者乐观。", "股市上涨。"),
        ("真的吗？！是的。", "真的吗？！"),
        ("他说：“走吧！”然后离开。", "他说：“走吧！”"),
        ("Up 3.5 percent. Then down.", "Up 3.5 percent."),
        ("增长3.5%，创新高", "增长3.5%，创新高"),
        ("  第一句\n还在继续。第二句。", "第一句\n还在继续。"),
        ("Wait... what? No.", "Wait..."),
        ("", ""),
        (" \n", ""),
    ],
)
def test_the_lead_is_the_first_sentence(text, first):
    assert lead_baseline(text) == first


def test_run_time_figures_in_the_articles_form():
    article = {"predict_runtime": 120.571, "predict_samples_per_second": 8.294, "predict_steps_per_second": 1.037}
    assert runtime_figures(1000, 1000 // 8, 120.571) == article
    with pytest.raises(ValueError, match=r"seconds.*0.*0"):
        runtime_figures(1, 1, 0)


def test_scoring_prints_nothing_and_leaves_no_file(tmp_path):
    code = "from pardemo.finetune.metrics import score; score(['今天'], ['天气'])"
    assert in_a_process(code, TMPDIR=tmp_path) == ("", "")
    assert list(tmp_path.iterdir()) == []


def in_a_process(code, **variables):
    """What it prints, and its errors; without the settings that hubs' libraries read."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "XDG_"))}
    environment |= {name: str(value) for name, value in variables.items()}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def test_words_added_to_the_shared_jieba_do_not_change_a_score(tmp_path):
    code = f"""
import jieba
jieba.add_word({WEATHER!r}, freq=10**9)
assert jieba.lcut({WEATHER!r}) == [{WEATHER!r}]
from pardemo.finetune.metrics import score
print(score(["今天天气不错"], [{WEATHER!r}])["rouge-1"])
"""
    assert in_a_process(code, TMPDIR=tmp_path)[0] == "40.0\n"


@pytest.mark.nightly
def test_as_a_metric_of_evaluate_without_network_or_home(tmp_path):
    code = """
import socket
def refuse(*_): raise OSError("a connection was tried")
socket.socket.connect = refuse
from pardemo.finetune.headline_scores import HeadlineScores
metric = HeadlineScores()
print(metric.compute(predictions=["今天天气不错"], references=["今天天气很好"])["bleu-4"])
"""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir(), temporary.mkdir()
    assert in_a_process(code, HOME=home, TMPDIR=temporary)[0] == "50.8133\n"
    assert [path for folder in (home, temporary) for path in folder.rglob("*") if path.is_file()] == []


def test_the_metric_takes_batches_and_equals_the_score():
    before, after = map(list, zip(*[(g[0], g[1]) for g in GOLDEN], strict=True))
    metric = HeadlineScores()
    for at in range(0, len(before), 3):
        metric.add_batch(predictions=before[at : at + 3], references=after[at : at + 3])
    assert metric.compute() == score(before, after)
    assert metric.compute(predictions=["好"], references=["好"])["rouge-1"] == 100  # and may be used again
    with pytest.raises(ValueError, match=r"predictions.*\(1\).*\(2\)"):
        HeadlineScores().compute(predictions=["好"], references=["好", "天"])


@pytest.fixture
def generated(tmp_path):
    """A file of predictions from two sources."""
    path = tmp_path / ROWS
    rows = [
        {"prompt": "…", "label": reference, "predict": prediction, "source": "LCSTS" if index % 2 else "CSL"}
        for index, (prediction, reference, *_) in enumerate(GOLDEN)
    ]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n", encoding="utf-8")
    return path


def test_the_command_scores_a_file(generated, capsys):
    expected = score([g[0] for g in GOLDEN], [g[1] for g in GOLDEN])
    assert cli.main(["score", str(generated)]) == 0
    table = capsys.readouterr().out
    low, high = expected["intervals"]["bleu-4"]
    assert f"{expected['bleu-4']:.2f}" in table
    assert f"{low:.2f} to {high:.2f}" in table
    assert cli.main(["score", str(generated), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"group": "all"} | expected]


def test_the_command_scores_each_source_apart(generated, capsys):
    assert cli.main(["score", str(generated), "--by", "source", "--json"]) == 0
    whole, *parts = json.loads(capsys.readouterr().out)
    assert [(part["group"], part["samples"]) for part in parts] == [("source=CSL", 4), ("source=LCSTS", 3)]
    for name in NAMES:
        mean = sum(part[name] * part["samples"] for part in parts) / whole["samples"]
        assert whole[name] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "line 8: broken JSON"),
        (b"[" * 100_000, "line 8: broken JSON"),
        (b'"text"', "line 8: not an object in braces"),
        (b'{"predict": "a"}', 'line 8: no "label"'),
        (b'{"label": "a"}', 'line 8: no "predict"'),
        (b'{"label": "a", "predict": null}', 'line 8: "predict" is not text'),
        ('{"label": "今", "predict": "今"}'.encode("gbk"), "line 8: not UTF-8"),
        (b"1\n" * 5, "line 9: not an object in braces; line 10: not an object in braces; and 2 more"),
    ],
)
def test_bad_lines_are_named(generated, capsys, line, message):
    with generated.open("ab") as file:
        file.write(line)
    assert cli.main(["score", str(generated)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(generated) in error
    assert error.count("\n") == 1


def test_a_file_that_cannot_be_scored(generated, tmp_path, capsys):
    assert cli.main(["score", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    assert cli.main(["score", str(empty)]) == 2
    assert "holds no row" in capsys.readouterr().err
    assert cli.main(["score", str(generated), "--by", "sauce"]) == 2
    assert says(capsys.readouterr().err, "1", '"sauce"')
