"""``pardemo measure``: the formulas of models that are cut over ranks, from the shapes of their modules."""

import textwrap

import pytest
from conftest import says

from pardemo import measure, project
from pardemo.formulas import communication
from pardemo.script.runtime.call_sites import CallSite
from pardemo.script.step.findings import expect_traffic
from pardemo.script.step.parallelism import CutOptions, Parallelism
from pardemo.script.step.shapes import ExpectedTraffic
from pardemo.script.step.summary import CollectiveRow, Summary

SCRIPTS = project.root() / "tests" / "scripts"
B, S, H, V = 2, 24, 64, 512
TENSOR_PARALLEL = f"""
import sys, torch, torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._tensor import Replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear({H}, {H}) for _ in range(4))
    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, 16)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding({V}, {H}), nn.Linear({H}, {V}, bias=False)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
    def forward(self, x):
        x = self.words(x)
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if "recompute" in sys.argv else layer(x))
        return self.head(x)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
plan = {{"words": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}}
for i in range(2):
    plan |= {{f"layers.{{i}}.{{w}}": ColwiseParallel() for w in ("wq", "wk", "wv")}}
    plan[f"layers.{{i}}.wo"] = RowwiseParallel()
    if "prepare" in sys.argv:
        plan[f"layers.{{i}}"] = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
model = parallelize_module(Model(), mesh, plan)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
while True:
    for _ in range(2 if "prepare" in sys.argv else 1):
        x = torch.randint(0, {V}, ({B}, {S}))
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MEGATRON_SEQUENCE = f"""
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
torch.distributed.init_process_group("gloo")
world = torch.distributed.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
model_parallel_cuda_manual_seed(1)
config = TransformerConfig(num_layers=1, hidden_size={H}, num_attention_heads=4, tensor_model_parallel_size=world,
    sequence_parallel=True, gradient_accumulation_fusion=False)
same = {{"config": config, "init_method": torch.nn.init.xavier_normal_}}
class MLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = ColumnParallelLinear({H}, 256, gather_output=False, bias=False, **same)
        self.down = RowParallelLinear(256, {H}, input_is_parallel=True, bias=False, skip_bias_add=False, **same)
    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)[0]))[0]
words = VocabParallelEmbedding({V}, {H}, reduce_scatter_embeddings=True, **same)
model = torch.nn.Sequential(words, MLP(), MLP())
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randint(0, {V}, ({B}, {S}))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def run(tmp_path, source, *arguments, ranks=2):
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    return measure.script("train.py", arguments, ranks=ranks, folder=tmp_path)


def told(measured, kind, phase, **more):
    rows = [row for row in measured.collectives if row.kind == kind and row.site.phase == phase]
    return [row for row in rows if all(getattr(row, name) == value for name, value in more.items())]


def met(rows):
    """Each row's bytes are those that its formula says; there are some."""
    assert rows
    for row in rows:
        assert row.expected_bytes is not None, row
        assert row.bytes == pytest.approx(row.expected_bytes, rel=0.01), row
    return sum(row.expected_bytes for row in rows)


ACTIVATION = communication.ring_all_reduce(4 * B * S * H, 2).sent


def test_tensor_parallel_by_megatrons_formula(tmp_path):
    measured = run(tmp_path, TENSOR_PARALLEL, "prepare")
    assert met(told(measured, "all-reduce", "forward")) == 2 * 3 * ACTIVATION, "two layers and an embedding, twice"
    assert met(told(measured, "all-reduce", "backward")) == 2 * 3 * ACTIVATION, "two layers and the head"
    logits = communication.ring_half(4 * B * S * V, 2).sent
    assert met(told(measured, "all-gather", "forward")) == 2 * logits
    (found,) = [one for one in measured.findings if one.bytes]  # on a busy machine ranks may wait, which is one, too
    assert "logits are gathered whole" in found.what
    assert found.bytes == 2 * logits


def test_layers_that_each_sum_the_gradient_of_one_input(tmp_path):
    measured = run(tmp_path, TENSOR_PARALLEL)
    rows = told(measured, "all-reduce", "backward")
    assert sum(row.bytes for row in rows) == 7 * ACTIVATION
    assert sum(row.expected_bytes for row in rows) == 3 * ACTIVATION
    second = next(row for row in rows if row.module == "layers.0.wk")
    assert second.expected_bytes == 0
    assert "layers.0.wq takes the same" in second.why
    found = next(one for one in measured.findings if "PrepareModuleInput" in one.what)
    assert found.bytes == 4 * ACTIVATION
    assert "head" not in found.what, "it has its input for itself"


def test_recomputation_sums_again(tmp_path):
    measured = run(tmp_path, TENSOR_PARALLEL, "recompute")
    assert met(told(measured, "all-reduce", "forward")) == 3 * ACTIVATION
    again = [row for row in told(measured, "all-reduce", "backward") if row.site.repeated]
    for row in again:
        assert row.why.startswith("outputs of row-cut layers, summed, again: the forward is recomputed"), row
    assert not any("not known" in row.why for row in measured.collectives)


def test_megatrons_sequence_parallelism_gathers_again(tmp_path):
    measured = run(tmp_path, MEGATRON_SEQUENCE)
    half = ACTIVATION / 2
    assert met(told(measured, "all-gather", "forward")) == 2 * half
    assert met(told(measured, "reduce-scatter", "forward")) == 3 * half
    assert met(told(measured, "all-gather", "backward")) == 5 * half, "three outputs' gradients, two inputs again"
    assert met(told(measured, "reduce-scatter", "backward")) == 2 * half
    assert any("gathered again: sequence parallelism keeps only its shard" in row.why for row in measured.collectives)


