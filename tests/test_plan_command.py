"""What ``pardemo plan`` asks the planner for, and how it ends: no dry run is made here."""

import argparse
import json

import pytest
from conftest import says
from test_plan_reasons import plan, row

from pardemo.cli import main
from pardemo.finetune import recipe
from pardemo.planner import command
from pardemo.planner.fine_tune import plan_table
from pardemo.planner.layouts import explanations
from pardemo.planner.layouts.tuning import Tuning


@pytest.fixture
def asked(monkeypatch):
    """The requests that come out of the command line."""
    found = []
    monkeypatch.setattr(plan_table, "plan", lambda request: found.append(request) or plan(row()))
    return found


@pytest.fixture
def written(tmp_path):
    """A recipe in which nothing is as in the one that is planned unless told otherwise, nor as the planner has it."""
    changes = (
        "lora.r=16", "lora.lora_alpha=64", "lora.lora_dropout=0.0", "lora.target_modules=[o_proj]",
        "data.cutoff_len=768", "train.max_grad_norm=0.5", "train.per_device_train_batch_size=4",
        "train.gradient_accumulation_steps=2", "world.ranks=2", "model.loss_head=full",
    )  # fmt: skip
    path = tmp_path / "other.yaml"
    recipe.save(recipe.override(recipe.load("baichuan2-13b-lora-bf16"), changes), path)
    return str(path)


