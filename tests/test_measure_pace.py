"""``pardemo measure --pace``: a step played again on a GPU's rates, and layers that take a given time."""

import sys

import pytest
import torch

from pardemo import Cluster, compat
from pardemo.formulas import communication
from pardemo.planner.hardware import FP32_TFLOPS, GPUS
from pardemo.planner.layouts import micro_batch
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import Program
from pardemo.planner.layouts.shape import Shape
from pardemo.script.runtime.call_sites import CallSite, CallSites
from pardemo.script.runtime.collectives import Call
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.step import measurement, paced_step
from pardemo.script.step.operations import Operation, OperationRecorder, RecordedCollective
from pardemo.script.step.pace import PaceSettings, read_pace
from pardemo.script.step.simulation import simulate_step

#: A model whose products are those of a Llama: four projections and a gated MLP, in bf16; batch, sequence as given.
LLAMA = """
import sys, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
layers, hidden, heads, groups, middle, words, batch, sequence = map(int, sys.argv[1:])
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        head = hidden // heads
        self.qkv = nn.Linear(hidden, (heads + 2 * groups) * head, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * middle, bias=False)
        self.down = nn.Linear(middle, hidden, bias=False)
    def forward(self, x):
        head = hidden // heads
        q, k, v = self.qkv(x).view(batch, sequence, -1, head).transpose(1, 2).split([heads, groups, groups], 1)
        k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(hidden, words, bias=False)
    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
model = Model().to(torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    tokens = torch.randint(0, words, (batch, sequence))
    F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
DDP = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
torch.manual_seed(0)
micro = int(sys.argv[1])
model = DDP(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    for i in range(micro):
        model.require_backward_grad_sync = i == micro - 1
        model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def recorded(folder, source, *arguments, ranks=1, layer_s=0.0):
    (folder / "train.py").write_text(source)
    launch = Launch("train.py", tuple(map(str, arguments)), False)
    return measurement.measure_launch(
        launch, ranks=ranks, cluster=None, steps=1, folder=folder, timeout_s=120,
        pace=PaceSettings(layer_s, "" if layer_s else "H100", None),
    )  # fmt: skip


# --- the simulation, on programs of a line or two


def computes(seconds, *after, read=False):
    return Operation("", seconds, (), seconds, after, read, "", "forward")


def exchange(number, operations=0, waits=False, after=()):
    return RecordedCollective(number, number, operations, after, waits)


def call(number=0, ranks=(0, 1), kind="all-reduce", nbytes=100, group="world"):
    site = CallSite("a.py:1", "", "")
    return Call(kind, ranks, number, group, nbytes, (), "float32", *site[:3], 1, 0.0, site=site)


def played(programs, calls, exchange_s=2.0, launch_s=0.0):
    both = {rank: (program, calls[rank]) for rank, program in programs.items()}
    return simulate_step(both, lambda _, one: one.bytes, launch_s, lambda _: exchange_s)


def test_computation_hides_a_collective_that_it_does_not_need_and_waits_for_one_that_it_does():
    program = [computes(1.0), exchange(0, operations=1), computes(5.0), computes(1.0, 0)]
    for one in played({0: program, 1: program}, {0: [call()], 1: [call()]}):
        assert (one.step_s, one.compute_s, one.exposed_s, one.hidden_s, one.idle_s) == (7.0, 7.0, 0.0, 2.0, 0.0)
    program = [computes(1.0), exchange(0, operations=1), computes(0.5), computes(1.0, 0)]
    for one in played({0: program, 1: program}, {0: [call()], 1: [call()]}):
        assert (one.step_s, one.exposed_s, one.hidden_s) == (4.0, 1.5, 0.5)


def test_a_call_that_is_waited_for_holds_up_what_follows():
    program = [computes(1.0), exchange(0, operations=1, waits=True), computes(5.0)]
    for one in played({0: program, 1: program}, {0: [call()], 1: [call()]}):
        assert (one.step_s, one.exposed_s, one.hidden_s) == (8.0, 2.0, 0.0)


def test_who_waits_for_a_late_rank_waits_for_it_and_not_for_bytes():
    early = [computes(1.0), exchange(0, operations=1), computes(1.0, 0)]
    late = [computes(4.0), exchange(0, operations=1), computes(1.0, 0)]
    first, second = played({0: early, 1: late}, {0: [call()], 1: [call()]})
    assert (first.step_s, first.idle_s, first.exposed_s) == (7.0, 3.0, 2.0)
    assert (second.step_s, second.idle_s, second.exposed_s) == (7.0, 0.0, 2.0)


def test_collectives_of_one_group_follow_one_another_and_those_of_two_do_not():
    program = [exchange(0), exchange(1), computes(1.0, 0, 1)]
    same, other = [call(0), call(1)], [call(0), call(0, group="other")]
    assert played({0: program, 1: program}, {0: same, 1: same})[0].step_s == 5.0
    assert played({0: program, 1: program}, {0: other, 1: other})[0].step_s == 3.0


def test_a_processor_that_launches_slowly_and_one_that_reads_a_result():
    assert played({0: [computes(0.1)] * 10}, {0: []}, launch_s=1.0)[0].step_s == pytest.approx(10.1)
    assert played({0: [computes(5.0, read=True), computes(1.0)]}, {0: []}, launch_s=1.0)[0].step_s == 8.0
    assert played({0: [computes(5.0), computes(1.0)]}, {0: []}, launch_s=1.0)[0].step_s == 7.0


def test_messages_that_wait_for_one_another_are_refused():
    """Both send first, and wait: gloo takes the message, nccl waits for its receiver."""
    there, back = call(ranks=(0, 1), kind="send"), call(ranks=(1, 0), kind="send")
    first = [exchange(0, waits=True), exchange(1, waits=True), computes(1.0)]
    calls = {0: [there, call(ranks=(1, 0), kind="receive")], 1: [back, call(ranks=(0, 1), kind="receive")]}
    with pytest.raises(ValueError, match=r"waits.*a\.py:1"):
        played({0: first, 1: first}, calls)
    second = [exchange(1, waits=True)._replace(number=0), exchange(0, waits=True)._replace(number=1), computes(1.0)]
    assert played({0: first, 1: second}, calls)[0].step_s == 5.0


# --- a script's own step


@pytest.mark.parametrize("sizes", [(2, 128, 4, 2, 344, 500, 2, 64)])
def test_products_of_a_script_are_the_planners_of_its_shape(tmp_path, sizes):
    """What was recorded, operation by operation, beside the planner's closed form of the model's sizes."""
    layers, hidden, heads, groups, middle, words, batch, sequence = sizes
    _, seen = recorded(tmp_path, LLAMA, *sizes)
    machine = Machine(GPUS["A100-80GB"], 1)
    shape = Shape(layers, hidden, heads, groups, middle, words)
    job, layout = Job(shape, machine, Program("any"), sequence), Layout(micro_batch=batch)
    part = "matrix multiplications"
    planned = (
        layers * micro_batch.layer_seconds(job, layout, False).seconds[part]
        + micro_batch.head_seconds(job, layout).seconds[part]
    )
    own = 0.0
    for one in seen[0].work.list:
        if isinstance(one, Operation) and one.product == "16" and one.sizes:
            lost = 1.0
            for size in one.sizes:
                lost *= 1 + paced_step.TILE_LOSS / size
            own += one.flops * lost / machine.matrix_flops
    assert own == pytest.approx(planned, rel=1e-6)
    attention = sum(one.flops for one in seen[0].work.list if getattr(one, "product", "") == "attention16")
    # two products of the scores forward, five backward, half of each behind the causal mask
    assert attention == layers * 7 * batch * heads * sequence**2 * (hidden // heads)


@pytest.mark.parametrize("gpu", ["A100-80GB", "H100"])
@pytest.mark.parametrize("sizes", [(1, 4096, 32, 32, 11008, 32000, 1, 2048), (1, 4096, 32, 8, 14336, 32000, 1, 8192)])
def test_a_layer_of_full_size_takes_what_the_planner_says_of_its_shape(gpu, sizes, monkeypatch):
    """Eager operations one by one, on fake tensors, beside the model that was held against thousands of runs."""
    monkeypatch.setattr(sys, "argv", ["train.py", *map(str, sizes)])
    names = {}
    exec(LLAMA.partition("model = Model()")[0], names)
    noted = OperationRecorder(CallSites(), list)
    with compat.FakeTensorMode():
        layer = _in_bf16(names["Layer"])
        x = torch.empty(sizes[6], sizes[7], sizes[1], dtype=torch.bfloat16, requires_grad=True)
        with noted:
            noted.begin()
            layer(x).backward(torch.empty_like(x))
    machine = Machine(GPUS[gpu], 1)
    compute_s = paced_step.operation_s(machine, paced_step.gpu_rates({"16", "attention16", ""}, False, machine)[0])
    programs = {0: (noted.list, [])}
    own_s = simulate_step(programs, lambda _, one: compute_s(one), paced_step.LAUNCH_S, lambda _: None)[0].step_s
    job = Job(Shape(*sizes[:6]), machine, Program("any"), sizes[7])
    assert own_s == pytest.approx(micro_batch.layer_seconds(job, Layout(micro_batch=sizes[6]), False).total, rel=0.04)


def _in_bf16(module):
    torch.set_default_dtype(torch.bfloat16)
    try:
        return module()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_step_on_a_gpu_and_its_links(tmp_path):
    _, seen = recorded(tmp_path, DDP, 2, ranks=4)
    near = paced_step.on_gpus(seen, paced_step.devices("H100", 4, 4, None, None))
    far = paced_step.on_gpus(seen, paced_step.devices("H100", 4, 2, 1e6, None))
    gradients = 3 * (64 * 64 + 64) * 4
    expected = far_s = communication.ring_all_reduce(gradients, 4).sent / 1e6 / 0.8  # one of two nodes' cards each way
    assert near.alone_s == far.alone_s  # computation knows nothing of links
    assert near.step_s - near.alone_s < 1e-3
    assert far.step_s - far.alone_s == pytest.approx(expected, rel=0.1), far_s
    assert all(one.exposed_s + one.hidden_s >= 0.99 * expected for one in far.time)
    launches = sum(isinstance(one, Operation) for one in seen[0].work.list)
    assert near.alone_s == pytest.approx(launches * paced_step.LAUNCH_S, rel=0.05)  # so small that launching is all
    assert any("fp32 without TF32" in line for line in near.assumed)
    assert near.as_json()["reckoned"]


def test_a_rate_that_nobody_has_published_is_not_made_up(tmp_path):
    unknown = next(name for name in GPUS if name not in FP32_TFLOPS)
    _, seen = recorded(tmp_path, DDP, 1)
    with pytest.raises(ValueError, match=f"multiplies in fp32, and nobody has published that rate of {unknown}"):
        paced_step.on_gpus(seen, paced_step.devices(unknown, 1, 1, None, None))


def test_layers_that_take_a_given_time(tmp_path):
    measured, seen = recorded(tmp_path, DDP, 2, ranks=2, layer_s=0.02)
    passes = 2 * 3 * (1 + 2) * 0.02  # micro-batches, layers, forward and twice that backward
    assert all(one.compute_s >= 0.9 * passes for one in measured.time)  # and how much more is the machine's load
    on_layers = paced_step.on_layers(seen, Cluster(1, 2))
    assert on_layers.alone_s == pytest.approx(passes)
    assert on_layers.step_s == pytest.approx(passes)
    assert set(seen[0].padded.computed_s) == {"0", "1", "2"}
    slow = paced_step.on_layers(seen, Cluster(2, 1, between="1 Mbit/s", tier="none"))
    sent_s = communication.ring_all_reduce(3 * (64 * 64 + 64) * 4, 2).sent / 125e3
    assert slow.step_s == pytest.approx(passes + sent_s, rel=0.05)  # one bucket, full when the backward is over


def test_layers_that_compute_longer_than_they_are_to_take_are_refused(tmp_path):
    measured, seen = recorded(tmp_path, LLAMA, 2, 128, 4, 2, 344, 500, 2, 64, layer_s=1e-6)
    asked = read_pace("1us", None, None, None)
    with pytest.raises(ValueError, match=r"0\.001.*layers"):
        paced_step.add_paced_step(asked, measured, seen)


def test_what_pace_can_be():
    assert read_pace("20ms", None, None, None).layer_s == 0.02
    assert read_pace("rtx4090", None, None, None).gpu == "4090"
    far = read_pace("H100", "2x8", "infiniband-400g", None)
    assert (far.cluster.size, far.between, far.cluster.between_rate) == (16, 50e9, None)
    limited = read_pace("20 ms", "2x2", "1 Gbit/s", None)
    assert limited.cluster.between_rate == 125e6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("H101", None, None, None), "--pace is what a layer takes, as 20ms, or a GPU: no GPU 'H101'; did you mean"),
        (("20", None, None, None), "--pace is what a layer takes, as 20ms, or a GPU"),
        (("-3ms", None, None, None), "--pace is what a layer takes"),
        (("H100", "2", None, None), "--cluster is nodes × ranks on each"),
        (("H100", None, "1Gbit/s", None), "--between is the rate between nodes: say how many"),
        (("H100", "2x2", "fast", None), "fast"),
    ],
)
def test_bad_paces(given, message):
    with pytest.raises(ValueError, match=message):
        read_pace(*given)