def test_stages_of_megatron_and_a_tied_embedding(tmp_path):
    arguments = ["--tensor-parallel", "1", "--pipeline-parallel", "2", "--tie", "--all-reduce"]
    measured = measure.script(str(SCRIPTS / "megatron_gpt.py"), arguments, ranks=4, folder=tmp_path)
    sends = [row for row in measured.collectives if row.kind == "send"]
    assert {row.ranks for row in sends} == {(0, 2), (2, 0), (1, 3), (3, 1)}
    assert met(sends) == 4 * 2 * 4 * 2 * 32 * 64, "two micro-batches of two sequences"
    sums = told(measured, "all-reduce", "between", ranks=(0, 2))
    tied = [row for row in sums if "embedding" in row.why]
    assert met(tied) == communication.ring_all_reduce(4 * 1152 * 64, 2).sent
    assert met([row for row in told(measured, "all-reduce", "between", ranks=(0, 1)) if row.bytes > 1000]) > 0


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_tokens_to_experts(tmp_path, dispatcher):
    arguments = ["--tensor-parallel", "1", "--num-experts", "4", "--expert-parallel", "2", "--dispatcher", dispatcher]
    measured = measure.script(str(SCRIPTS / "megatron_gpt.py"), arguments, ranks=2, folder=tmp_path)
    rows = [row for row in measured.collectives if "tokens to experts" in row.why]
    assert met(rows) > 0
    kinds = {"all-to-all"} if dispatcher == "alltoall" else {"all-gather", "reduce-scatter"}
    assert {row.kind for row in rows} == kinds
    twice = next(row for row in measured.collectives if row.why.startswith("parameters of a bucket"))
    assert says(twice.why, "2", "2", "optimizers")
    assert twice.bytes == 2 * twice.expected_bytes


def test_gpipe_over_three_ranks(tmp_path):
    arguments = ["--schedule", "gpipe", "--micro-batches", "2"]
    measured = measure.script(str(SCRIPTS / "pipelining.py"), arguments, ranks=3, folder=tmp_path)
    sends = [row for row in measured.collectives if row.kind == "send"]
    assert [row.ranks for row in sorted(sends, key=lambda row: row.ranks)] == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert met(sends) == 4 * 4 * 8 * 16 * 72


def test_keys_and_values_that_go_round(tmp_path):
    script = str(SCRIPTS / "context_parallel.py")
    measured = measure.script(script, ["--rotate", "alltoall"], ranks=4, folder=tmp_path)
    whole = 2 * 4 * 2 * 128 * 64  # keys and values of all tokens
    assert met(told(measured, "all-to-all", "forward")) == 2 * whole * 3 / 4
    assert met(told(measured, "all-to-all", "backward")) == 2 * (whole * 3 / 4 + whole), "again; and their gradients"
    (by_hand,) = [row for row in told(measured, "all-reduce", "between") if row.calls > 1]
    assert by_hand.why == "as many bytes as all gradients have: summed by the script"


def test_parameters_of_a_bucket(tmp_path):
    source = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(4)))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(4, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    measured = run(tmp_path, source)
    (row,) = told(measured, "all-reduce", "backward")
    (ddp,) = measured.parallelism
    assert sorted(name for bucket in ddp.options.buckets for name in bucket) == sorted(ddp.unit_bytes)
    assert len(ddp.options.buckets) == row.calls > 1
    assert says(row.why, "3.bias")


def test_what_is_not_known_is_said():
    what = "outputs of row-cut layers, summed"
    summed = ExpectedTraffic((0, 1), "all-reduce", what, 4000.0, 1000, phase="forward", width=10)
    here = CallSite("train.py:3", "layers.0.mlp", "forward")
    rows = [CollectiveRow("all-reduce", (0, 1), 3, 12000.0, here, "float32", ((1000,),))]
    rows.append(CollectiveRow("all-reduce", (0, 1), 1, 9000.0, here, "float32", ((2250,),)))
    parallelism = [Parallelism("TP", (0, 1), ("mlp",), {}, CutOptions("DTensor", traffic=[summed]))]
    measured = Summary(2, 3, 1, "enough", "gloo", parallelism, {}, rows, [0.0] * 2, None, [0.0] * 2, {}, [])
    assert expect_traffic(measured) == []
    assert rows[0].expected_bytes == 4000.0
    assert says(rows[0].why, "formula", "4.00", "kB", "12.0", "kB")
    assert (rows[1].expected_bytes, rows[1].why) == (None, "activations between the parts of a cut layer")


SHARDED = """
import sys, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = torch.nn.Linear(64, 64), torch.nn.Linear(64, 96)
    def forward(self, x):
        for _ in range(3 if "runs" in sys.argv else 1):
            x = torch.relu(self.layer(x))
        x = self.other(x)
        return x @ self.other.weight.full_tensor() if "direct" in sys.argv else x
model = Model()
fully_shard(model.layer)
fully_shard(model.other, reshard_after_forward=True)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    if "unshard" in sys.argv:
        model.layer.unshard()
        model.layer.reshard()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("runs", "layer is gathered 3 times for the forward of a micro-batch where 1 would do: it runs 3 times"),
        ("unshard", "layer is gathered 2 times for the forward of a micro-batch where 1 would do: unshard() is called"),
        ("direct", ""),
    ],
)
def test_why_a_unit_is_gathered_again(tmp_path, argument, reason):
    measured = run(tmp_path, SHARDED, argument)
    findings = [one.what for one in measured.findings]
    assert any(what.startswith(reason) for what in findings) if reason else not findings
    by_itself = [row for row in measured.collectives if "other.weight" in row.why and "gathered by itself" in row.why]
    assert len(by_itself) == (argument == "direct")
    if argument == "runs":
        assert any("3 times for the backward" in what and "each run gives it back" in what for what in findings)
