"""``pardemo compare``: a job's own files beside a rehearsal, and files that are none of a job's."""

import csv
import gzip
import json
import os
import pickle
import re
import resource
import subprocess
import sys
import time

import pytest

from pardemo import cli
from pardemo.book.chapters.trace import measurements
from pardemo.meters.coverage import Coverage
from pardemo.meters.event_stream import EventStream
from pardemo.planner import profile
from pardemo.script.hangs.journal import COLUMNS
from pardemo.script.hangs.standstill import call_text
from pardemo.script.job_files.flight_recorder import record_of
from pardemo.script.job_files.reading import read_job
from pardemo.script.job_files.records import Device, JobRankRecord, Timing, ranks_of
from pardemo.script.real_job import machine_profile
from pardemo.script.real_job.comparison import compare_job
from pardemo.script.real_job.screen import comparison_screen

JOB = """
import os, torch, torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.profiler import profile
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)))
optimizer = torch.optim.AdamW(model.parameters())
out = os.environ.get("OUT")

def step(changed):
    loss = model(torch.randn(16, 256)).square().mean()
    loss.backward()
    figure = loss.detach().clone()
    dist.all_reduce(figure)
    if changed:
        dist.broadcast(figure, 0)  # nobody rehearsed it
    optimizer.step()
    optimizer.zero_grad()

def run(changed, name):
    with profile(with_stack=True, record_shapes=True) as profiler:
        for _ in range(3):
            step(changed)
            profiler.step()
    profiler.export_chrome_trace(f"{out}/{name}/trace_{dist.get_rank()}.json.gz")
    with open(f"{out}/{name}/nccl_trace_rank_{dist.get_rank()}", "wb") as file:
        file.write(c10d._dump_fr_trace())

for _ in range(6):
    step(False)
if out:
    run(False, "as_rehearsed")
    run(True, "changed")
"""
LINE = 1 + next(n for n, line in enumerate(JOB.splitlines()) if "nobody rehearsed it" in line)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A folder with a rehearsal, and what the same script writes on two ranks as it was, and with a call more."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(JOB)
    for name in ("as_rehearsed", "changed"):
        (folder / name).mkdir()
    writes = {"OUT": str(folder), "TORCH_FR_BUFFER_SIZE": "500"}
    started = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    for line, more in (
        (["pardemo", "measure", "--ranks", "2", "--out", "rehearsed", "--", "train.py"], {}),
        (["torch.distributed.run", "--nproc-per-node", "2", "train.py"], writes),
    ):
        subprocess.run([sys.executable, "-m", *line], cwd=folder, env=started | more, check=True, timeout=170,
                       capture_output=True)  # fmt: skip
    return folder


@pytest.mark.parametrize("sizes", [False, True])
def test_a_job_that_does_what_was_rehearsed_parts_nowhere(job, sizes):
    made = compare_job(job / "rehearsed", [str(job / "as_rehearsed")], sizes)
    assert made.job.refused == []
    assert {name: mismatches.first for name, mismatches in made.mismatches.items()} == {
        "flight recorder": {},
        "trace": {},
    }
    calls = {name: mismatches.calls for name, mismatches in made.mismatches.items()}
    assert calls["trace"] == 2 * 3 * 2, "on two ranks, in three steps: one bucket, and the loss"
    assert calls["flight recorder"] > 2 * 9 * 2
    assert not made.differs
    lines = {(call.kind, call.nbytes): call.line for call in made.job.traces[1].calls}
    assert set(lines.values()) == {f"train.py:{n + 1}" for n, text in enumerate(JOB.splitlines())
                                   if "loss.backward" in text or "dist.all_reduce" in text}  # fmt: skip


