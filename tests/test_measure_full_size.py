"""``pardemo measure --full-size``: the planner's answer for a script's parallelism, held against the script itself."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from conftest import few, says

from pardemo import cli, project
from pardemo.meters.snapshot import Block
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.shape import Layer
from pardemo.script import blocks
from pardemo.script.report import sections
from pardemo.script.runtime import launch_lines
from pardemo.script.step import full_size, measurement
from pardemo.script.step.parallelism import (
    CutOptions,
    DdpOptions,
    Fsdp1Options,
    Fsdp2Options,
    Parallelism,
    SeveralModels,
)

#: A llama whose sizes are its arguments; how it is parallel is one of them. No biases, and all in one dtype.
LLAMA = """
import argparse, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
parser = argparse.ArgumentParser()
for name, value in dict(layers=3, hidden=128, batch=2, length=64, micro=1).items():
    parser.add_argument("--" + name, type=int, default=value)
parser.add_argument("--as", dest="way", default="fsdp2")
parser.add_argument("--fp32", action="store_true")
parser.add_argument("--sgd", action="store_true")
parser.add_argument("--frozen", action="store_true")
parser.add_argument("--recompute", type=int, default=0)
o = parser.parse_args()
V, H = 2048, 4
dist.init_process_group("gloo")

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.norm2 = nn.RMSNorm(o.hidden), nn.RMSNorm(o.hidden)
        self.qkv, self.o_proj = nn.Linear(o.hidden, 3 * o.hidden, bias=False), nn.Linear(o.hidden, o.hidden, bias=False)
        self.gate, self.up = (nn.Linear(o.hidden, 3 * o.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * o.hidden, o.hidden, bias=False)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(V, o.hidden), nn.RMSNorm(o.hidden)
        self.layers = nn.ModuleList(Layer() for _ in range(o.layers))
        self.head = nn.Linear(o.hidden, V, bias=False)
    def forward(self, x):
        x = self.words(x)
        for n, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if n < o.recompute else layer(x)
        return self.head(self.norm(x))

model = Model()
if o.frozen:
    model.words.weight.requires_grad = False
if o.way == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif o.way != "alone":
    size, half = dist.get_world_size(), o.way == "hsdp"
    mesh = init_device_mesh("cpu", (2, size // 2) if half else (size,), mesh_dim_names=("r", "s") if half else ("s",))
    policy = MixedPrecisionPolicy() if o.fp32 else MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    again = o.way != "kept"
    for layer in model.layers if o.way != "one" else []:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mesh=mesh, mp_policy=policy)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) if o.sgd else torch.optim.AdamW(model.parameters())
while True:
    for _ in range(o.micro):
        x = torch.randint(V, (o.batch, o.length + 1))
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    folder = tmp_path_factory.mktemp("full_size")
    (folder / "llama.py").write_text(LLAMA)

    def config(layers=3, hidden=128):
        """The very model of the script, for the planner."""
        path = folder / f"{layers}x{hidden}" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps({
                "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
                "num_key_value_heads": 4, "intermediate_size": 3 * hidden, "vocab_size": 2048,
                "tie_word_embeddings": False, "max_position_embeddings": 4096,
            })
        )  # fmt: skip
        return str(path.parent)

    def answer(model, *arguments, ranks=2, **asked):
        launch = launch_lines.Launch(str(folder / "llama.py"), arguments)
        measured, seen = measurement.measure_launch(
            launch, ranks=ranks, cluster=None, steps=1, folder=str(folder), timeout_s=120
        )  # fmt: skip
        return full_size.answer(full_size.full_size_question(model, **asked), measured, seen)

    return SimpleNamespace(path=str(folder / "llama.py"), config=config, answer=answer)


