"""Steps unlike the usual one: traffic to one rank, averages now and then, evaluations, sequence parallelism."""

import sys
from pathlib import Path

import pytest
import torch
from conftest import few, says

from pardemo import measure, project
from pardemo.script.report import sections
from pardemo.script.runtime import libraries

HEAD = """
import time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
def train(loss, optimizer, steps=10):
    for step in range(steps):
        loss().backward(); optimizer.step(); optimizer.zero_grad()
"""

TO_ONE = """
model = DDP(nn.Linear(64, 64)); optimizer = torch.optim.SGD(model.parameters(), 0.1)
large = torch.ones(250_000)  # 1 MB
for step in range(10):
    model(torch.randn(4, 64)).sum().backward()
    dist.gather(large, [torch.empty_like(large) for _ in range(ranks)] if rank == 0 else None, dst=0)
    dist.reduce(large.clone(), dst=0)
    dist.broadcast(large.clone(), src=ranks - 1)
    sent = [len(large) * (rank == 2 and to == 0) for to in range(ranks)]  # rank 2 alone, to rank 0
    received = [len(large) * (rank == 0 and of == 2) for of in range(ranks)]
    dist.all_to_all_single(torch.empty(sum(received)), large[:sum(sent)], received, sent)
    optimizer.step(); optimizer.zero_grad()
"""

NOW_AND_THEN = """
model = nn.Linear(256, 256); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 20):
    model(torch.randn(8, 256)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    if step % 2 == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data); parameter.data /= ranks
"""

EVALUATED = """
model = DDP(nn.Linear(64, 64)); optimizer = torch.optim.SGD(model.parameters(), 0.1)
held = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).eval().requires_grad_(False)
for layer in held:
    fully_shard(layer)
fully_shard(held)
for step in range(10):
    time.sleep(0.1)
    model(torch.randn(64, 64)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(5):
            held(torch.randn(8, 512))
"""