@pytest.mark.parametrize("sizes", [False, True])
def test_the_first_call_that_parts_is_named_with_its_rank_and_both_lines(job, sizes):
    made = compare_job(job / "rehearsed", [str(job / "changed")], sizes)
    of_recorder, of_trace = made.mismatches["flight recorder"], made.mismatches["trace"]
    for mismatches in (of_recorder, of_trace):
        assert {(each.rank, each.call.kind) for each in mismatches.differing} == {(0, "broadcast"), (1, "broadcast")}
        assert len(mismatches.differing) == 2
        assert {each.expected.line for each in mismatches.differing} == {
            f"train.py:{JOB[: JOB.index('loss.back')].count(chr(10)) + 1}"
        }
        (((kind, _, _), traffic),) = mismatches.more.items()
        assert (kind, traffic.calls, traffic.nbytes, traffic.ranks) == ("broadcast", 6, 24, {0, 1})
    assert {each.call.line for each in of_recorder.differing} == {f"train.py:{LINE}"}
    assert {each.number for each in of_trace.differing} == {2}, "the third call of the traced steps"
    assert f"broadcast, 4 bytes, at train.py:{LINE}".split(", ")[-1] in comparison_screen(made, "rehearsed")
    assert made.differs
    json.dumps(made.as_json())


def test_who_waits_and_what_is_exposed_are_in_the_traces(job):
    made = compare_job(job / "rehearsed", [str(job / "as_rehearsed")], True)
    waits = made.waits["trace"]
    assert waits.by_lengths
    assert waits.collectives == sum(waits.last.values()) == 6
    for record in made.job.traces.values():
        timing = record.timing
        assert 0 < timing.exposed <= timing.communicates <= timing.span
        assert timing.computes + timing.exposed <= timing.span + 1e-9
        assert timing.exposed <= sum(record.exposed_by().values()) + 1e-9, "kernels may overlap one another"
    assert not made.waits["flight recorder"].by_lengths


def test_the_command_says_it_and_its_status(job, capsys):
    rehearsed, same, changed = (str(job / name) for name in ("rehearsed", "as_rehearsed", "changed"))
    assert cli.main(["compare", rehearsed, same, "--same-size"]) == 0
    assert "FIRST DIFFERENCE  none: every rank calls what was rehearsed" in capsys.readouterr().out
    assert cli.main(["compare", rehearsed, changed, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["partings"]["trace"]["not_predicted"][0]["kind"] == "broadcast"
    (job / "notes.txt").write_text("step by step\n")
    assert cli.main(["compare", rehearsed, same, str(job / "notes.txt")]) == 2
    assert "pardemo compare: notes.txt: it is not a flight recorder dump, a trace" in capsys.readouterr().err
    assert cli.main(["compare", same, same]) == 2
    assert "is no rehearsal: it has no summary.json" in capsys.readouterr().err


# ---- of other sizes, and of GPUs: files in the form that torch writes ----


def rehearsal(folder, programs, groups, steps=2, memory=None, full_size=None):
    """A rehearsal of ranks with these programs: (kind, ranks, bytes, dtype, line) of each call of a step."""
    folder.mkdir()
    rows = [
        (rank, n, kind, "g", " ".join(map(str, ranks)), n, "", dtype, nbytes, line, "", "", 3 + step, n, n, "over")
        for rank, program in enumerate(programs)
        for step in range(steps)
        for n, (kind, ranks, nbytes, dtype, line) in enumerate(program)
    ]
    with (folder / "calls.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    of_groups = [{"kind": kind, "groups": of_kind} for kind, of_kind in groups.items()]
    summary = {"ranks": len(programs), "steps": steps, "groups": of_groups, "paced": None,
               "memory": {"kinds": memory or {}, "full_size": full_size}}  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def entry(number, kind, size, group="0", dtype="Float", state="completed", at_ns=10**18, frames=(), p2p=False, **more):
    """An entry of a flight recorder's dump, in its version 2.10."""
    return {
        "record_id": number, "pg_id": 0, "process_group": (group, "undefined"), "profiling_name": f"nccl:{kind}",
        "collective_seq_id": number, "p2p_seq_id": number * p2p, "input_sizes": [[size]], "output_sizes": [[size]],
        "input_dtypes": [dtype], "output_dtypes": [dtype], "state": state, "time_created_ns": at_ns + 1000 * number,
        "time_discovered_completed_ns": at_ns + 1000 * number + 500 if state == "completed" else None,
        "retired": state == "completed", "is_p2p": p2p, "frames": list(frames),
    } | more  # fmt: skip


def dump(path, entries, groups):
    config = {name: {"name": name, "desc": "", "ranks": str(list(ranks))} for name, ranks in groups.items()}
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}))