@pytest.mark.parametrize("sizes", few([{}, {"layers": 6, "hidden": 256}]), ids=["3 layers of 128", "6 layers of 256"])
@pytest.mark.parametrize("how", [["--as", "fsdp2"], ["--as", "ddp"], ["--as", "fsdp2", "--fp32"]], ids=" ".join)
def test_at_the_scripts_own_size_the_plan_is_what_was_measured(script, sizes, how):
    """States exactly, the rest within what the docs say: less than another dtype, or half of the layers, would make."""
    arguments = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    full = script.answer(script.config(**sizes), *arguments, *how)
    assert full["why_not"] == ""
    planned, here = full["kinds"], full["measured"]
    hidden, layers = sizes.get("hidden", 128), sizes.get("layers", 3)
    shards = 1 if "ddp" in how else 2
    last_norm = hidden // shards  # parameters that the planner's layouts leave out
    tensors = 7 * layers + 3
    assert here["parameters"]["most"] - planned["parameters"] == 4 * last_norm
    assert here["optimizer states"]["most"] - planned["optimizer states"] == 8 * last_norm + 4 * tensors, "step counts"
    low = "ddp" not in how and "--fp32" not in how  # in 16 bits logits may be kept beside what is made of them in 32
    assert here["logits"]["most"] * (14 / 12 if low else 1) == planned["logits"]
    assert planned["activations"] == pytest.approx(here["activations"]["most"], rel=0.35)
    if "ddp" in how:
        assert here["gradients"]["most"] - planned["gradients"] == 4 * last_norm
        assert 0 <= here["communication buffers"]["most"] - planned["communication buffers"] - 4 * last_norm < 512
    else:
        assert planned["gathered parameters"] == pytest.approx(here["gathered parameters"]["most"], rel=0.25)


@pytest.mark.nightly
def test_the_scripts_own_states_and_groups_grow_with_it(script):
    """HSDP keeps its group of shards, SGD its one state; recomputed layers keep their inputs alone."""
    llama3 = configurations.shape_of_config(configurations.find_configuration("llama3-8b"))
    asked = {"gpus": 64, "sequence": 4096, "micro_batch": 1}
    plain = script.answer("llama3-8b", "--as", "fsdp2", **asked)
    hsdp = script.answer("llama3-8b", "--as", "hsdp", "--sgd", "--recompute", "3", "--micro", "2", ranks=4, **asked)
    assert (plain["layout"], hsdp["layout"]) == ("DP64 zero3 1×1", "DP64 zero3/2 1×2 recompute full")
    each = {"parameters": 4, "gradients": 4, "optimizer states": 8}
    norm = llama3.hidden
    for full, shards, states in ((plain, 64, 8), (hsdp, 2, 4)):
        for kind, nbytes in (each | {"optimizer states": states}).items():
            assert full["kinds"][kind] == pytest.approx(nbytes * (llama3.params - norm) / shards, abs=1)
        assert full["kinds"]["logits"] == 14 * 4096 * llama3.vocabulary
        root = 2 * llama3.embedding_params + 2 * llama3.head_params
        layers = 2 * 2 * llama3.layer_params(Layer()) * (1 - 1 / shards)
        assert full["kinds"]["gathered parameters"] == pytest.approx(root + layers)
        assert full["peak_bytes"] == sum(full["kinds"].values())
        assert full["gpus"] == 64
    assert hsdp["kinds"]["activations"] < plain["kinds"]["activations"] / 5
    assert "SGD: 4 bytes of parameters, 4 of gradients and 4 of states for each" in hsdp["taken_over"]
    assert "AdamW: 4 bytes of parameters, 4 of gradients and 8 of states for each" in plain["taken_over"]