SEQUENCES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())
model = nn.Sequential(Block(), Block())
for block in model:
    parallelize_module(block, init_device_mesh("cpu", (ranks,)), {
        "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    })
def loss():
    y = model(torch.randn(4, 64 // ranks, 64))
    return (y.to_local() if hasattr(y, "to_local") else y).square().mean()
train(loss, torch.optim.SGD(model.parameters(), 0.1))
"""


@pytest.fixture
def measured(tmp_path):
    def run(text, ranks=2):
        script = tmp_path / "train.py"
        script.write_text(HEAD + text)
        return measure.script("train.py", ranks=ranks, folder=tmp_path)

    return run


def test_the_rank_that_sends_most_is_shown(measured):
    found = measured(TO_ONE, 4)
    rows = {row.kind: row for row in found.collectives}
    assert {kind: (rows[kind].bytes, rows[kind].rank) for kind in ("gather", "reduce", "broadcast", "all-to-all")} == {
        "gather": (1e6, 1), "reduce": (1e6, 1), "broadcast": (1e6, 3), "all-to-all": (1e6, 2),
    }  # fmt: skip
    assert rows["all-reduce"].rank is None, "all send as much"


def test_what_every_second_step_sends_is_its_mean(measured):
    (row,) = measured(NOW_AND_THEN).collectives
    whole = 4 * (256 * 256 + 256)  # two ranks' ring sends the array once
    assert row.bytes in (pytest.approx(whole / 3, rel=0.02), pytest.approx(2 * whole / 3, rel=0.02))
    assert "local SGD" in row.why


def test_an_evaluations_waits_are_no_steps(measured):
    for of in measured(EVALUATED).time:
        assert of.other_s >= 0.09, "it sleeps for 100 ms"
        assert of.exposed_s + of.idle_s + of.hidden_s < 0.05


def test_collectives_that_dtensor_waits_for_are_over(measured):
    found = measured(SEQUENCES)
    kinds = {row.kind for row in found.collectives}
    assert {"all-gather", "reduce-scatter"} <= kinds
    for of in found.time:
        assert of.exposed_s + of.idle_s < of.step_s
    assert found.memory["peak_bytes"] < 2e6, "no step's tensors are kept into the next"


SHARDED_BY_HAND = """
class Sharded(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if p.numel() < 1024:
                dist.all_reduce(p.grad); p.sub_(p.grad, alpha=0.01)
                continue
            rows = p.shape[0] // ranks
            part, own = torch.empty_like(p[:rows]), p[rank * rows:(rank + 1) * rows]
            dist.reduce_scatter_tensor(part, p.grad)
            own.sub_(part, alpha=0.01)
            dist.all_gather_into_tensor(p, own)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
train(lambda: model(torch.randn(8, 64)).square().mean(), Sharded(model.parameters()))
"""

TURNS = """
G, D = DDP(nn.Linear(16, 64)), DDP(nn.Linear(64, 32))
g, d = torch.optim.Adam(G.parameters()), torch.optim.Adam(D.parameters())
for step in range(20):
    real, z = torch.randn(8, 64), torch.randn(8, 16)
    d.zero_grad(); (D(G(z).detach()).mean() - D(real).mean()).backward(); d.step()
    g.zero_grad(); (-D(G(z)).mean()).backward(); g.step()
"""

CLOSURE = """
model = DDP(nn.Linear(64, 64)); optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
x = torch.randn(64, 64)
def closure():
    optimizer.zero_grad(); loss = (model(x) - x.flip(0)).square().mean(); loss.backward(); return loss
for step in range(10):
    optimizer.step(closure)
"""

ADDED_UP = """
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    for micro in range(2):
        model.set_requires_gradient_sync(micro == 1)
        model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""

UNUSED = """
model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), find_unused_parameters=True)
train(lambda: model(torch.randn(4, 64)).sum(), torch.optim.SGD(model.parameters(), 0.1))
"""

TEACHER = """
student = DDP(nn.Linear(512, 512)); optimizer = torch.optim.SGD(student.parameters(), 0.1)
teacher = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).eval().requires_grad_(False)
for step in range(10):
    x = torch.randn(8, 512)
    with torch.no_grad():
        for _ in range(3):
            answer = teacher(x); time.sleep(0.02)
    (student(x) - answer).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""

HELD = """
import copy
model = nn.Linear(256, 256); average = copy.deepcopy(model).requires_grad_(False); data = torch.randn(256, 256)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    x = data[torch.randint(256, (8,))]
    with torch.no_grad():
        target = average.eval()(x) if CALLED == "teacher" else 0.0
    (model(x) - target).square().mean().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        for mean, now in zip(average.parameters(), model.parameters()):
            mean.lerp_(now, 0.1)
        if CALLED == "evaluated":
            average.eval()(x)
"""

DEEPSPEED_PIPELINE = """
import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
deepspeed.init_distributed("gloo")
layers = [LayerSpec(nn.Linear, 64, 64) for _ in range(4)]
net = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
config = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randn(512, 64))
engine, *_ = deepspeed.initialize(model=net, model_parameters=list(net.parameters()), config=config, training_data=data)
for step in range(10):
    engine.train_batch()
"""

FUTURE = """
p = nn.Parameter(torch.ones(64, 64, device="cuda")); optimizer = torch.optim.SGD([p], 0.1)
for step in range(10):
    (p * torch.randn(64, 64, device="cuda")).sum().backward()
    part = torch.empty(64 // ranks, 64, device="cuda")
    dist.reduce_scatter_tensor(part, p.grad, async_op=True).get_future().wait()
    dist.all_gather_into_tensor(p.grad, part, async_op=True).get_future().wait()
    optimizer.step(); optimizer.zero_grad()
"""


def test_an_optimizer_that_shards_itself_is_known_by_its_bytes(measured):
    found = measured(SHARDED_BY_HAND)
    rows = {row.kind: row for row in found.collectives}
    for kind in ("reduce-scatter", "all-gather"):
        assert rows[kind].expected_bytes == pytest.approx(rows[kind].bytes, rel=0.01)
    assert says(sections.parallelisms_text(found), "sharded optimizer", "0, 1", "train.py")


def test_optimizers_that_take_turns_make_one_step(measured):
    found = measured(TURNS)
    of_both = 4 * (16 * 64 + 64 + 2 * (64 * 32 + 32))  # the critic's are summed for the generator's step as well
    assert sum(row.bytes for row in found.collectives) == pytest.approx(of_both)
    assert (found.micro_batches, found.closures) == (1, 1)
    assert found.findings == []


def test_a_closure_that_is_called_again_is_no_micro_batch(measured):
    found = measured(CLOSURE)
    (row,) = found.collectives
    assert found.micro_batches == 1
    assert found.closures == round(row.calls) > 1
    assert row.expected_bytes == pytest.approx(row.bytes)
    assert found.findings == []


def test_gradients_that_fsdp2_adds_up_are_reduced_once(measured):
    found = measured(ADDED_UP)
    (row,) = [row for row in found.collectives if row.kind == "reduce-scatter" and row.module == "0"]
    assert row.expected_bytes == pytest.approx(row.bytes)
    assert found.memory["kinds"]["gradients"] > 3 * 64 * 65 * 4, "three layers' whole gradients are kept, and shards"


def test_the_map_of_used_parameters_is_no_gradient(measured):
    found = measured(UNUSED)
    whole = 2 * 64 * 65 * 4
    assert {row.expected_bytes for row in found.collectives} == {whole, None}
    assert says([one.what for one in found.findings], "find_unused_parameters", "all parameters were used")


def test_a_teachers_time_is_the_steps(measured):
    assert all(of.step_s > 0.06 for of in measured(TEACHER).time)


@pytest.mark.parametrize(("called", "models"), [("", 1), ("evaluated", 1), ("teacher", 2)])
def test_copies_and_data_are_no_activations(measured, called, models):
    found = measured(f"CALLED = {called!r}" + HELD)
    kinds = found.memory["kinds"]
    assert kinds["parameters"] == models * 4 * 256 * 257, "an average that is evaluated is no second model"
    assert (found.model["classes"], found.model["parameters"]) == (["Linear"] * models, models * 256 * 257)
    assert kinds["held between steps"] == pytest.approx(4 * ((2 - models) * 256 * 257 + 256 * 256), rel=0.01)
    assert kinds["activations"] < 1e5


# an embedding whose rows are as many as its columns; then words with an embedding of positions and whole scores
WIDTHS = """
class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(300, 32), nn.Embedding(256, 32), nn.Linear(32, 300)
    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head((x @ x.transpose(1, 2)).softmax(-1) @ x)
WORDS, ROWS = (300, 2) if POSITIONS else (256, 16)
square = nn.Sequential(nn.Embedding(256, 256), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
model = DDP(Positions() if POSITIONS else square); optimizer = torch.optim.SGD(model.parameters(), 0.1)
tokens = torch.randint(0, WORDS, (ROWS, 256))
train(lambda: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), optimizer)
"""


@pytest.mark.parametrize("positions", [0, 1])
def test_a_width_that_is_also_another_layers_is_no_logits(measured, positions):
    memory = measured(f"POSITIONS = {positions}" + WIDTHS).memory
    kinds = {one["kind"] for one in memory["largest"] if tuple(one["shape"][-1:]) == (256,)}
    assert kinds, "scores, or what layers return"
    assert "logits" not in kinds
    logits = 4 * 2 * 256 * 300
    assert memory["kinds"]["logits"] >= logits if positions else memory["kinds"]["logits"] == 0


# one model in two wrappers, both called, as a task that has the model and the model itself; its weights are tied
TWICE = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(300, 32), nn.Linear(32, 300, bias=False)
        self.head.weight = self.words.weight
    def forward(self, tokens):
        return self.head(self.words(tokens))
class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._forward_module = self._original_module = model
    def forward(self, tokens):
        return self._forward_module(tokens)
net = Tied(); first, second = Wrapper(DDP(net)), Wrapper(net)
first._original_module = net
alone = dist.new_subgroups(1)[0]
optimizer = torch.optim.SGD(net.parameters(), 0.1); tokens = torch.randint(0, 300, (4, 16))
for step in range(10):
    nn.functional.cross_entropy(first(tokens).flatten(0, 1), tokens.flatten()).backward()
    dist.all_reduce(torch.ones(5000), group=alone)
    optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        second(tokens)
"""


def test_a_model_in_two_wrappers_is_one_model(measured):
    found = measured(TWICE)
    assert (found.model["parameters"], found.model["tied"]) == (9600, ["words.weight = head.weight"])
    alone = [row for row in found.collectives if len(row.ranks) == 1]
    assert {row.ranks for row in alone} == {(0,), (1,)}
    assert all("sends nothing" in row.why for row in alone)


@pytest.mark.nightly
def test_deepspeeds_pipeline_is_recognised(measured):
    found = measured(DEEPSPEED_PIPELINE, ranks=4)
    assert {(one.kind, one.ranks) for one in found.parallelism} == {
        ("PP", (0, 2)), ("PP", (1, 3)), ("DP", (0, 1)), ("DP", (2, 3))
    }  # fmt: skip
    rows = [row for row in found.collectives if row.kind == "send" or row.bytes > 1000]
    assert {row.kind for row in rows} == {"send", "all-reduce"}
    assert [row.expected_bytes for row in rows] == pytest.approx([row.bytes for row in rows], rel=0.001)


def test_a_reduction_has_a_future_as_on_nccl(measured):
    assert {row.kind for row in measured(FUTURE).collectives} == {"reduce-scatter", "all-gather"}


def test_a_library_is_one_wherever_it_lies(tmp_path, monkeypatch):
    (tmp_path / "lib" / "some-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "lib"), str(tmp_path / "own")])
    libraries.library_folders.cache_clear()
    try:
        assert f"{tmp_path / 'lib'}/" in libraries.library_folders()
        assert f"{tmp_path / 'own'}/" not in libraries.library_folders()
        assert f"{Path(torch.__file__).parent}/" in libraries.library_folders()
    finally:
        libraries.library_folders.cache_clear()


def test_a_script_that_leaves_its_steps_to_others_is_told(tmp_path):
    (tmp_path / "script.py").write_text("import subprocess, sys; subprocess.run([sys.executable, '-c', '1'])")
    with pytest.raises(measure.ScriptError) as caught:
        measure.script("script.py", ranks=1, folder=tmp_path)
    assert says(str(caught.value), "not followed", "python", "-c 1")


# --- ``pardemo measure`` on scripts in the manner of each library's own examples (tests/scripts), each as it is


SCRIPTS = project.root() / "tests" / "scripts"
#: Ranks, the parallelisms by kind, and how far the kernel's count may be from the calls': small models send messages
#: of a few bytes, each with a header of its own.
EXPECTED = {
    "accelerate_script": (2, ["DDP"], 0.01),
    "context_parallel": (2, ["CP"], 0.02),
    "deepspeed_zero3": (2, ["DeepSpeed ZeRO-3"], 0.02),
    "fsdp1": (2, ["FSDP1"], 0.01),
    "fsdp2": (2, ["FSDP2"], 0.01),
    "hf_trainer": (2, ["DDP"], 0.01),
    "hsdp": (4, ["HSDP"], 0.01),
    "megatron_gpt": (4, ["DP", "TP"], 0.02),
    "nanogpt_like": (2, ["DDP"], 0.01),
    "pipelining": (2, ["PP"], 0.02),
    "tp_sp": (4, ["TP"], 0.1),
}


def test_each_script_is_here():
    others = {"norm_of_heads"}  # of test_search.py
    assert sorted({path.stem for path in SCRIPTS.glob("*.py")} - others) == sorted(EXPECTED)


@pytest.mark.parametrize("name", few(EXPECTED, 4, 10))
def test_a_script_as_it_is(name, tmp_path):
    ranks, kinds, apart = EXPECTED[name]
    measured = measure.script(str(SCRIPTS / f"{name}.py"), ranks=ranks, folder=tmp_path)
    assert sorted({one.kind for one in measured.parallelism}) == kinds
    assert (measured.ranks, measured.steps, measured.backend) == (ranks, 3, "gloo")
    for counted, of_calls in zip(measured.wire_bytes, measured.gloo_bytes, strict=True):
        assert counted == pytest.approx(of_calls, rel=apart, abs=2000)
    memory = measured.memory
    assert sum(memory["kinds"].values()) == memory["peak_bytes"]
    assert memory["kinds"]["optimizer states"] > 0
    assert memory["line"].startswith(f"{name}.py:")
    for row in measured.collectives:
        assert row.line.startswith(f"{name}.py:"), row
        assert row.why, row
        assert "not known" not in row.why, row
        explained = name.startswith("deepspeed") or "times, since" in row.why
        if row.expected_bytes is not None and row.bytes > 0 and not explained:
            assert row.bytes == pytest.approx(row.expected_bytes, rel=0.02), row
    told = [one.what for one in measured.findings]
    assert not any("nothing is summed" in what or "too often" in what for what in told), told
    if name == "deepspeed_zero3":
        assert any("stage3_param_persistence_threshold" in what for what in told), "what its formula misses is told"
    for one in measured.time:
        assert one.exposed_s + one.hidden_s + one.idle_s > 0