def sharded(layers, tp_group, dp_group, extra=()):
    """Kinds of a step of FSDP2 and tensor parallelism: by the group's name or ranks."""
    forward = [each for _ in range(layers) for each in (("all_gather", dp_group), ("all_reduce", tp_group))]
    backward = [each for _ in range(layers) for each in (
        ("all_gather", dp_group), ("all_reduce", tp_group), ("reduce_scatter", dp_group))]  # fmt: skip
    return [*forward, *backward, *extra]


def rehearsed_shards(folder):
    tp, dp = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    programs = [
        [
            (kind.replace("_", "-"), ranks, 64, "bfloat16", "model.py:7")
            for kind, ranks in sharded(2, tp[r // 2], dp[r % 2])
        ]
        for r in range(4)
    ]
    return rehearsal(folder, programs, {"TP": tp, "FSDP2": dp})


@pytest.mark.parametrize("changed", [False, True])
def test_a_job_of_more_ranks_and_layers_is_held_against_the_groups_of_the_same_role(tmp_path, changed):
    rehearsed = rehearsed_shards(tmp_path / "rehearsed")
    tp, dp = [tuple(range(4)), tuple(range(4, 8))], [(r, r + 4) for r in range(4)]
    for rank in range(8):
        names = {f"tp{rank // 4}": tp[rank // 4], f"dp{rank % 4}": dp[rank % 4]}
        extra = [("all_to_all", f"tp{rank // 4}")] if changed and rank == 5 else []
        step = sharded(5, *names, extra=extra)
        entries = [entry(40 + n, kind, 1024, group, "BFloat16") for n, (kind, group) in enumerate(3 * step)]
        dump(tmp_path / f"nccl_trace_rank_{rank}", entries, names)
    dumps = [str(tmp_path / f"nccl_trace_rank_{rank}") for rank in range(8)]
    made = compare_job(rehearsed, dumps, False).mismatches["flight recorder"]
    assert made.compared == ["FSDP2, groups of 2, every 4th rank", "TP, groups of 4"]
    if not changed:
        assert made.differing == []
        assert all(mismatch.repeats for mismatch in made.first.values()), "it has more layers"
        return
    (mismatch,) = made.differing
    assert (mismatch.rank, mismatch.role, mismatch.call.kind, mismatch.expected.kind) == (
        5, "TP, groups of 4", "all-to-all", "all-reduce"
    )  # fmt: skip
    assert {key[0]: traffic.calls for key, traffic in made.more.items()} == {"all-to-all": 3}


def test_messages_of_a_pipeline_are_one_role_with_the_ranks_of_both_ends(tmp_path):
    stage = [("send", (0, 1), 64, "float32", "train.py:5"), ("receive", (1, 0), 64, "float32", "train.py:6")]
    last = [("receive", (0, 1), 64, "float32", "train.py:5"), ("send", (1, 0), 64, "float32", "train.py:6")]
    rehearsed = rehearsal(tmp_path / "rehearsed", [stage, last], {"PP": [(0, 1)]})
    for rank, kinds in ((4, ("send 0->1", "recv 0<-1")), (6, ("recv 1<-0", "send 1->0"))):
        entries = [entry(n, kind, 16, "pp", p2p=True) for n, kind in enumerate(3 * kinds, 7)]
        entries.append(entry(20, "coalesced", 16, "pp"))  # a group of messages, which has entries of their own
        dump(tmp_path / f"rank_{rank}", entries, {"pp": (4, 6)})
    made = compare_job(rehearsed, [str(tmp_path / f"rank_{rank}") for rank in (4, 6)], False)
    mismatches = made.mismatches["flight recorder"]
    assert (mismatches.compared, mismatches.first, mismatches.calls) == (["messages"], {}, 12)
    assert [(call.kind, call.ranks, call.line) for call in made.job.recorders[6].calls[:2]] == [
        ("receive", (4, 6), "train.py:5"), ("send", (6, 4), "train.py:6")
    ]  # fmt: skip


def test_a_call_of_the_first_steps_is_new_in_a_trace_of_later_ones(tmp_path):
    rehearsed = rehearsal(
        tmp_path / "r", [[("all-reduce", (0, 1), 64, "float32", "train.py:5")]] * 2, {"DDP": [(0, 1)]}
    )
    with (rehearsed / "calls.csv").open("a", newline="") as file:  # of the first step, as DDP's of its buckets
        csv.writer(file).writerows(
            [rank, 99, "broadcast", "g", "0 1", 99, "", "float32", 8, "train.py:2", "", "", 0, 0, 0, "over"]
            for rank in (0, 1)
        )
    operators = [("record_param_comms", n, noted(n, "broadcast")) for n in range(5)]
    made = compare_job(rehearsed, [trace(tmp_path / "t0.gz", 0, [], operators)], False)
    assert [(each.number, each.call.kind) for each in made.mismatches["trace"].differing] == [(0, "broadcast")]


def test_a_job_that_stands_still_says_who_waits_for_whom(tmp_path):
    programs = [[("all-reduce", (0, 1, 2), 4096, "float32", "train.py:3")] * 2] * 3
    rehearsed = rehearsal(tmp_path / "rehearsed", programs, {"DDP": [(0, 1, 2)]})
    frames = [{"name": "all_reduce", "filename": "/x/site-packages/torch/c10d.py", "line": 9},
              {"name": "step", "filename": "/home/me/train.py", "line": 88}]  # fmt: skip
    for rank, last in enumerate((9, 9, 8)):  # rank 2 has not come to call 9; others begin the dump at other calls
        entries = [entry(n, "all_reduce", 1024, state="started" if n == 9 else "completed", frames=frames)
                   for n in range(3 + rank, last + 1)]  # fmt: skip
        dump(tmp_path / f"rank_{rank}", entries, {"0": (0, 1, 2)})
    made = compare_job(rehearsed, [str(tmp_path / f"rank_{rank}") for rank in range(3)], True)
    assert made.differs
    assert [(wait.rank, wait.waits_for) for wait in made.standstill.waits] == [(0, (2,)), (1, (2,))]
    assert "ranks 0, 1 have waited for rank 2" in comparison_screen(made, "r")
    assert made.standstill.waits[0].call.line == "train.py:88"


def trace(path, rank, kernels, operators=(), world=2, **fields):
    """A trace of a GPU: kernels are (name, begin, length, arguments), in microseconds."""
    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": begin, "dur": length,
         "args": {"stream": 7, "device": 0} | more} for name, begin, length, more in kernels
    ] + [
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": begin, "dur": 1, "args": more}
        for name, begin, more in operators
    ]  # fmt: skip
    made = fields | {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}, "traceEvents": events}
    path.write_bytes(gzip.compress(json.dumps(made).encode()))
    return str(path)


def noted(number, kind="allreduce", elements=1 << 24, ranks="[0, 1]", group="0"):
    return {"External id": number, "Collective name": kind, "In msg nelems": elements, "Out msg nelems": elements,
            "dtype": "Float", "Process Group Name": group, "Process Group Ranks": ranks, "Group size": 2}  # fmt: skip


def test_exposed_time_waits_and_rates_of_a_gpu_are_those_of_its_kernels(tmp_path, capsys):
    program = [
        ("all-reduce", (0, 1), 1 << 26, "float32", "train.py:9"),
        ("all-reduce", (0, 1), 1024, "float32", "train.py:12"),
    ]
    rehearsed = rehearsal(tmp_path / "rehearsed", [program, program], {"DDP": [(0, 1)]})
    nccl, gemm = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", "nvjet_tst_128x256"
    paths = []
    for rank, late in ((0, 0.0), (1, 300.0)):
        kernels = [
            (gemm, 0, 1000 + late, {"External id": 5}),
            (nccl, 900 + late, 600 - late, noted(6)), (nccl, 1600, 10 + rank, noted(7, elements=256)),
            ("void copy_kernel()", 1400, 50, {}), ("void copy_kernel()", 1420, 10, {}),
        ]  # fmt: skip
        operators = [("record_param_comms", 800, noted(6)), ("record_param_comms", 1550, noted(7, elements=256)),
                     ("aten::mm", 700, {"External id": 5, "Input Dims": [[4096, 4096], [4096, 4096]]})]  # fmt: skip
        device = {"name": "NVIDIA H100", "totalGlobalMem": 85 * 10**9}
        paths.append(trace(tmp_path / f"t{rank}.gz", rank, kernels, operators, deviceProperties=[device, device]))
    made = compare_job(rehearsed, paths, True)
    assert not made.differs
    timing = made.job.traces[0].timing
    assert 1e6 * timing.computes == pytest.approx(1000 + 50)
    assert 1e6 * timing.communicates == pytest.approx(610)
    assert 1e6 * timing.exposed == pytest.approx(610 - 100 - 50)
    assert made.job.traces[0].exposed_by()["all-reduce", "train.py:9"] == pytest.approx(450e-6)
    waits = made.waits["trace"]
    assert waits.last == {0: 1, 1: 1}
    assert waits.waited_s[0][1] == pytest.approx(300e-6)
    assert (waits.longest.rank, waits.longest.last, waits.longest.line) == (0, 1, "train.py:9")
    (rate,) = made.rates
    assert rate.bytes_per_s == pytest.approx((1 << 26) / 300e-6), (
        "2 (N − 1) / N of the bytes, in the shorter kernel's time"
    )
    assert made.product_flops == pytest.approx(2 * 2 * 4096**3 / 2300e-6)

    file = tmp_path / "machine.json"
    assert cli.main(["compare", str(rehearsed), *paths, "--profile", str(file)]) == 0
    assert "large matrix multiplications reach 119.5 TFLOP/s" in capsys.readouterr().out
    assert profile.load_profile(file).gpu.reachable == pytest.approx(119.5e12)
    assert json.loads(file.read_text())["inside"] == {"gb_per_s": 223.7, "latency_us": 10.0}
    assert cli.main(["compare", str(rehearsed), str(tmp_path / "t0.gz"), "--profile", str(file)]) == 0
    capsys.readouterr()

    plan = ["plan", "--search", "--model", "qwen2.5-0.5b", "--gpus", "2", "--measured", *paths]
    assert cli.main(plan) == 0
    planned = capsys.readouterr().out
    assert "NVIDIA H100" in planned
    assert "rates of the machine: traces of 2 ranks" in planned
    assert cli.main([*plan, "--gpu", "H100"]) == 2
    assert "--measured's traces say the GPU and its rates; leave out --gpu" in capsys.readouterr().err
    (tmp_path / "t2.gz").write_bytes(gzip.compress(b"{}"))
    assert cli.main([*plan, str(tmp_path / "t2.gz")]) == 2
    assert "t2.gz: it is JSON, and not a flight recorder dump" in capsys.readouterr().err


def test_a_public_trace_is_read_as_holistic_trace_analysis_reads_it():
    (record,) = read_job([str(measurements.PUBLIC_TRACE)]).traces.values()
    assert record.timing.overlap == pytest.approx(0.1561, abs=5e-5)
    sums = [call for call in record.calls if call.kind == "all-reduce"]
    assert sum(call.nbytes for call in sums) == 3 * 4 * 25_557_032, "ResNet-50's gradients in three steps"
    rows = measurements.bucket_rows(sums)
    assert [row["bucket"] for row in rows] == ["8.2 MB", "31.5 MB", "26.3 MB", "26.6 MB", "9.7 MB"]
    assert rows[1] == {"bucket": "31.5 MB", "ms, step by step": "2.4, 2.7, 6.0", "exposed": "80 %",
                       "fastest": "13.0 GB/s"}  # fmt: skip


def test_a_copy_that_no_trace_has_is_as_quick_as_that_of_the_gpu_of_this_memory():
    timing = Timing(1.0, 0.0, 0.0, 1.0, {}, 1, [(1e12, 0.01)], [], True)
    record = JobRankRecord(0, [], 1, timing, Device("NVIDIA A100-SXM4-40GB", 42_297_524_224, 8))
    assert machine_profile.profile_fields({0: record})["memory_gb_per_s"] == 1555


def test_what_a_file_does_not_say_is_left_out():
    assert [ranks_of(text) for text in ("[0, 1]", "[0,,01]", "[0, 1, ...]", None)] == [(0, 1), (0, 1), (), ()]
    call = record_of(0, [entry(1, "all_reduce", 4, dtype="Strange")], {"0": {"ranks": "[0, 1]"}}).calls[0]
    assert call.nbytes == -1
    assert call_text(call) == "all-reduce 1 of ranks 0, 1, at no line"


def test_memory_beyond_the_plan_is_told_by_kind(tmp_path, capsys):
    planned = {"model": "m", "kinds": {"parameters": 900, "gathered parameters": 100}}
    rehearsed = rehearsal(tmp_path / "r", [[], []], {}, memory={"parameters": 400, "logits": 50},
                          full_size=planned)  # fmt: skip
    blocks = [{"action": "alloc", "addr": 8, "size": 400, "category": "parameters", "frames": [
        {"filename": "model.py", "line": 7, "name": "-"}]}]  # fmt: skip
    (rehearsed / "memory_rank0.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": [blocks]}))

    def frames(file, line):
        inner = {"filename": "/x/torch/nn/modules/linear.py", "line": 100, "name": "__init__"}
        return [inner, {"filename": f"/home/me/{file}", "line": line, "name": "f"}]

    events = [
        {"action": "alloc", "addr": 100, "size": 300, "frames": frames("adamw.py", 3)},
        {"action": "alloc", "addr": 200, "size": 70, "frames": frames("new.py", 3)},
        {"action": "free_requested", "addr": 100, "size": 300}, {"action": "free_completed", "addr": 100, "size": 300},
        {"action": "alloc", "addr": 300, "size": 200, "frames": []},
        {"action": "free_completed", "addr": 2, "size": 30},
    ]  # fmt: skip
    held = [{"address": 1, "size": 1000, "state": "active_allocated", "frames": frames("model.py", 7)},
            {"address": 200, "size": 70, "state": "active_allocated"},
            {"address": 9, "size": 5, "state": "inactive"}]  # fmt: skip
    snapshot = {"segments": [{"blocks": held}], "device_traces": [events, []], "allocator_settings": {}}
    path = tmp_path / "snapshot_rank3.pickle"
    path.write_bytes(pickle.dumps(snapshot))
    made = compare_job(rehearsed, [str(path)], True).memory
    assert (made.rank, made.peak_bytes) == (3, 1000 + 30 + 300 + 70)
    assert made.kinds == [("parameters", 400, 1000), ("optimizer states", 0, 300), ("other", 0, 100), ("logits", 50, 0)]
    assert cli.main(["compare", str(rehearsed), str(path)]) == 0
    shown = capsys.readouterr().out
    assert "beside the plan of m" in shown
    assert "−100 B" in shown