def test_the_recipe_is_what_is_planned(asked, written):
    assert main(["plan", "--json", "--recipe", written]) == 0
    (request,) = asked
    job = request.job
    assert job.tuning == Tuning(rank=16, target=("o_proj",), alpha=64, dropout=0.0)
    assert (job.sequence, job.clipping, job.config.loss_head) == (768, 0.5, "full")
    assert (request.machine.gpus, request.samples_per_step) == (2, 4 * 2 * 2)
    assert (request.steps, request.price) == (5 * 80_000 // 16, None)


def test_the_command_line_is_what_is_planned(asked, written):
    told = (
        "--gpu h100 --gpus 16 --hosts 2 --link 200 --price 1.5 --tp 2 --pp 4 --samples 320 --sequence 512 "
        "--labels 0.25 --batch 2 --zero 1 fsdp2 --checkpointing off --full"
    )
    assert main(["plan", "--json", "--recipe", written, *told.split()]) == 0
    (request,) = asked
    machine, job = request.machine, request.job
    assert (machine.gpu.name, machine.gpus, machine.hosts, request.price) == ("H100", 16, 2, 1.5)
    assert machine.between == 200e9 / 8
    assert (request.tp, request.pp, request.dp, request.steps) == (2, 4, 2, 5 * 320 // 16)
    assert (job.tuning.lora, job.sequence, job.labels) == (False, 512, 0.25)
    assert (request.engines, request.checkpointing, request.batches) == (("zero-1", "fsdp2"), (False,), (2,))


def test_where_nothing_fits_the_least_is_told_and_the_exit_is_2(asked, monkeypatch, capsys):
    monkeypatch.setattr(
        plan_table, "plan", lambda request: plan(row(gigabytes=95), row(gigabytes=91.5), row(gigabytes=120))
    )
    monkeypatch.setattr(plan_table, "smallest_cluster", lambda request: "ask for more")
    assert main(["plan"]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    room = 79.33 * 1.073741824 * 0.98  # GiB of an A800 in GB, less what nobody has filled
    assert told == (
        f"pardemo plan: 8 × A800-80GB hold it under no choice; the least is 91.5 GB of {room:.1f}; ask for more"
    )


JOB = ["--model", "llama3-8b", "--gpus", "8", "--gpu", "H100"]
#: What is refused, and what is told: options that a question would ignore, values that cannot be.
REFUSED = [
    (["--search", *JOB, "--tp", "2"], "--search has no use for --tp: --tp goes with a fine-tune's plan; one layout is"),
    (["--search", *JOB, "--zero", "2"], "--explain sharding=zero1"),
    (
        ["--search", *JOB, "--price", "2", "--backwards"],
        "--search has no use for --backwards: --backwards goes with",
    ),
    (["--search", *JOB, "--validate"], "--search and --validate are two questions; ask one of them"),
    (
        ["--explain", "tp=2", *JOB, "--all"],
        "--explain has no use for --all: --all goes with a fine-tune's plan or --sea",
    ),
    (["--against", "x.csv", "--model", "gpt2"], "--against has no use for --model"),
    (["--against", "x.csv", "--gpu", "H100"], "--against takes --gpu as a profile.json only, not 'H100'"),
    (["--program", "nanotron"], "--program goes with --search or --explain"),
    (["--gpu", "A80"], "no GPU 'A80'; did you mean 'A800-80GB"),
    (["--gpu", "RTX 3050"], "no GPU 'RTX 3050'; there are A800-80GB"),
    (["--model", "deepseek-v3"], "deepseek_v3: name LoRA's modules, as --target"),
    (["--model", "baichuan2-14b"], "no model 'baichuan2-14b'; did you mean 'baichuan2-1"),
    (["--batch", "0"], "--batch must be at least 1, not 0"),
    (["--link", "carrier-pigeon"], "no link 'carrier-pigeon'"),
    (["--gpus", "8", "--hosts", "3"], "8 GPUs do not divide over 3 hosts"),
    (["--tp", "3"], "do not divide by tp 3"),
    (["--price", "-1"], "--price must be 0 or more"),
    (["--recipe", "nothing"], "no recipe 'nothing'"),
    (["--base", "nf4", "--full"], "weights in nf4 cannot be trained themselves"),
    (["--target", "nowhere"], "LoRA's target 'nowhere' is no module of a layer that is known"),
    (["--base", "nf4", "--dry-run"], "--dry-run runs bf16 alone; there is no dry run of --base nf4"),
    (["--base", "nf4", "--write", "there"], "write it without --base, and start its train.py with --four-bit"),
    (
        ["--optimizer", "sgd", "--write", "there"],
        "are for AdamW, whole logits and adapters alone; leave out",
    ),
    (["--embeddings", "--write", "there"], "adapters alone; leave out --embeddings"),
    (["--embeddings", "--dry-run"], "there is no dry run of --embeddings"),
    (["--embeddings", "--full"], "--full trains embedding and head with all the rest; leave out --embeddings"),
    (["--rank", "8", "--full"], "--full trains all parameters, and --rank is LoRA's"),
]


@pytest.mark.parametrize(("arguments", "told"), REFUSED)
def test_what_cannot_be_planned_is_refused_in_one_line(arguments, told, capsys):
    assert main(["plan", *arguments]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("…")]
    assert len(error) == 1
    assert error[0].startswith("pardemo plan: ")
    assert told in error[0]


@pytest.mark.parametrize(
    ("gpus", "gpu", "said", "hosts"),
    [("8", "H100", [], 1), ("64", "H100", [], 8), ("12", "H100", [], 2), ("64", "H100", ["--hosts", "16"], 16),
     ("64", "GB200", [], 1), ("144", "GB200", [], 2)],
)  # fmt: skip
def test_gpus_are_on_hosts_of_at_most_eight_or_a_rack_and_the_answer_says_so(gpus, gpu, said, hosts, capsys):
    arguments = ["plan", "--model", "llama3-8b", "--gpus", gpus, "--gpu", gpu, *said, "--per-step", "5184"]
    assert main([*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["hosts"], answer["host_gpus"]) == (hosts, int(gpus) // hosts)
    assert main(arguments) == 0
    told = f" on {hosts} hosts of {int(gpus) // hosts}, "
    assert (told in capsys.readouterr().out) == (hosts > 1)
    if not said and hosts > 1:
        assert main(["plan", "--search", "--model", "llama3-8b", "--gpus", gpus, "--gpu", gpu, "--json"]) == 0
        searched = json.loads(capsys.readouterr().out)["assumed"]
        assert (searched["hosts"], searched["link_bytes_per_s"]) == (hosts, answer["link_bytes_per_s"])


def test_each_option_goes_with_a_question():
    """A new option that nobody put into the table would be taken by every question."""
    parser = argparse.ArgumentParser()
    command.add_plan(parser.add_subparsers(), dict)
    (plan,) = parser._subparsers._group_actions[0].choices.values()
    options = {action.dest for action in plan._actions} - {"help"}
    known = {name for takes in command.TAKES.values() for name in takes}
    asked = {question.removeprefix("--") for question in command.TAKES} - {command.PLAN}
    assert options == known | asked


def test_what_a_search_plans_and_assumes_is_said_at_the_top(capsys):
    job = ["--model", "llama3-8b", "--gpus", "16", "--gpu", "H100"]
    assert main(["plan", "--search", *job]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert says(first, "llama3-8b", "8.0B")
    assert second == (
        "16 × H100 on 2 hosts of 8, 100 Gbit/s between hosts (ethernet-100g, the default of --link); 16 samples of "
        "4,096 tokens a step, bf16 (defaults: --hosts, --per-step, --sequence)"
    )
    said = ["--hosts", "4", "--link", "400", "--per-step", "32", "--sequence", "2048"]
    assert main(["plan", "--search", *job, *said]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "16 × H100 on 4 hosts of 4, 400 Gbit/s between hosts (--link 400); 32 samples of 2,048 tokens a step, bf16"
    )
    assert main(["plan", "--search", *job, *said, "--json"]) == 0
    assumed = json.loads(capsys.readouterr().out)["assumed"]
    assert (assumed["training"], assumed["hosts"], assumed["link_bytes_per_s"]) == ("full", 4, 50e9)


def test_layouts_that_none_beats_in_time_and_memory_are_listed(capsys):
    job = ["--search", "--model", "llama3-8b", "--gpus", "16", "--gpu", "H100"]
    assert main(["plan", *job, "--json"]) == 0
    front = json.loads(capsys.readouterr().out)["front"]
    seconds, peaks = ([one[name] for one in front] for name in ("seconds", "peak_bytes"))
    assert (seconds, peaks) == (sorted(seconds), sorted(peaks, reverse=True))
    assert len(front) > 5
    for more, shown in (([], 5), (["--all"], len(front))):
        assert main(["plan", *job, *more]) == 0
        told = capsys.readouterr().out.splitlines()
        start = next(i for i, line in enumerate(told) if line.startswith(f"{len(front)} layouts are such that none"))
        assert len(told) - start - 2 == shown


def test_explain_says_whether_it_fits(capsys):
    job = ["--model", "llama3-70b", "--gpus", "64", "--gpu", "H100"]
    assert main(["plan", "--explain", "tp=2", *job]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "694 GB of 84.9: does not fit (8 % stay free, so there is room for 78.1)"
    )
    for layout, fits in (("tp=2", False), ("tp=8,pp=8", True)):
        assert main(["plan", "--explain", layout, *job, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["fits"] is fits
        assert (told["peak_bytes"] <= told["room_bytes"]) is fits


def test_slow_adapters_are_told_with_three_digits(capsys):
    job = ["--model", "llama3-8b", "--gpus", "16", "--gpu", "H100", "--link", "1"]
    assert main(["plan", "--explain", "tp=1", *job]) == 0
    assert says(capsys.readouterr().out, "360", "GB/s", "0.100", "GB/s", "adapters")
    assert [explanations.three_digits(value) for value in (1234.5, 99.94, 2.0, 0.012345, 0)] == (
        ["1,234", "99.9", "2.00", "0.0123", "0"]
    )


def test_an_explained_layout_is_written_and_the_jobs_say_what_they_start(tmp_path, capsys):
    layout = "accumulation=2,sharding=zero3,recompute=full"
    assert main(["plan", "--explain", layout, *JOB, "--write", str(tmp_path / "run")]) == 0
    assert says(capsys.readouterr().out.splitlines()[-1], "slurm.sbatch", "kubernetes.yaml", "megatron.sh")
    job = (tmp_path / "run" / "slurm.sbatch").read_text()
    assert says(job, "llama3-8b", "DP8", "zero3", "1×2", "megatron.sh")
    assert says(job, "torchtitan.toml", "accelerate.yaml")


def test_positions_that_megatron_has_no_argument_for_are_warned_of(capsys):
    job = ["--gpus", "16", "--sequence", "16384"]
    assert main(["plan", "--search", "--model", "baichuan2-13b", *job, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"][0]["layout"]["cp"] > 1
    told, without = found["warning"].split("the best without is ")
    assert says(told, "ALiBi", "megatron.sh", "(CP)")
    assert "CP" not in without
    assert float(without.split(", ")[1].removesuffix(" s")) > found["best"][0]["seconds"]
    assert main(["plan", "--search", "--model", "baichuan2-13b", *job]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == found["warning"]
    assert main(["plan", "--search", "--model", "baichuan2-7b", *job]) == 0
    assert "warning" not in capsys.readouterr().out


def test_an_own_run_that_hardly_computed_is_shown_and_marked(tmp_path, capsys):
    path = tmp_path / "own.csv"
    path.write_text("model,gpu,gpus,sequence,micro_batch,accumulation,seconds\nllama3-8b,H100,8,4096,1,1,60\n")
    assert main(["plan", "--against", str(path)]) == 0
    (shown,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert shown.split()[:6] == ["left", "out:", "below", "5%", "MFU", "1"]
    assert main(["plan", "--against", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["summary"]["time below 5% MFU"]["mean"] == pytest.approx(abs(told["runs"][0]["error"]))
