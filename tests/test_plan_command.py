"""What ``pardemo plan`` asks the planner for, and how it ends: no dry run is made here."""

import pytest
from test_plan_reasons import plan, row

from pardemo.cli import main
from pardemo.finetune.recipes import recipe
from pardemo.planner import backwards, table
from pardemo.planner.job import Adapter


@pytest.fixture
def asked(monkeypatch):
    """The requests that come out of the command line."""
    found = []
    monkeypatch.setattr(table, "plan", lambda request, *how: found.append(request) or plan(row()))
    return found


@pytest.fixture
def written(tmp_path):
    """A recipe in which nothing is as in the one that is planned unless told otherwise, nor as the planner has it."""
    changes = (
        "lora.rank=16", "lora.alpha=64", "lora.dropout=0.0", "lora.target=[o_proj]", "data.cutoff_len=768",
        "train.max_grad_norm=0.5", "train.per_device_batch=4", "train.accumulation=2", "world.ranks=2",
        "train.loss_head=full",
    )  # fmt: skip
    path = tmp_path / "other.yaml"
    recipe.save(recipe.override(recipe.load("baichuan2-13b-lora-bf16"), changes), path)
    return str(path)


def test_the_recipe_is_what_is_planned(asked, written):
    assert main(["plan", "--json", "--recipe", written]) == 0
    (request,) = asked
    job = request.job
    assert job.adapter == Adapter(rank=16, target=("o_proj",), alpha=64, dropout=0.0)
    assert (job.sequence, job.clipping, job.config.loss_head) == (768, 0.5, "full")
    assert (request.cluster.gpus, request.samples_per_step) == (2, 4 * 2 * 2)
    assert (request.steps, request.cluster.price) == (5 * 80_000 // 16, None)


def test_the_command_line_is_what_is_planned(asked, written):
    told = (
        "--gpu h100 --gpus 16 --hosts 2 --link 200 --price 1.5 --tp 2 --pp 4 --samples 320 --sequence 512 "
        "--labels 0.25 --batch 2 --zero 1 fsdp2 --checkpointing off --full"
    )
    assert main(["plan", "--json", "--recipe", written, *told.split()]) == 0
    (request,) = asked
    cluster, job = request.cluster, request.job
    assert (cluster.gpu.name, cluster.gpus, cluster.hosts, cluster.price) == ("H100", 16, 2, 1.5)
    assert cluster.between == 200e9 / 8
    assert (request.tp, request.pp, request.dp, request.steps) == (2, 4, 2, 5 * 320 // 16)
    assert (job.adapter, job.sequence, job.labels) == (None, 512, 0.25)
    assert (request.engines, request.checkpointing, request.batches) == (("zero-1", "fsdp2"), (False,), (2,))


def test_where_nothing_fits_the_least_is_told_and_the_exit_is_2(asked, monkeypatch, capsys):
    monkeypatch.setattr(table, "plan", lambda *how: plan(row(gigabytes=95), row(gigabytes=91.5), row(gigabytes=120)))
    monkeypatch.setattr(backwards, "smallest_cluster", lambda request: "ask for more")
    assert main(["plan"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    room = 79.33 * 1.073741824 * 0.98  # GiB of an A800 in GB, less what stays free
    assert told == (
        f"pardemo plan: 8 × A800-80GB hold it under no choice; the least is 91.5 GB of {room:.1f}; ask for more"
    )