LOGS = {
    "titan": "[titan] 2026-09-01 10:00:0{s},000 - root - INFO - \x1b[31mstep: {n:2}  \x1b[32mloss: {loss:7.4f}  "
    "grad_norm: 1.2  \x1b[33mmemory: 48.87GiB(51.44%)  \x1b[34mtps: 4,376  \x1b[36mtflops: 253.41  \x1b[35mmfu: 25.62%",
    "megatron": " [2026-09-01 10:00:0{s}.000000] iteration        {n}/     500 | consumed samples:        64 | elapsed "
    "time per iteration (ms): 2000.0 | throughput per GPU (TFLOP/s/GPU): 253.4 | learning rate: 1.0E-04 | "
    "lm loss: {loss:.6E} |",
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGS)
def test_logs_say_seconds_memory_and_loss_of_the_steps(tmp_path, kind):
    path = tmp_path / "job.log"
    lines = [LOGS[kind].format(s=2 * n, n=n, loss=9.0 - n) for n in range(1, 5)]
    if kind == "megatron":
        lines.append("[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 9")
    path.write_text("\n".join(["torch says hello", *lines]))
    made = compare_job(rehearsal(tmp_path / "r", [[], []], {}), [str(path)], False).logged
    assert (made["steps"], made["step_s"], made["first_loss"], made["last_loss"]) == (4, 2.0, 8.0, 5.0)
    assert made["tflops"] == pytest.approx(253.4, abs=0.1)
    assert made["memory_bytes"] == (48.87 if kind == "titan" else 2.0) * 2**30


