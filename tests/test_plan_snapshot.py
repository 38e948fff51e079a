"""The planned memory of a step in the format of torch's memory snapshots: torch's own tools read it, its sums are the
plan's."""

import json
import pickle
import pickletools

import pytest
from conftest import says
from dry_rows import dry_rows
from torch.cuda import _memory_viz

from pardemo.cli import main
from pardemo.meters import snapshot as files
from pardemo.planner.dry_run.footprint import LINES
from pardemo.planner.dry_run.measured_peak import example_config
from pardemo.planner.fine_tune import answer, dry_run_comparison, plan_table
from pardemo.planner.hardware import gpu
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.machines import Machine

#: What the viewer's unpickler knows (torch/utils/viz/MemoryViz.js).
KNOWN = {
    "APPENDS", "BINGET", "BININT", "BININT1", "BININT2", "EMPTY_DICT", "EMPTY_LIST", "FRAME", "LONG1", "LONG_BINGET",
    "MARK", "MEMOIZE", "PROTO", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE2", "APPEND", "NEWFALSE", "BINPUT",
    "BINUNICODE", "EMPTY_TUPLE", "NEWTRUE", "NONE", "BINFLOAT", "TUPLE", "TUPLE1", "TUPLE3", "SETITEM",
}  # fmt: skip


def replayed(held):
    """The most bytes at one time, and how they are made up, as the viewer adds the events of its first device."""
    alive, most, at_most = {}, 0, {}
    for event in held["device_traces"][0]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            assert alive.pop(event["addr"])["size"] == event["size"]
        total = sum(one["size"] for one in alive.values())
        if total > most:
            most, at_most = total, dict(alive)
    kinds = {}
    for one in at_most.values():
        kinds[one["category"]] = kinds.get(one["category"], 0) + one["size"]
    return most, kinds


def job():
    """Of two layers: a block of a module in the second is looked for, and more of them take a dry run longer."""
    config = example_config("llama")
    config.num_hidden_layers = 2
    return RankJob(config, sequence=64)


@pytest.mark.parametrize(
    ("engine", "tp", "offload", "samples"),
    [("zero-2", 1, "optimizer", 8), ("fsdp2", 1, "none", 4), ("zero-1", 2, "none", 8)],
)  # fmt: skip
def test_a_rows_blocks_are_its_peak_to_the_byte(engine, tp, offload, samples, tmp_path):
    request = plan_table.Request(
        job(), Machine(gpu("A800-80GB"), 2 * tp), samples, 10, tp=tp,
        engines=(engine,), checkpointing=(True,), host_states=(offload,), batches=(2,),
    )  # fmt: skip
    (row,) = dry_rows(request)
    blocks = dry_run_comparison.blocks_of_row(request, row, row.memory)
    files.write_snapshot(tmp_path / "plan.pickle", blocks)
    written = (tmp_path / "plan.pickle").read_bytes()
    most, kinds = replayed(pickle.loads(written))
    assert most == round(row.peak_bytes)
    for name, nbytes in row.memory.lines.items():
        assert kinds.get(name, 0) == pytest.approx(nbytes, abs=len(blocks) / 2), "a block of half a byte more or less"
        assert tp > 1 or kinds.get(name, 0) == round(nbytes)
    assert {op.name for op, _, _ in pickletools.genops(written)} <= KNOWN
    named = {(block.module, block.kind) for block in blocks}
    assert ("model.layers.1.mlp.down_proj", "temporaries") in named
    assert {block.line for block in blocks if block.kind == "optimizer states"} <= {"optimizer, step", "engine, build"}


def test_torchs_own_tools_take_it():
    blocks = [*files.of_sums({"parameters": 2.5e9, "activations": 1e9}, "a plan"),
              files.Block(512, "temporaries", "model, forward", "mlp", 3, 5, "forward"),
              files.Block(1024, "logits", "train.py:88", "head", 4, None, "forward")]  # fmt: skip
    held = files.snapshot(blocks)
    assert _memory_viz.trace(held).count("MEM[") == 4
    for page in (_memory_viz.trace_plot(held), _memory_viz.trace_plot(held, plot_segments=True)):
        assert "add_local_files" in page
    events = held["device_traces"][0]
    assert [event["action"] for event in events] == ["alloc"] * 4 + ["free_completed", "snapshot"]
    assert events[2]["frames"] == [{"filename": "model, forward", "line": 0, "name": "mlp (temporaries)"}]
    assert events[3]["frames"] == [{"filename": "train.py", "line": 88, "name": "head (logits)"}]
    assert "unknown" in {event["category"] for event in events}, "without it the viewer stops"
    assert replayed(held)[0] == 3.5e9 + 1024 + 512


def test_sums_are_rounded_together():
    thirds = dict.fromkeys(("parameters", "gradients", "logits"), 1e9 + 1 / 3)
    blocks = files.of_sums(thirds, "a plan")
    assert sum(block.bytes for block in blocks) == round(sum(thirds.values())) == 3_000_000_001
    assert {block.kind for block in blocks} == set(thirds)


JOB = ["--model", "llama3-8b", "--gpus", "8", "--gpu", "H100"]


@pytest.mark.parametrize("question", [["--explain", "tp=2,sharding=zero1"], ["--search", "--sequence", "2048"]])
def test_a_layouts_sums_are_its_peak(question, tmp_path, capsys):
    file = tmp_path / "layout.pickle"
    assert main(["plan", *question, *JOB, "--json", "--snapshot", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)
    planned = said["best"][0] if "best" in said else said
    most, kinds = replayed(pickle.loads(file.read_bytes()))
    assert most == round(planned["peak_bytes"])
    assert kinds == {name: pytest.approx(nbytes, abs=3) for name, nbytes in planned["lines"].items() if nbytes}
    assert said["snapshot"] == str(file)


def test_a_plan_writes_the_recommended_row(tmp_path, capsys, monkeypatch):
    request = plan_table.Request(
        job(), Machine(gpu("A800-80GB"), 2), 8, 10, engines=("zero-1",),
        checkpointing=(True, False), host_states=("none",),
    )  # fmt: skip
    monkeypatch.setattr(answer, "request_of", lambda arguments: (request, None))
    file = tmp_path / "there" / "plan.pickle"
    assert main(["plan", "--json", "--snapshot", str(file)]) == 0
    said = json.loads(capsys.readouterr().out)
    row = said["dry_run"]
    most, kinds = replayed(pickle.loads(file.read_bytes()))
    assert most == row["peak_bytes"]
    assert {name: kinds.get(name, 0) for name in LINES} == {name: row["lines"].get(name, 0) for name in LINES}


def test_a_folder_is_refused_before_anything_is_planned(tmp_path, capsys):
    assert main(["plan", "--explain", "tp=2", *JOB, "--snapshot", str(tmp_path)]) == 2
    assert says(capsys.readouterr().err, "--snapshot", "plan.pickle")
