"""Traces of torch's profiler: read as bars, joined for Perfetto, and what is none."""

import gzip
import json

import pytest

from pardemo.meters import trace


def written(folder, name, events, base=0):
    path = folder / name
    text = json.dumps({"traceEvents": events, "baseTimeNanoseconds": base})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def bar(name, ts, dur, **more):
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "tid": 1, "cat": "cpu_op"} | more


EVENTS = [
    bar("aten::addmm", 20, 10),
    bar("forward", 10, 50, cat="user_annotation"),
    bar("gloo:all_reduce", 30, 100, tid=2, cat="user_annotation"),
    bar("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 40, 5, cat="kernel", tid=7, args={"stream": 7}),
    {"ph": "M", "name": "process_name", "args": {}},
    bar("PyTorch Profiler (0)", 0, 1000, cat="Trace"),
    {"ph": "s", "name": "fwdbwd", "ts": 21, "tid": 1, "id": 3},
]


@pytest.mark.parametrize("name", ["one.json", "one.json.gz"])
def test_bars_in_the_order_of_their_begin_on_their_lanes(tmp_path, name):
    bars = trace.read(written(tmp_path, name, EVENTS, base=2_000_000_000))
    assert [one.name.split("_")[0] for one in bars] == ["forward", "aten::addmm", "gloo:all", "ncclDevKernel"]
    assert [one.lane for one in bars] == ["thread 1", "thread 1", "thread 2", "stream 7"]
    assert [one.communicates for one in bars] == [False, False, True, True]
    assert bars[0].begin_s == pytest.approx(2.00001)
    assert bars[0].seconds == pytest.approx(50e-6)


def test_ranks_in_one_file_keep_their_clock_and_their_arrows(tmp_path):
    paths = {0: written(tmp_path, "0.json", EVENTS), 1: written(tmp_path, "1.json", EVENTS, base=5_000)}
    joined = json.loads(trace.join(paths, tmp_path / "both.json").read_text())["traceEvents"]
    begins = {event["pid"]: event["ts"] for event in joined if event["name"] == "forward"}
    assert begins == {0: 10, 1: 15}, "the second began 5 microseconds later"
    assert {event["id"] for event in joined if "id" in event} == {"0.3", "1.3"}
    named = {event["pid"]: event["args"]["name"] for event in joined if event["name"] == "process_name"}
    assert named == {0: "rank 0", 1: "rank 1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [{"ph"', "half.json is no whole trace"),
        ("[1, 2]", "half.json is no trace of torch's profiler; export_chrome_trace writes one"),
        ('{"traceEvents": 3}', "half.json is no trace of torch's profiler"),
        ('{"traceEvents": [3]}', "half.json has an event that torch's profiler does not write"),
        (
            '{"traceEvents": [{"ph": "X", "dur": 1}]}',
            "half.json has an event that torch's profiler does not write: 'ts'",
        ),
    ],
)
def test_what_is_no_trace_is_named(tmp_path, text, message):
    path = tmp_path / "half.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        trace.read(path)


def test_half_a_compressed_file_is_named(tmp_path):
    path = written(tmp_path, "whole.json.gz", EVENTS)
    cut = tmp_path / "cut.json.gz"
    cut.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut\.json\.gz"):
        trace.read(cut)