class Evil:
    def __reduce__(self):
        return os.system, ("touch EXECUTED",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"version": "2.10", "entries": [Evil()]}), r"it names (posix|nt)\.system, which could run code"),
        (
            pickle.dumps({"version": "2.10", "entries": [{"profiling_name": Evil}]}),
            r"it names .*Evil, which could run code",
        ),
        (pickle.dumps({"version": "2.10", "entries": [entry(1, "all_reduce", 4)]})[:-30], "is no whole pickle"),
        (
            pickle.dumps({"version": "2.10", "entries": [{"profiling_name": "nccl:all_reduce"}]}),
            "an entry that the flight",
        ),
        (pickle.dumps([1, 2]), "it is a pickle, and not a flight recorder dump"),
        (pickle.dumps({"segments": 3, "device_traces": [[{}]]}), "an entry that torch's memory snapshot does not have"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1, "dur": 1}]}', "an event that torch's profiler does not write"),
        (b'{"traceEvents": [{"ph": "X", "ts": 1,', "is no whole trace"),
        (b'{"traceEvents": [' + b'{"a":' * 100_000, "is no whole trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0)[:-6], "is no whole trace"),
        (gzip.compress(b"step by step", mtime=0), "is no whole trace"),
        (b'{"traceEvents": []}', "a trace without an event"),
        (b'{"rows": []}', "it is JSON, and not a flight recorder dump"),
        (b"\x00\x01\x02", "it is not a flight recorder dump"),
        (b"", "it is not a flight recorder dump"),
    ],
    ids=range(15),
)
def test_a_file_that_is_broken_or_none_of_a_jobs_is_refused_in_one_line(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "dump_0"
    path.write_bytes(content)
    (line,) = read_job([str(path)]).refused
    assert line.count("dump_0") == 1
    assert "\n" not in line
    assert re.search(message, line)
    assert not (tmp_path / "EXECUTED").exists()


def test_two_files_of_one_rank_and_a_file_without_a_rank_are_named(tmp_path):
    for name in ("a_0", "b_0", "dump"):
        dump(tmp_path / name, [entry(1, "all_reduce", 4)], {"0": (0, 1)})
    job = read_job([str(tmp_path)])
    assert job.refused == [
        "b_0: a file of this kind of rank 0 was read before it",
        "dump does not say its rank, and its name does not end in its number, as in dump_3",
    ]


def test_what_a_union_of_spans_covers():
    union = Coverage([5, 0, 8, 1], [6, 2, 9, 4])
    assert (union.total, union.begin, union.end) == (4 + 1 + 1, 0, 9)
    assert union.within([3, 0, 6.5], [5.5, 10, 7]).tolist() == [1.5, 6, 0]
    assert union.overlap(Coverage([], [])) == Coverage([], []).overlap(union) == 0


@pytest.mark.nightly
def test_a_trace_of_50_mb_is_read_in_a_few_mb(tmp_path):
    """The rate is printed, and not judged: json.load has about the same, and takes four times the file."""
    path = tmp_path / "large.json"
    event = {"ph": "X", "cat": "kernel", "name": "void cutlass::Kernel", "pid": 0, "tid": 7, "dur": 8.9,
             "args": {"External id": 1, "device": 0, "context": 1, "stream": 7, "grid": [16, 1, 32]}}  # fmt: skip
    with path.open("w") as file:
        file.write('{"schemaVersion": 1, "traceEvents": [\n')
        for number in range(270_000):
            file.write(json.dumps(event | {"ts": 1e9 + 10 * number}) + ",\n")
        file.write('{"ph": "M"}], "traceName": "large"}')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, stream = time.perf_counter(), EventStream(path)
    assert sum(1 for _ in stream) == 270_001
    assert stream.fields == {"schemaVersion": 1, "traceName": "large"}
    megabytes = path.stat().st_size / 1e6
    print(f"{megabytes:.0f} MB, {megabytes / (time.perf_counter() - begin):.0f} MB/s")
    assert megabytes > 50
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 20
