"""``pardemo measure``: scripts that are nobody's in particular, unchanged, on real ranks."""

import csv
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from functools import partial

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch.cuda import _memory_viz
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pardemo import WireMeter, World, cli, formulas, measure, project
from pardemo.formulas import communication
from pardemo.script.report import sections
from pardemo.script.runtime import without_gpu
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.without_gpu import teach_dtensor
from pardemo.script.step.script_memory import ScriptMemoryMeter

CHUNKED = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(256), torch.nn.Linear(256, 2000)
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
            return self.norm(x).float()
model = Model().cuda()
for unit in (*model.layers, [model.norm, model.head], model):
    fully_shard(unit)
for module in model.modules():
    if hasattr(module, "set_gradient_divide_factor"):
        module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    hidden = model(torch.randn(2, 8, 256, device="cuda"))
    pieces = [piece.detach().requires_grad_() for piece in hidden.chunk(4, dim=1)]
    for piece in pieces:
        model.head(piece).square().mean().backward()
    hidden.backward(torch.cat([piece.grad for piece in pieces], dim=1))
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
import argparse, sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
parser = argparse.ArgumentParser()
parser.add_argument("--no-sync", action="store_true")
parser.add_argument("--micro", type=int, default=1)
parser.add_argument("--steps", type=int, default=20)
options = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Embedding(2000, 64), torch.nn.Linear(64, 512), torch.nn.GELU(), torch.nn.Linear(512, 2000)
)
model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(options.steps):
    for micro in range(options.micro):
        x = torch.randint(0, 2000, (4, 32))
        model.require_backward_grad_sync = not options.no_sync or micro == options.micro - 1
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()) / options.micro
        loss.backward()  # here gradients are summed
    optimizer.step()
    optimizer.zero_grad()
    if step % 2 == 1:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
print("the script came to its end")
"""
FSDP2 = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(128, 512), torch.nn.Linear(512, 128)
    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(2000, 128)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.head = torch.nn.Linear(128, 2000)
    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = Model()
for layer in model.layers:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    x = torch.randint(0, 2000, (2, 32))
    torch.nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
PARAMETERS = 2000 * 64 + 64 * 512 + 512 + 512 * 2000 + 2000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The scripts' folder; they run in it."""
    made = tmp_path_factory.mktemp("scripts")
    for name, source in (("ddp.py", DDP), ("fsdp2.py", FSDP2)):
        (made / name).write_text(source)
    return made


def write(folder, name, source):
    (folder / name).write_text(textwrap.dedent(source))
    return name


def rows_of(measured, kind):
    return [row for row in measured.collectives if row.kind == kind]


@pytest.fixture(scope="module")
def accumulated(folder):
    return measure.script("ddp.py", ["--micro", "3"], ranks=2, folder=folder)


def test_gradients_that_are_summed_too_often(accumulated):
    once = communication.ring_all_reduce(4 * PARAMETERS, 2).sent
    (row,) = rows_of(accumulated, "all-reduce")
    line = 1 + next(n for n, text_ in enumerate(DDP.splitlines()) if "here gradients" in text_)
    assert (row.line, row.site.phase, row.bytes, row.expected_bytes) == (f"ddp.py:{line}", "backward", 3 * once, once)
    (kind,) = accumulated.parallelism
    assert (kind.kind, kind.ranks, kind.wraps) == ("DDP", (0, 1), ("Sequential",))
    assert accumulated.micro_batches == 3
    found = next(one for one in accumulated.findings if "no_sync" in one.what)
    assert found.line == row.line
    assert found.bytes == pytest.approx(2 * once)
    whole = next(one for one in accumulated.findings if "summed whole" in one.what)
    assert "0.weight" in whole.what
    assert whole.bytes == communication.ring_all_reduce(2000 * 64 * 4, 2).sent


def test_gradients_that_are_summed_once(folder):
    measured = measure.script("ddp.py", ["--micro", "3", "--no-sync"], ranks=2, folder=folder)
    (row,) = rows_of(measured, "all-reduce")
    assert row.bytes == row.expected_bytes == communication.ring_all_reduce(4 * PARAMETERS, 2).sent
    assert not any("no_sync" in one.what for one in measured.findings)
    for counted, of_gloo in zip(measured.wire_bytes, measured.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_gloo, rel=0.01), "the kernel's count is the calls'"


