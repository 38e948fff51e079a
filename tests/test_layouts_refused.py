"""What the planner of layouts refuses, in one line that says what is wrong and what would be right."""

from dataclasses import replace

import pytest
from conftest import says

from pardemo import cli
from pardemo.planner import hardware
from pardemo.planner.layouts import layout_text
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import NANOTRON, PROGRAMS
from pardemo.planner.layouts.search import search
from pardemo.planner.layouts.shape import Shape

#: Impossible layouts of llama3-8b on 64 GPUs, with what else is said and what is told.
EXPLAINED = [
    ("tp=64", [], "32 attention heads do not divide by TP 64; 1, 2, 4, 8, 16, 32 would do"),
    ("pp=64", [], "32 layers cannot be cut into PP 64 × 1 chunks; at most 32"),
    ("ep=2", [], "EP 2 needs a model with experts; llama3-8b has none"),
    ("tp=4,dp=8", [], "TP 4 × CP 1 × PP 1 × DP 8 are 32 GPUs, not 64"),
    ("cp=4", ["--sequence", "100"], "a sequence of 100 does not divide into 2 × CP 4 pieces"),
    ("chunks=2", [], "2 chunks need a pipeline; PP is 1"),
    ("tp=2,tp=4", [], "tp is said twice in 'tp=2,tp=4'"),
    ("tp=0", [], "tp must be a whole number of at least 1, not 0"),
    ("sharding=zero4", [], "sharding must be one of none, zero1, zero2, zero3, not 'zero4'"),
    ("pp=4,chunks=2", ["--per-step", "65"], "65 samples a step do not divide by DP 16 × 1 samples"),
    ("accumulation=4", ["--per-step", "64"], "DP64 1×4 has 256 samples a step, and --per-step says 64"),
    ("", ["--per-step", "65"], "65 samples a step do not divide by DP 64"),
    ("cp=2", ["--program", "nanotron"], "nanotron has no cp; it has pp, tp, zero1 (--program)"),
]
#: Other questions that have no answer.
SEARCHED = [
    (["--hosts", "0"], "--hosts must be at least 1, not 0"),
    (["--sequence", "4096"], "--sequence must be at most 1,024: gpt2 has learned no further positions"),
    (["--link", "0"], "a link's rate must be above 0 Gbit/s, not 0"),
]


MORE_HEADS_THAN_WIDTH = """{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 100, "vocab_size": 100,
    "num_hidden_layers": 2, "intermediate_size": 128}"""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"hidden_size": 4}', "is not a model's config.json: it has no model_type"),
        ("no json", "is not a model's config.json"),
        ("[" * 100_000, "is not a model's config.json"),
        ('{"model_type": ["llama"]}', "model_type ['llama'] is unknown"),
        ('{"model_type": "lama"}', "model_type 'lama' is unknown; the nearest known is"),
        ('{"model_type": "t5"}', "t5 has an encoder and a decoder"),
        ('{"model_type": "llama", "hidden_size": "big"}', "expected int, got str"),
        ('{"model_type": "mamba"}', "mamba has no attention heads"),
        (MORE_HEADS_THAN_WIDTH, "a head's width must be a whole number of at least 1, not 0"),
    ],
)
def test_a_config_that_cannot_be_read_is_one_line(tmp_path, text, told, capsys):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert cli.main(["plan", "--search", "--model", str(path), "--gpus", "8"]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "runs.csv has no column gpu"), (b"\xff\xfe\x00", "is no UTF-8 text")]
)
def test_a_file_without_runs_is_one_line(tmp_path, content, told, capsys):
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    assert cli.main(["plan", "--against", str(path)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_pipeline_with_stages_left_over_is_one_line():
    large_head = Shape(16, 2048, 32, 32, 8192, 131072, tied=True)
    job = Job(large_head, Machine(hardware.gpu("H100"), 16), NANOTRON)
    with pytest.raises(ValueError, match=r"nanotron.*1.*PP.*16"):
        layout_text.parse_layout("pp=16", job)
    layout_text.parse_layout("pp=16", replace(job, program=PROGRAMS["megatron-core"]))
    assert all(one.layout.pp < 16 for one in search(job, 16).best)


def test_tensor_parallelism_beyond_a_host_is_told_with_its_price(capsys):
    job = ["--model", "llama3-8b", "--gpus", "32", "--gpu", "H100", "--per-step", "64"]
    assert cli.main(["plan", "--explain", "tp=16", *job]) == 0
    assert says(capsys.readouterr().out, "TP", "16", "spans", "2")
    assert cli.main(["plan", "--explain", "tp=8", *job]) == 0
    assert "spans" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--against", "nowhere.csv"], "no file nowhere.csv"),
        (["--search"], "need --model"),
        (["--search", "--model", "llama3-8b"], "need --gpus"),
        (["--picture", "x.png"], "--picture goes with --against"),
        (["--explain", "tq=2", "--model", "llama3-8b", "--gpus", "8"], "no 'tq' in a layout; there are tp, cp, dp"),
        (["--explain", "tp=two", "--model", "llama3-8b", "--gpus", "8"], "tp must be a number"),
        *(
            (["--explain", layout, "--model", "llama3-8b", "--gpus", "64", *more], told)
            for layout, more, told in EXPLAINED
        ),
        *((["--search", "--model", "gpt2", "--gpus", "8", *more], told) for more, told in SEARCHED),
        (["--search", "--model", "llama3-8b", "--gpus", "8", "--program", "x"], "no training program 'x'"),
    ],
)
def test_a_question_that_cannot_be_answered_is_one_line(arguments, told, capsys):
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_model_with_fewer_positions_is_planned_at_those(capsys):
    for model, tokens in (("gpt2", "1,024"), ("llama3-8b", "4,096")):
        assert cli.main(["plan", "--explain", "", "--model", model, "--gpus", "1", "--per-step", "1"]) == 0
        assert f"; 1 sample of {tokens} tokens a step" in capsys.readouterr().out