@pytest.mark.parametrize(
    ("arguments", "asked", "why"),
    [
        (["--as", "kept"], {}, r"layers.0 stays gathered from its forward to its backward pass"),
        (["--as", "one"], {}, r"0 units besides the root are not the 3 layers"),
        (["--as", "fsdp2", "--recompute", "1"], {}, r"1 of 3 layers are recomputed"),
        (["--as", "ddp", "--frozen"], {}, r"262,144 of 1,\d+,\d+ parameters are frozen"),
        (["--as", "alone"], {}, r"what the groups of 2 ranks share was not recognised"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_has_no_counterpart_gets_one_line_and_no_number(script, arguments, asked, why):
    full = script.answer("llama3-8b", *arguments, **asked)
    assert re.search(why, full["why_not"]), full["why_not"]
    assert "\n" not in full["why_not"]
    assert (full["peak_bytes"], full["kinds"]) == (None, {})
    assert full["measured"]["parameters"]["most"] > 0


RANKS = (0, 1, 2, 3)
DDP = Parallelism("DDP", RANKS, (), {}, DdpOptions())


def run_of(*parallelism, ranks=4, **trained):
    """A summary, and what its first rank saw, of a script that was not run."""
    known = {"elements": 10, "weight": 4.0, "gradient": 4.0, "state": 8.0, "unlike": False, "tokens": (2, 64),
             "optimizers": ["AdamW"], "layers": 2, "layers_recomputed": 0, "recomputed_inside": False,
             "bucket_view": True, "deepspeed": {}}  # fmt: skip
    model = {"frozen": 0, "parameters": 10, "computed_in": [], "dtypes": {"bfloat16": 10}, "trained": known | trained}
    memory = SimpleNamespace(blocks=[Block(8, "parameters", "a.py:1", "", 0, None)])
    one = SimpleNamespace(rank=0, model=model, memory=memory)
    measured = SimpleNamespace(
        ranks=ranks, parallelism=list(parallelism), model=model, micro_batches=4, collectives=[],
        memory={"rank": 0, "kinds": {"parameters": 8}},
    )  # fmt: skip
    return measured, [one]


def test_groups_of_several_kinds_become_degrees():
    cut = Parallelism("TP", (0, 1), ("layers.0.mlp",), {}, CutOptions("DTensor"))
    options = Fsdp2Options(gathered_in=["bfloat16"])
    shards = Parallelism("FSDP2", (0, 2), ("layers.0", "layers.1", "(root)"), {}, options)
    asked = full_size.full_size_question("llama3-8b", gpus=64, sequence=4096)
    full = full_size.answer(asked, *run_of(cut, shards))
    assert full["layout"] == "TP2 DP32 zero3 2×4"
    assert cli._parser().parse_args(full["command"].split()[1:]).explain == (
        "tp=2,dp=32,sharding=zero3,micro_batch=2,accumulation=4"
    )
    stage = Parallelism("PP", RANKS, ("stage 0 of 4",), {})
    full = full_size.answer(full_size.full_size_question("llama3-8b", sequence=4096), *run_of(stage))
    assert full["layout"] == "PP4 DP1 2×4"
    assert full["kinds"]["parameters"] == pytest.approx(4 * 2.27e9, rel=0.01), "a stage with the embedding or the head"


@pytest.mark.parametrize(
    ("parallelism", "trained", "asked", "why"),
    [
        ([Parallelism("DP", RANKS, (), {}, CutOptions("Megatron-core"))], {}, {}, "Megatron-core's optimizer"),
        ([Parallelism("DDP", RANKS, (), {}, SeveralModels(2))], {}, {}, "several models"),
        ([Parallelism("EP", RANKS, (), {})], {}, {}, "EP is not translated"),
        ([Parallelism("TP", (0, other), (), {}) for other in (1, 2)], {}, {}, "a rank is in several groups of TP"),
        ([Parallelism("FSDP1", RANKS, (), {}, Fsdp1Options("SHARD_GRAD_OP"))], {}, {}, "SHARD_GRAD_OP"),
        ([Parallelism("TP", RANKS, (), {})], {}, {"gpus": 6}, "6 GPUs do not divide by TP 4"),
        ([Parallelism("TP", RANKS, (), {})], {}, {"gpus": 8}, "no data parallelism"),
        ([DDP], {"unlike": True}, {}, "states of other shapes"),
        ([DDP], {"tokens": ()}, {}, "say --micro-batch and --sequence"),
        ([DDP], {"recomputed_inside": True}, {}, "parts of layers are recomputed"),
        ([Parallelism("TP", (0, 1, 2), (), {})], {"ranks": 3}, {}, "attention heads do not divide by TP 3"),
    ],
)  # fmt: skip
def test_other_scripts_without_a_counterpart(parallelism, trained, asked, why):
    full = full_size.answer(full_size.full_size_question("llama3-8b", **asked), *run_of(*parallelism, **trained))
    assert why in full["why_not"]
    assert full["peak_bytes"] is None


def test_the_command_says_it_beside_the_measured_bytes(script, monkeypatch, capsys):
    command = ["measure", "--ranks", "2", "--steps", "1", "--full-size", "llama3-8b", "--gpus", "16"]
    assert cli.main([*command, "--json", "--", script.path, "--as", "ddp"]) == 0
    full = json.loads(capsys.readouterr().out)["memory"]["full_size"]
    assert full["planned"]
    assert (full["model"], full["gpus"], full["layout"]) == ("llama3-8b", 16, "DP16 2×1")
    monkeypatch.setattr(measurement, "measure_launch", lambda *_, **__: (None, None))
    assert cli.main(["measure", "--full-size", "llama9", "--", script.path]) == 2
    assert "no model 'llama9'" in capsys.readouterr().err
    assert cli.main(["measure", "--gpus", "4", "--", script.path]) == 2
    assert says(capsys.readouterr().err, "--gpus")


def test_on_a_screen(script):
    def full_size_lines(measured):
        return "\n".join(sections.full_size(measured).screen(blocks.WIDE))

    asked = full_size.full_size_question("llama3-8b", gpus=64, sequence=4096)
    measured, seen = run_of(DDP)
    measured.memory["full_size"] = full_size.answer(asked, measured, seen)
    said = full_size_lines(measured)
    assert "planned and not measured" in said
    row = next(line for line in said.splitlines() if line.strip().startswith("parameters"))
    assert row.split() == ["parameters", "8", "B", "8", "B", "32.1", "GB"]
    measured.memory["full_size"] = full_size.answer(asked, *run_of(Parallelism("EP", RANKS, (), {})))
    assert says(full_size_lines(measured), "EP", "translated")
    del measured.memory["full_size"]
    assert full_size_lines(measured) == ""


def test_deepspeeds_stage_is_run_dry_at_the_scripts_own_size(script, monkeypatch):
    pytest.importorskip("deepspeed")
    path = str(project.PACKAGE.parent / "tests" / "scripts" / "deepspeed_zero3.py")
    launch = launch_lines.Launch(path, ("--stage", "2", "--steps", "20"))
    measured, seen = measurement.measure_launch(launch, ranks=2, cluster=None, steps=1, folder=None, timeout_s=200)
    full = full_size.answer(full_size.full_size_question(script.config(2, 128), gpus=2), measured, seen)
    assert full["why_not"] == ""
    settings = measured.model["trained"]["deepspeed"]["zero"]
    assert settings["reduce_bucket_size"] == 500000
    assert any("reduce_bucket_size 500000" in line for line in full["taken_over"])
    params = 2 * (4 + 9) * 128**2 + 2 * 2 * 128 + 128 + 2 * 2048 * 128
    assert full["kinds"]["parameters"] == pytest.approx(2 * params, rel=0.01)
    assert full["kinds"]["optimizer states"] == pytest.approx(12 * params / 2, rel=0.01)
    assert full["measured"]["optimizer states"]["most"] == pytest.approx(
        12 * measured.model["parameters"] / 2, rel=0.01
    ), "and so does the script"


def test_the_planner_is_loaded_for_those_who_ask():
    code = "import sys; from pardemo.script.step import full_size, measurement"
    code += "; assert 'pardemo.planner.layouts' not in sys.modules"
    code += "; full_size.full_size_question('llama3-8b'); assert 'transformers' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