def test_a_step_of_ddp_on_the_wire_and_in_memory(accumulated):
    for counted, of_gloo in zip(accumulated.wire_bytes, accumulated.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_gloo, rel=0.01)
    memory = accumulated.memory
    assert sum(memory["kinds"].values()) == memory["peak_bytes"]
    assert memory["kinds"]["parameters"] == memory["kinds"]["gradients"] == 4 * PARAMETERS
    assert memory["kinds"]["optimizer states"] == pytest.approx(8 * PARAMETERS, abs=64), "two moments, and steps"
    assert memory["kinds"]["communication buffers"] == pytest.approx(4 * PARAMETERS, abs=64), "DDP's buckets"
    assert memory["line"].startswith("ddp.py:")
    assert memory["largest"][0]["bytes"] >= memory["largest"][-1]["bytes"] > 0


def test_times_add_up(accumulated):
    for one in accumulated.time:
        assert one.step_s > 0
        assert min(one.compute_s, one.exposed_s, one.hidden_s, one.idle_s, one.other_s) >= 0
        assert one.compute_s <= one.step_s


def test_fsdp2_by_its_formula(folder):
    measured = measure.script("fsdp2.py", ranks=3, folder=folder)
    gathers, scatters = rows_of(measured, "all-gather"), rows_of(measured, "reduce-scatter")
    assert [row.bytes for row in gathers] == [row.expected_bytes for row in gathers]
    assert [row.bytes for row in scatters] == [row.expected_bytes for row in scatters]
    assert sum(row.calls for row in gathers) == 7, "three layers twice; the root stays gathered"
    assert {row.module for row in scatters} == {"layers.0", "layers.1", "layers.2", "(root)"}
    assert measured.findings == []
    kinds = measured.memory["kinds"]
    whole = 4 * sum((2000 * 128 * 2 + 2000, 3 * (128 * 512 * 2 + 640)))
    assert kinds["parameters"] == pytest.approx(whole / 3, rel=0.01), "its shard, whatever is gathered"
    for counted, of_gloo in zip(measured.wire_bytes, measured.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_gloo, rel=0.01)
    shown = sections.summary_screen(measured, "fsdp2.py")
    headings = re.findall(r"^([A-Z ]{4,}?)(?:  |$)", shown, re.M)
    assert headings == ["WHAT IS RUNNING", "BYTES A STEP", "MEMORY", "TIME", "FINDINGS"]
    assert says(shown, "gathered", "forward")
    assert shown.count("layers.0 ") == 0, "layers are one row"


def test_a_loss_that_goes_backward_piece_by_piece_is_one_micro_batch(tmp_path):
    """As torchtitan's: a unit of two modules, a factor of its own for gradients, and autocast that a model begins."""
    (tmp_path / "train.py").write_text(CHUNKED)
    measured = measure.script("train.py", ranks=2, folder=tmp_path)
    assert measured.micro_batches == 1
    assert measured.model["computed_in"] == ["bfloat16"]
    assert any("divided after they are summed" in note for note in measured.notes)
    layers = [row for row in measured.collectives if row.module.startswith("layers.")]
    assert [row.bytes for row in layers] == [row.expected_bytes for row in layers]
    tail = [row for row in rows_of(measured, "reduce-scatter") if row.module == "norm, head"]
    once = communication.ring_half(4 * (2 * 256 + 256 * 2000 + 2000), 2).sent
    assert sum(row.expected_bytes for row in tail) == pytest.approx(once), "whatever its parts, and how often they go"


def _sent(collective):
    tensor = torch.ones(3 * 2**16)
    parts = [torch.ones(2**16) for _ in range(dist.get_world_size())]
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(size * 2**16)
    act = {
        "all_reduce": partial(dist.all_reduce, tensor),
        "broadcast": partial(dist.broadcast, tensor, 0),
        "reduce": partial(dist.reduce, tensor, 0),
        "all_gather": partial(dist.all_gather, parts, parts[0].clone()),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, parts[0], whole),
        "all_to_all": partial(dist.all_to_all_single, torch.empty_like(whole), whole),
        "gather": partial(dist.gather, parts[1].clone(), parts if rank == 0 else None, 0),
        "scatter": partial(dist.scatter, parts[0].clone(), parts if rank == 0 else None, 0),
    }[collective]
    act()  # connections of a group's first call
    with WireMeter() as wire:
        act()
    nbytes = tensor.nbytes if collective in ("all_reduce", "broadcast", "reduce") else whole.nbytes
    if collective == "gather" and rank:
        nbytes = parts[0].nbytes
    return wire.sent_bytes, formulas.communication.gloo_sent(collective, nbytes, size, rank)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "collective",
    ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"],
)
def test_what_gloo_sends(world_of, collective, size):
    for counted, said in world_of(size).run(_sent, collective):
        assert counted == pytest.approx(said, rel=0.01, abs=2000)


