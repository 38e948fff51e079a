"""Engines and scripts that train alike are proven to; one that does not is told by factor, module and cause."""

import json
import textwrap
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import few, says
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pardemo import cli, project
from pardemo.prove import Parallel, prove
from pardemo.prove import script as prove_script
from pardemo.script.compare import checks, proof, run_layouts, runs

SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build():
    return nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32))


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def loss(model, batch):
    return loss_of(model(batch["tokens"]), batch["targets"])


def batches(steps=2):
    drawn = torch.randint(0, 32, (steps, 8, 5), generator=torch.Generator().manual_seed(1))
    return [{"tokens": one[:, :-1], "targets": one[:, 1:]} for one in drawn]


# --- engines: (model, layout) to what runs on this rank


def ddp(model, layout, group=None):
    return nn.parallel.DistributedDataParallel(model, process_group=group)


def ours(model, layout):
    from pardemo import data_parallel

    return getattr(data_parallel, layout.values["engine"])(model)


def zero(model, layout):
    import pardemo.zero

    return getattr(pardemo.zero, layout.values["engine"])(model, SGD)


def fsdp1(model, layout):
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    original = layout.values["engine"] == "fsdp1_original"
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=original, device_id=torch.device("cpu")
    )


def fsdp2(model, layout):
    from torch.distributed.fsdp import fully_shard

    for block in model[1:3]:
        fully_shard(block)
    fully_shard(model)  # in place, and nothing is returned


def mesh(layout):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (layout.size("dp"), layout.size("tp")), mesh_dim_names=("dp", "tp"))


def dtensor(model, layout):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = (("up", ColwiseParallel), ("down", RowwiseParallel))
    plan = {f"{number}.{name}": style() for number in (1, 2) for name, style in styles}
    return parallelize_module(model, mesh(layout)["tp"], plan)


def tensor_parallel(model, layout):
    from pardemo.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    ranks = mesh(layout)
    for block in model[1:3]:
        block.up = ColumnParallelLinear(block.up, ranks["tp"].get_group())
        block.down = RowParallelLinear(block.down, ranks["tp"].get_group())
    return ddp(model, layout, ranks["dp"].get_group()) if layout.size("dp") > 1 else model


def pipeline(model, layout):
    from pardemo.pipeline_parallel import Pipeline, Schedule, cut_by_layers, zb_h1

    schedule = Schedule(zb_h1, ranks=layout.ranks, micro_batches=4)
    mine = cut_by_layers(list(model), schedule.stages)[dist.get_rank() :: schedule.ranks]
    running = Pipeline(mine, schedule, loss_of)
    return Parallel(nn.ModuleList(mine), train=lambda batch: running.step(batch["tokens"], batch["targets"]))


def pipelining(model, layout):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    mine = model[2 * rank : 2 * rank + 2]
    schedule = Schedule1F1B(PipelineStage(mine, rank, 2, torch.device("cpu")), 4, loss_fn=loss_of)
    return Parallel(
        mine, train=lambda b: schedule.step(target=b["targets"]) if rank else schedule.step(b["tokens"])
    )  # fmt: skip


def by_hand(model, layout):
    def average():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    return Parallel(model, synchronize=average)


def deepspeed(model, layout):
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": layout.size("accumulate"),
        "zero_optimization": {"stage": int(layout.values["engine"][-1])}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=SGD(model.parameters()), config=settings)[0]


# --- broken ones