def test_a_rank_that_is_stopped_by_a_signal_is_told_so(tmp_path):
    source = """
    import os, signal, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(10))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(torch.ones(10))
    """
    write(tmp_path, "stops.py", source)
    told = r"not over after 4 s: .*; rank 1 is stopped by a signal, after"
    with pytest.raises(measure.ScriptError, match=told) as caught:
        measure.script("stops.py", ranks=2, folder=tmp_path, timeout_s=4)
    does = caught.value.standstill.does
    assert does[1] == "it is stopped by a signal, after all-reduce 1 of ranks 0, 1, 40 bytes, at stops.py:4"
    assert does[0] == "it is in all-reduce 2 of ranks 0, 1, 40 bytes, at stops.py:7"


def test_torchruns_environment_and_a_module(tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID"]
    source = f"""
    import os, sys, torch
    assert __name__ == "__main__" and sys.argv[1:] == ["--x", "1"]
    assert all(os.environ[name] for name in {names})
    from package.model import model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        for _ in range(10):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
    """
    (tmp_path / "package").mkdir()
    write(tmp_path / "package", "train.py", source)
    write(tmp_path / "package", "model.py", "import torch\nmodel = torch.nn.Linear(64, 64)\n")
    measured = measure.script("package.train", ["--x", "1"], ranks=2, module=True, folder=tmp_path)
    assert says(measured.findings[0].what, "nothing is summed: each of the 2 ranks trains a model of its own")
    assert measured.parallelism == []


def test_two_optimizers_are_one_step(tmp_path):
    source = """
    import torch
    one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    for _ in range(20):
        for _ in range(2):
            two(one(torch.ones(2, 4))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    """
    write(tmp_path, "two.py", source)
    measured = measure.script("two.py", ranks=1, folder=tmp_path, steps=4)
    assert (measured.steps, measured.micro_batches, measured.ended) == (4, 2, "enough")


def test_objects_barriers_metrics(tmp_path):
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        loss = model(torch.ones(2, 8)).sum()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        dist.barrier()
        dist.all_gather_object([None] * 2, {"loss": 1.0})
    """
    write(tmp_path, "chatty.py", source)
    measured = measure.script("chatty.py", ranks=2, folder=tmp_path)
    told = {finding.line: finding.what for finding in measured.findings}
    assert "a small all-reduce outside of forward and backward" in told["chatty.py:10"]
    assert "all ranks wait for one another at a barrier, once a step" in told["chatty.py:11"]
    assert "Python objects travel" in told["chatty.py:12"]


def test_the_command_line(folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(folder)
    asked = ["measure", "--ranks", "2", "--steps", "2", "--json", "--out", str(tmp_path)]
    assert cli.main([*asked, "--", "ddp.py", "--micro", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    names = {"ranks", "steps", "parallelism", "collectives", "wire_bytes", "memory", "time", "findings"}
    assert names <= set(printed)
    assert {"kind", "ranks", "wraps"} <= set(printed["parallelism"][0])
    columns = {"kind", "ranks", "calls", "bytes", "line", "module", "expected_bytes", "why"}
    assert columns <= set(printed["collectives"][0])
    assert {"peak_bytes", "kinds", "line"} <= set(printed["memory"])
    assert {"compute_s", "exposed_s", "hidden_s", "idle_s"} <= set(printed["time"][0])
    assert json.loads((tmp_path / "summary.json").read_text()) == printed
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["ph"] == "X" and event["tid"] == 0 for event in events) == 4, "two steps of two ranks"
    for rank in range(2):
        held = pickle.loads((tmp_path / f"memory_rank{rank}.pickle").read_bytes())
        assert _memory_viz.trace(held).count("MEM[") > 20, "torch's own reader takes it"
        alive = peak = 0
        for event in held["device_traces"][0]:
            alive += event["size"] * (1 if event["action"] == "alloc" else -1)
            peak = max(peak, alive)
        assert rank != printed["memory"]["rank"] or peak == printed["memory"]["peak_bytes"]
    with (tmp_path / "collectives.csv").open() as stream:
        assert [row["kind"] for row in csv.DictReader(stream)] == [row["kind"] for row in printed["collectives"]]


def test_a_script_has_its_own_versions_of_libraries(folder, tmp_path):
    """What is first on the path may be older than what the planner needs, which nobody asks here."""
    (tmp_path / "transformers.py").write_text("raise ImportError('too old for the planner')")
    paths = os.pathsep.join((str(tmp_path), str(project.root())))
    command = [sys.executable, "-m", "pardemo", "measure", "--ranks", "2", "--out", str(tmp_path / "out"), "ddp.py"]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a script: pardemo measure -- train.py ARGS"),
        (["--", "none.py"], "there is no script none.py"),
        (["--cluster", "2", "--", "ddp.py"], "--cluster is nodes × ranks on each, as 2x2, not '2'"),
        (["--between", "1Gbit/s", "--", "ddp.py"], "--between limits the links of a cluster"),
        (["--cluster", "2x2", "--ranks", "3", "--", "ddp.py"], "--ranks 3 is not the 4 of --cluster 2x2"),
        (["--ranks", "65", "--", "ddp.py"], "World size must be a whole number from 1 to 64, not 65"),
        (["--ranks", "0", "--", "ddp.py"], "--ranks must be at least 1, not 0"),
    ],
)
def test_bad_input_is_told_in_one_line(folder, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(folder)
    assert cli.main(["measure", *arguments]) == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "\n" not in told


def test_a_cluster_of_limited_links(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    once = communication.ring_all_reduce(4 * PARAMETERS, 2).sent
    asked = ["measure", "--cluster", "2x1", "--between", "200Mbit/s", "--steps", "1", "--json", "--", "ddp.py"]
    assert cli.main(asked) == 0
    for one in json.loads(capsys.readouterr().out)["time"]:
        assert one["exposed_s"] + one["hidden_s"] > 0.7 * once / 25e6, "what the link takes for it"


def test_where_tensors_of_the_peak_come_from():
    model = torch.nn.Sequential(torch.nn.Embedding(3000, 16), torch.nn.Linear(16, 3000))
    with CallSites() as places, ScriptMemoryMeter(places) as held:
        held.begin()
        torch.nn.functional.cross_entropy(model(torch.zeros(64, dtype=torch.long)), torch.zeros(64).long()).backward()
    kinds, alive = held.at_peak()
    assert sum(kinds.values()) == held.peak_bytes
    assert kinds["parameters"] == 4 * (3000 * 16 * 2 + 3000)
    assert kinds["logits"] >= 2 * 64 * 3000 * 4, "they, and the logarithms of their softmax"
    kind, largest = alive[0]
    assert (kind, largest.shape, largest.dtype) == ("logits", (64, 3000), "float32")
    assert largest.site.line.startswith("test_measure.py:")


def test_memory_that_was_given_back_and_taken_again_was_there_each_time():
    """As FSDP's whole parameters: one storage, that shrinks to nothing after a module and grows before the next."""
    with CallSites() as places, ScriptMemoryMeter(places) as held:
        held.begin()
        whole, beside = torch.zeros(1000), torch.zeros(500)
        whole.untyped_storage().resize_(0)
        del beside
        whole.untyped_storage().resize_(4000)
    kinds, alive = held.at_peak()
    assert sum(kinds.values()) == held.peak_bytes == 6000
    assert [one.nbytes for _, one in alive] == [4000, 2000]
    assert [one.nbytes for _, one in held.all()] == [4000, 2000, 4000]


def test_a_gradient_that_no_hook_saw_is_one_as_soon_as_the_optimizer_takes_it():
    """FSDP sets it; the step may end the measurement before the meter looks at what was updated."""
    seen = []
    with CallSites() as places, ScriptMemoryMeter(places) as held:
        parameter = torch.nn.Parameter(torch.zeros(1000))
        optimizer = torch.optim.SGD([parameter])
        optimizer.register_step_post_hook(lambda *_: seen.append(held.at_peak()[0]["gradients"]))
        parameter.grad = torch.ones(1000)
        optimizer.step()
    assert seen == [4000]


def test_parameters_that_stay_whole_are_no_gathered_ones():
    """As a distributed optimizer's, which gathers what it updated into them."""
    with CallSites() as places, ScriptMemoryMeter(places) as held:
        model = torch.nn.Linear(100, 100, bias=False)
        model(torch.zeros(1, 100))
        held.begin()
        held.used("all-gather", [], [model.weight.detach()])
        kinds, _ = held.at_peak()
    assert (kinds["parameters"], kinds["gathered"]) == (40_000, 0)


def _attention_by_heads():
    teach_dtensor()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.randn(2, 4, 8, 16, requires_grad=True) for _ in range(3)]
    cut = [distribute_tensor(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in whole]
    outputs = [torch.nn.functional.scaled_dot_product_attention(*some, is_causal=True) for some in (whole, cut)]
    assert outputs[1].placements == (Shard(1),)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(outputs[1].full_tensor(), outputs[0])
    for plain, part in zip(whole, cut, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), plain.grad)


def test_attention_of_dtensors_is_the_plain_one():
    with World(2) as world:  # what DTensor has been taught stays with the ranks
        world.run(_attention_by_heads)


def test_what_stands_for_a_gpu_is_on_the_page():
    page = (project.root() / "docs" / "measure.md").read_text(encoding="utf-8")
    rows = [f"| {row.written} | {row.here} |" for row in without_gpu.TABLE.values()]
    told = page[page.index("<!-- table:") : page.index("<!-- end of table")]
    assert [line for line in told.splitlines() if line.startswith("| ")][1:] == rows