def summed(model, layout):
    def hook(_, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    wrapped = ddp(model, layout)
    wrapped.register_comm_hook(None, hook)
    return wrapped


def twice(model, layout):
    model[2].up.weight.register_hook(lambda gradient: 2 * gradient)
    return ddp(model, layout)


def by_name(model, layout):
    """What the layout's ``engine`` names: a function here, or a class of ours."""
    name = layout.values["engine"]
    kinds = {"Zero": zero, "fsdp1": fsdp1, "deepspeed": deepspeed, "DataParallel": ours}
    kind = next((kind for part, kind in kinds.items() if part in name), globals().get(name))
    return kind(model, layout)


@pytest.mark.parametrize(
    "others",
    few(
        [
            ["ranks=2 engine=ddp accumulate=2", "ranks=2 engine=by_hand accumulate=2"],
            ["ranks=2 engine=NaiveDataParallel", "ranks=2 engine=BucketedDataParallel"],
            ["ranks=2 engine=fsdp1", "ranks=2 engine=fsdp1_original", "ranks=2 engine=fsdp2"],
            ["ranks=2 tp=2 engine=dtensor", "ranks=2 tp=2 engine=tensor_parallel"],
            ["ranks=4 tp=2 engine=tensor_parallel"],
            ["ranks=2 pp=2 engine=pipeline", "ranks=2 pp=2 engine=pipelining"],
        ],
        0,
        3,
    ),
)
def test_engines_train_as_one_process(others):
    made = prove(build, loss, batches(), by_name, ["ranks=1", *others])
    assert made.equal, str(made)
    assert (made.steps, made.parameters, made.tolerance) == (2, 15, 1e-9)


def test_a_module_that_gets_nothing_is_not_compared():
    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.of = nn.Linear(16, 16)

        def forward(self, x):
            return x + self.of(x[:, :0]).sum()  # as an expert without tokens

    def with_unused():
        return nn.Sequential(nn.Embedding(32, 16), Unused(), nn.Linear(16, 32))

    made = prove(with_unused, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=ddp"])
    assert made.equal, str(made)


@pytest.mark.parametrize("engine", few(["Zero", "deepspeed"]))
def test_zero_trains_as_one_process_in_fp32(engine):
    accumulate = 2 if engine == "deepspeed" else 1
    texts = ["ranks=1", *(f"ranks=2 engine={engine}{stage} accumulate={accumulate}" for stage in (1, 2, 3))]
    made = prove(build, loss, batches(), by_name, texts, optimizer=SGD, double=False)
    assert made.equal, str(made)
    assert made.tolerance == 1e-4


@pytest.fixture(scope="module")
def wrong():
    """Two that do not train alike, and one that does."""
    return prove(build, loss, batches(), by_name, [
        {"ranks": 1}, {"ranks": 2, "engine": "summed"}, {"ranks": 2, "engine": "twice"}, {"ranks": 2, "engine": "ddp"},
    ])  # fmt: skip


def test_a_sum_for_a_mean_is_told_by_its_factor(wrong):
    assert not wrong.equal
    (finding,) = [one for one in wrong.findings if one.layout == "ranks=2 engine=summed"]
    assert (finding.step, finding.what, finding.cause, finding.module) == (1, "gradients", "sum-for-mean", "3")
    assert finding.factor == pytest.approx(2, rel=1e-9)
    assert finding.rest < 1e-9
    assert len(finding.parameters) == 15
    assert "the number of ranks" in finding.why


def test_one_wrong_parameter_is_told_with_its_module(wrong):
    (finding,) = [one for one in wrong.findings if one.layout == "ranks=2 engine=twice"]
    assert (finding.parameters, finding.module) == (("2.up.weight",), "2.up")
    assert finding.factor == pytest.approx(2, rel=1e-9)


def test_the_verdict_as_json_and_on_a_screen(wrong):
    said = json.loads(json.dumps(wrong.as_json(), allow_nan=False))
    assert said["equal"] is False
    assert [(row["layout"], row["equal"], row["error"]) for row in said["layouts"]] == [
        ("ranks=1", True, None), ("ranks=2 engine=summed", False, None), ("ranks=2 engine=twice", False, None),
        ("ranks=2 engine=ddp", True, None),
    ]  # fmt: skip
    for row in said["findings"]:
        assert {"layout", "step", "cause", "factor", "rest", "parameters", "module"} <= row.keys()
    screen = str(wrong)
    assert "✗  ranks=2 engine=summed" in screen
    assert says(screen, "ranks=2", "engine=ddp")
    assert screen.endswith("different")


# --- large models


@pytest.fixture
def recorded_runs(monkeypatch):
    """The runs that a proof makes: layout, whether by sketches, and what is recorded in full."""
    made, ran = [], runs.run_layout

    def noted(layout, options, folder):
        made.append((layout.name, options.sketched, options.in_full))
        return ran(layout, options, folder)

    monkeypatch.setattr(runs, "run_layout", noted)
    monkeypatch.setattr(runs, "SKETCHED", 1000)
    return made


def test_sketches_are_enough_where_layouts_train_alike(recorded_runs):
    made = prove(build, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=ddp", "ranks=2 tp=2 engine=dtensor"])
    assert made.equal, str(made)
    assert [run for run in recorded_runs if run[2] or not run[1]] == []
    assert len(recorded_runs) == 4


def test_parts_that_begin_within_a_block_are_compared_in_full(recorded_runs):
    """Half a layer norm of 16 is half a block."""
    made = prove(build, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=fsdp2"])
    assert made.equal, str(made)
    assert {"1.norm.weight", "2.norm.bias"} <= set(recorded_runs[-1][2])
    assert "2.up.weight" not in recorded_runs[-1][2]


def test_what_parts_is_compared_in_full(recorded_runs):
    made = prove(build, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=twice"])
    (finding,) = made.findings
    assert (finding.parameters, finding.factor) == (("2.up.weight",), pytest.approx(2, rel=1e-9))
    assert recorded_runs[-2:] == [("ranks=1", True, ("2.up.weight",)), ("ranks=2 engine=twice", True, ("2.up.weight",))]
    assert says(str(made), "1", "parameter", "512")


def test_past_the_budget_the_sketches_have_to_do(recorded_runs, monkeypatch):
    monkeypatch.setattr(proof, "IN_FULL", 511)
    (finding,) = prove(build, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=twice"]).findings
    assert (finding.parameters, finding.factor) == (("2.up.weight",), pytest.approx(2, rel=1e-9))
    assert len(recorded_runs) == 3


def test_ranges_of_flat_parameters_are_compared_in_full(recorded_runs):
    """Sketches cannot be: a range begins anywhere within a row."""
    made = prove(build, loss, batches(), by_name, ["ranks=1", "ranks=2 engine=fsdp1"])
    assert made.equal, str(made)
    assert {"0.weight", "1.up.weight", "2.down.weight", "3.weight"} <= set(recorded_runs[-1][2])


# --- the door's own words


def test_a_rank_gets_its_samples_in_order():
    from pardemo.script.compare.prove_function import part

    _, cut, plain = run_layouts.for_function(["ranks=1", "ranks=4 tp=2", {"ranks": 4}])
    batch = {"x": torch.arange(8), "pair": (torch.arange(8), torch.tensor(3)), "name": "n"}
    assert [part(batch, cut, rank)["x"].tolist() for rank in range(4)] == [[0, 1, 2, 3]] * 2 + [[4, 5, 6, 7]] * 2
    assert [part(batch, plain, rank)["x"].tolist() for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    mine = part(batch, plain, 3)
    assert (mine["pair"][0].tolist(), int(mine["pair"][1]), mine["name"]) == ([6, 7], 3, "n")


def interleaved(batch, layout, rank):
    return {name: tensor[rank :: layout.ranks] for name, tensor in batch.items()}


def test_samples_may_be_dealt_out_in_another_way():
    texts = ["ranks=1", "ranks=2 engine=ddp"]
    assert prove(build, loss, batches(), by_name, texts, shard=interleaved).equal


# --- the command

SCRIPT = """
import argparse, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--times", type=float, default=1)
asked = parser.parse_args()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 16, dtype=torch.float32)
for step in range(9):
    begin = (step * dist.get_world_size() + dist.get_rank()) * asked.batch % 64
    loss = model(data[begin : begin + asked.batch]).square().mean() * asked.times
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_the_command_says_equal_by_zero(script, capsys):
    (script / "prove.toml").write_text(
        textwrap.dedent("""
            script = "train.py --batch {batch}"
            steps = 2
            double = true
            [[layout]]
            ranks = 1
            batch = 8
            [[layout]]
            ranks = 2
            batch = 4
        """)
    )
    assert cli.main(["prove"]) == 0
    printed = capsys.readouterr().out
    assert says(printed, "ranks=1", "batch=8", "2", "4")
    assert "note: --double" in printed
    assert says(printed.rstrip(), "1e-09", "compared")


def test_the_command_says_different_by_one(script, capsys):
    texts = ["--layout", "ranks=1 batch=8 times=1", "--layout", "ranks=2 batch=4 times=2"]
    line = ["train.py", "--batch", "{batch}", "--times", "{times}"]
    assert cli.main(["prove", *texts, "--steps", "1", "--json", "--", *line]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["equal"] is False
    (row,) = said["findings"]
    assert (row["layout"], row["step"], row["cause"], row["module"]) == (
        "ranks=2 batch=4 times=2", 1, "sum-for-mean", "2",
    )  # fmt: skip
    assert row["factor"] == pytest.approx(2, rel=1e-4)
    assert said["layouts"][1]["line"] == "train.py --batch 4 --times 2"


def test_a_script_without_a_seed_begins_with_the_same_parameters_on_all_ranks(script):
    """torch's own generator has one seed in every process; nothing here sends rank 0's parameters to the others."""
    text = SCRIPT.replace("torch.manual_seed(0)\n", "").replace("Parallel(model)", "Parallel(model, init_sync=False)")
    assert text.count("seed") == 0
    assert "init_sync" in text
    (script / "train.py").write_text(text)
    texts, line = ["ranks=1 batch=8", "ranks=2 batch=4"], ["train.py", "--batch", "{batch}"]
    made = proof.compare_layouts(run_layouts.from_texts(texts, line), runs.RunOptions(steps=1))
    assert made.equal, str(made)


ACCELERATE = """
import argparse, torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int)
parser.add_argument("--accumulate", type=int)
asked = parser.parse_args()
accelerator = Accelerator(gradient_accumulation_steps=asked.accumulate)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=asked.batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (samples,) in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(samples).square().mean())
        optimizer.step()
        optimizer.zero_grad()
"""


def test_accelerate_trains_as_one_process(script):
    (script / "train.py").write_text(ACCELERATE)
    texts = ["ranks=1 batch=8 accumulate=1", "ranks=2 batch=2 accumulate=2"]
    line = ["train.py", "--batch", "{batch}", "--accumulate", "{accumulate}"]
    made = proof.compare_layouts(run_layouts.from_texts(texts, line), runs.RunOptions(steps=2, double=True))
    assert made.equal, str(made)


SHARDED_BY_ACCELERATE = """
import sys, torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM
accumulate = int(sys.argv[1]); torch.manual_seed(0)
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, activation_checkpointing=True, auto_wrap_policy="transformer_based_wrap",
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=accumulate)
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-2))
draws = torch.Generator().manual_seed(1)
for step in range(4):
    tokens = torch.randint(0, 64, (8, 12), generator=draws).chunk(accelerator.num_processes)[accelerator.process_index]
    for part in tokens.chunk(accumulate):
        with accelerator.accumulate(model):
            accelerator.backward(model(input_ids=part, labels=part).loss)
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_accelerates_fsdp2_recomputes_in_fp64(script):
    (script / "train.py").write_text(SHARDED_BY_ACCELERATE)
    texts = ["ranks=1 accumulate=1", "ranks=2 accumulate=1", "ranks=2 accumulate=2"]
    made = proof.compare_layouts(
        run_layouts.from_texts(texts, ["train.py", "{accumulate}"]), runs.RunOptions(steps=2, double=True)
    )
    assert made.equal, str(made)


def test_a_zero_bubble_pipeline_takes_gradients_without_backward():
    file = project.PACKAGE / "script" / "search" / "recipes" / "scripts" / "torch_pipeline.py"
    chosen = ["ranks=1 pp=1 schedule=none", "ranks=2 pp=2 schedule=InterleavedZeroBubble"]
    made = prove_script([str(file), "--pp", "{pp}", "--schedule", "{schedule}"], chosen, double=True)
    assert made.equal, str(made)


# --- outputs whose rows are not in the order of samples, under ``prove``: [s, b, h], and tokens as a router sends them


class SequenceFirst(nn.Module):
    """Inside it is [s, b, h], with as many tokens in a sample as the whole batch has samples: 4."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens.t()).tanh())  # [s, b, h]
        return self.head(x.transpose(0, 1))


class Flattened(SequenceFirst):
    """Its layer sees [s·b, h], as Megatron's router does."""

    def forward(self, tokens):
        x = self.embed(tokens.t())
        return self.head(self.layer(x.flatten(0, 1).tanh()).view_as(x).transpose(0, 1))


class Dispatched(SequenceFirst):
    """Its layer is an expert that gets all tokens, sorted: on each rank in another order than in one process."""

    wrong = False

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        order = tokens.flatten().argsort(stable=True)
        sent = self.layer(x[order].tanh())
        if self.wrong and dist.get_world_size() > 1:
            sent = sent.flip(0)  # the tokens come back to others
        return self.head(torch.empty_like(sent).index_copy(0, order, sent).unflatten(0, tokens.shape))


class Confused(Dispatched):
    wrong = True


def row_loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def data_parallel(model, layout):
    return DistributedDataParallel(model)


def proof_of_rows(build):
    drawn = torch.randint(32, (2, 4, 5), generator=torch.Generator().manual_seed(2))
    batches = [{"tokens": t[:, :-1], "targets": t[:, 1:]} for t in drawn]
    return prove(build, row_loss, batches, data_parallel, ["ranks=1", "ranks=2", "ranks=2 accumulate=2"])


@pytest.mark.parametrize("build", [SequenceFirst, Flattened, Dispatched])
def test_rows_in_another_order_are_not_accused(build):
    made = proof_of_rows(build)
    assert made.equal, str(made)


def test_tokens_that_come_back_to_others_are_found_where_that_shows():
    made = proof_of_rows(Confused)
    assert {finding.module for finding in made.findings} == {"head"}


@pytest.mark.parametrize(
    ("judged", "told"),
    [
        ("= = =", ""),
        ("= ! !", "12"),  # ! differs in a module that is not cut
        ("! = =", "0"),
        ("? ? =", ""),  # ? in one that is: a partial sum, which comes right again
        ("= ? ?", "12"),
        ("? ! =", "1"),
        ("? ! ?", "012"),
        ("! ? =", "0"),
    ],
)
def test_what_differs_is_told_from_where_it_does_not_come_right_again(judged, told):
    modules = [SimpleNamespace(place=n, equal=s == "=", strict=s == "!") for n, s in enumerate(judged.split())]
    assert "".join(str(one.place) for one in checks._that_stay_apart(modules)) == told


def test_an_output_is_rows_only_where_it_can_be():
    cells = torch.arange(36.0).reshape(12, 3)
    ways = checks.rows_of_output(cells, 4, 3)
    assert list(ways) == [checks.FLAT, checks.FLAT_BY_TOKENS]
    assert torch.equal(ways[checks.FLAT][1], cells[3:6])
    assert torch.equal(ways[checks.FLAT_BY_TOKENS][1], cells[1::4])
    assert list(checks.rows_of_output(cells, 12, 3)) == [checks.BY_SAMPLES]
    assert list(checks.rows_of_output(cells, 4, 12)) == [checks.SHARED]
    assert not checks.rows_of_output(cells, 4, 5), "12 rows are not 4 samples of 5 tokens"
    assert list(checks.rows_of_output(cells.reshape(2, 2, 9), 2, 2)) == [checks.BY_SAMPLES, checks.BY_TOKENS]
