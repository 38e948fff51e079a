"""Training by a recipe: what runs is what was asked for, a run goes on exactly, and nothing broken is read."""

import dataclasses
import errno
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import psutil
import pytest
import torch
from conftest import says, tiny_folder
from safetensors.torch import load_file
from torch.nn import functional as F

from pardemo import RankFailed, World, cli, headlines, project, signed_folders
from pardemo.finetune import checkpoints, recipe
from pardemo.finetune.launch import PRELOAD, launch
from pardemo.finetune.logs import TokenCount, read_log, smoothed
from pardemo.finetune.samples import Order
from pardemo.peers import launchers

STEPS = 6


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A recipe that trains in seconds: a small random model, 96 generated headlines."""
    folder = tmp_path_factory.mktemp("job")
    train, test = headlines.corpus(train=96, test=8)
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
    tiny_folder(folder / "model", [row["input"] + row["output"] for row in train])
    changes = [
        f"model.path={folder / 'model'}", f"data.train={folder / 'train.json'}", f"data.test={folder / 'test.json'}",
        f"train.max_steps={STEPS}", "train.save_steps=3", "train.logging_steps=1",
        "train.per_device_train_batch_size=4", "train.warmup_steps=0",
    ]  # fmt: skip
    return recipe.override(recipe.load("tiny-cpu"), changes)


@pytest.fixture(scope="module")
def ranks():
    worlds = {}

    def get(n):
        if n not in worlds:
            worlds[n] = World(n, preload=PRELOAD, timeout_s=120)
        return worlds[n]

    yield get
    for world in worlds.values():
        world.close()


def trained(values, resume=False, overwrite=False, allow=()):
    from pardemo.finetune.train import train

    return dataclasses.asdict(train(recipe.from_dict(values), resume, overwrite, allow=allow))


def changed(job, folder, *changes):
    return recipe.override(job, [f"output_dir={folder}", *changes])


def saved(job, folder, *changes):
    """A file of the recipe, its output in ``folder/run``."""
    recipe.save(changed(job, folder / "run", *changes), folder / "job.yaml")
    return str(folder / "job.yaml")


def run(ranks, job, folder, *changes, n=2, resume=False, overwrite=False, allow=()):
    values = recipe.to_dict(changed(job, folder, f"world.ranks={n}", *changes))
    return ranks(n).run(trained, values, resume, overwrite, allow)[0]


def adapter(folder):
    return load_file(Path(folder) / "adapter" / "adapter_model.safetensors")


def apart(folder, other):
    values, others = adapter(folder), adapter(other)
    assert values.keys() == others.keys()
    return max((values[name] - others[name]).abs().max().item() for name in values)


def losses(folder):
    return [row["loss"] for row in read_log(Path(folder)) if "loss" in row]


# --- what runs


def by_hand(job, folder):
    """The same steps in one plain loop: no Trainer, no DeepSpeed, the whole batch at once."""
    from pardemo.finetune import models
    from pardemo.finetune.samples import Collator, Samples

    model, tokenizer = models.base(job)
    model = models.with_new_adapter(model, job).train()
    data = Samples.read(job.data.train, tokenizer, job.data.cutoff_len)
    order = list(Order(len(data), 8, job.train.seed, data.lengths))
    collate = Collator(tokenizer.pad_token_id)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, job.train.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    losses = []
    for step in range(STEPS):
        batch = collate([data[i] for i in order[8 * step : 8 * step + 8]])
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, job.train.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("changes", "engine", "stage"),
    [
        ((), "DeepSpeedEngine", 2),
        (("deepspeed.zero_optimization.stage=1",), "DeepSpeedEngine", 1),
        (("deepspeed.zero_optimization.stage=3",), "DeepSpeedEngine", 3),
        (("deepspeed=null",), "DistributedDataParallel", None),
        (("train.activation_checkpointing=true",), "DeepSpeedEngine", 2),
        (("model.loss_head=full",), "DeepSpeedEngine", 2),
        (("train.per_device_train_batch_size=2", "train.gradient_accumulation_steps=2"), "DeepSpeedEngine", 2),
    ],
)
def test_every_engine_equals_the_plain_loop(ranks, job, tmp_path, changes, engine, stage):
    done = run(ranks, job, tmp_path / "run", "train.save_steps=null", *changes)
    assert (done["engine"], done["zero_stage"], done["ranks"], done["steps"]) == (engine, stage, 2, STEPS)
    assert losses(tmp_path / "run") == pytest.approx(by_hand(job, tmp_path), rel=1e-5)
    assert sum(p.abs().sum() for name, p in adapter(tmp_path / "run").items() if "lora_B" in name) > 0


def test_bf16_and_packing_train(ranks, job, tmp_path):
    def packed(name, *changes):
        options = ("data.packing=true", "data.group_by_length=false", "train.learning_rate=1e-2", *changes)
        assert run(ranks, job, tmp_path / name, *options)["steps"] == STEPS
        return losses(tmp_path / name)

    bf16, fp32 = packed("bf16", "train.bf16=true"), packed("fp32", "train.bf16=false")
    assert bf16 == pytest.approx(fp32, rel=1e-2)
    assert bf16 != fp32
    # each step has other samples, so a loss is compared with the same step's of a model that does not learn
    assert fp32[-1] < packed("still", "train.bf16=false", "train.learning_rate=1e-30")[-1] - 0.05


def test_what_a_run_leaves(ranks, job, tmp_path):
    folder = tmp_path / "run"
    done = run(ranks, job, folder, "train.save_total_limit=1")
    names = {path.name for path in folder.iterdir()}
    assert names == {"adapter", f"checkpoint-{STEPS}", "loss.png", "recipe.yaml", "tensorboard", "train_log.jsonl"}
    assert {p.name for p in (folder / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert recipe.load(folder / "recipe.yaml").train.max_steps == STEPS
    rows = read_log(folder)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["learning_rate"] for row in rows] == cosine(STEPS, 1)
    assert done["tokens"] > 0
    assert any((folder / "tensorboard").iterdir())


def cosine(steps, begin):
    """The learning rates behind each step from ``begin`` on."""
    rates = [3e-3 * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(begin, steps + 1)]
    return pytest.approx(rates, abs=1e-9)


# --- resume

DROPOUT = "lora.lora_dropout=0.1"


@pytest.fixture(scope="module")
def whole(ranks, job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    run(ranks, job, folder, DROPOUT, "train.save_total_limit=null")
    return folder


@pytest.fixture
def copied(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def interrupted(whole, folder):
    shutil.copytree(whole, folder)
    for name in (f"checkpoint-{STEPS}", "adapter"):
        shutil.rmtree(folder / name)
    return folder


def test_a_resumed_run_ends_where_the_whole_one_did(ranks, job, whole, tmp_path):
    folder = interrupted(whole, tmp_path / "run")
    begun = folder / f"checkpoint-{STEPS}"  # and not finished, by the run that was killed
    begun.mkdir()
    (begun / "left.pt").write_bytes(b"of the run before")
    done = run(ranks, job, folder, DROPOUT, resume=True)
    assert done["resumed_from"] == "checkpoint-3"
    assert not (begun / "left.pt").exists(), "a signature would vouch for it"
    assert signed_folders.fault(begun) is None
    assert losses(folder) == pytest.approx(losses(whole), abs=1e-6)
    assert apart(folder, whole) < 1e-7


@pytest.mark.nightly
def test_a_resume_on_another_number_of_ranks(ranks, job, tmp_path):
    run(ranks, job, tmp_path / "two")
    folder = interrupted(tmp_path / "two", tmp_path / "one")
    done = run(ranks, job, folder, "train.gradient_accumulation_steps=2", n=1, resume=True)
    assert done["ranks"] == 1
    assert any("through DeepSpeed's universal checkpoint" in line for line in done["notes"])
    assert losses(folder) == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    assert apart(folder, tmp_path / "two") < 1e-6


def test_an_earlier_run_is_neither_lost_nor_mistaken_for_the_new_one(ranks, job, whole, copied):
    with pytest.raises(RankFailed, match=f"holds an earlier run .checkpoint-{STEPS}.: --resume goes on with it"):
        run(ranks, job, copied)
    with pytest.raises(RankFailed, match="give one of them"):
        run(ranks, job, copied, resume=True, overwrite=True)
    assert apart(copied, whole) == 0
    done = run(ranks, job, copied, "train.max_steps=2", "train.save_steps=1", overwrite=True)
    assert done["resumed_from"] is None
    assert [path.name for path in checkpoints.folders(copied)] == ["checkpoint-2", "checkpoint-1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.per_device_train_batch_size=2"], "written with samples a step 8, this run has 4"),
        (["train.seed=7"], "written with train.seed 42, this run has 7"),
        (["train.learning_rate=1e-3"], "written with train.learning_rate 0.003, this run has 0.001$"),
        (["lora.lora_alpha=64"], "lora_alpha 32.0, this run has 64.0: --allow lora.lora_alpha goes on with it"),
        (["lora.r=4", "lora.lora_alpha=8"], "lora.r 8, this run has 4; lora.lora_alpha 32.0, this run has 8.0$"),
        (["train.max_steps=8"], "written with train.max_steps 6, this run has 8: --allow train.max_steps goes"),
        (["deepspeed.zero_optimization.stage=1"], "written with DeepSpeed's stage 2, this run has 1$"),
        (["model.path={other}"], "written with the base model .*, this run has"),
    ],
)
def test_a_checkpoint_of_another_run_is_not_gone_on_from(job, copied, tmp_path, changes, message):
    other = tmp_path / "other"
    if "{other}" in changes[0]:
        shutil.copytree(job.model.path, other)
        weights = (other / "model.safetensors").read_bytes()
        (other / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    different = changed(job, copied, DROPOUT, *(change.format(other=other) for change in changes))
    with pytest.raises(ValueError, match=message):  # by every rank, and before any rank starts
        checkpoints.choose_checkpoint(copied, different, True, False)
    with pytest.raises(ValueError, match=message):
        launch(different, resume=True)


def test_a_change_that_is_named_is_gone_on_with(ranks, job, whole, tmp_path):
    folder = interrupted(whole, tmp_path / "run")
    changes = [DROPOUT, "lora.lora_alpha=64", f"train.max_steps={STEPS + 2}"]
    with pytest.raises(RankFailed, match=r"train.max_steps.*6.*8.*--allow"):
        run(ranks, job, folder, *changes, resume=True, allow=["lora.lora_alpha"])
    done = run(ranks, job, folder, *changes, resume=True, allow=["lora.lora_alpha", "train.max_steps"])
    assert (done["steps"], done["resumed_from"]) == (STEPS + 2, "checkpoint-3")
    assert [line for line in done["notes"] if "as allowed" in line] == [
        "checkpoint-3 was written with lora.lora_alpha 32.0, this run has 64.0, as allowed",
        "checkpoint-3 was written with train.max_steps 6, this run has 8, as allowed",
    ]
    rates = [row["learning_rate"] for row in read_log(folder) if row["step"] > 3]
    assert rates == cosine(STEPS + 2, 4), "the schedule ends where the run does"
    assert json.loads((folder / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 64
    with pytest.raises(ValueError, match=r"--allow.*train.learning_rate.*lora.lora_alpha"):
        checkpoints.choose_checkpoint(folder, job, True, False, ["train.learning_rate"])
    with pytest.raises(ValueError, match="it goes with --resume"):
        checkpoints.choose_checkpoint(folder, job, False, True, ["lora.lora_alpha"])


def test_a_run_with_the_keys_of_before_is_gone_on_with(job, copied):
    checkpoint = copied / f"checkpoint-{STEPS}"
    about, before = signed_folders.about(checkpoint), {new: old for old, new in recipe.RENAMED.items()}
    values = {before.get(name, name): value for name, value in about["run"].items()} | {"train.precision": "fp32"}
    del values["train.bf16"], values["train.fp16"]
    signed_folders.sign(checkpoint, **{**about, "run": values})
    assert checkpoints.choose_checkpoint(copied, changed(job, copied, DROPOUT), True, False)[0] == checkpoint
    other = changed(job, copied, DROPOUT, "train.bf16=true", "train.lr_scheduler_type=linear")
    with pytest.raises(ValueError, match=r"train.lr_scheduler_type cosine.*train.bf16 False, this run has True"):
        checkpoints.choose_checkpoint(copied, other, True, False)


def test_patience_is_resumed_too(ranks, job, tmp_path):
    changes = [
        "data.valid=" + job.data.test, "train.eval_steps=1", "train.early_stopping_patience=3",
        "train.learning_rate=10.0", "train.max_steps=40", "train.save_steps=1", "train.save_total_limit=null",
    ]  # fmt: skip
    steps = run(ranks, job, tmp_path / "run", *changes)["steps"]
    assert 4 <= steps < 40
    assert any("eval_loss" in row for row in read_log(tmp_path / "run"))
    for folder in (f"checkpoint-{steps}", f"checkpoint-{steps - 1}", "adapter"):
        shutil.rmtree(tmp_path / "run" / folder, ignore_errors=True)
    assert run(ranks, job, tmp_path / "run", *changes, resume=True)["steps"] == steps


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"x"), "adapter_model.safetensors is not what was"),
        (lambda f: (f / "trainer_state.json").unlink(), "trainer_state.json is missing"),
        (lambda f: (f / signed_folders.SIGNATURE).unlink(), "it was never finished"),
        (lambda f: (f / signed_folders.SIGNATURE).write_text("{"), "its signature cannot be read"),
        (lambda f: (f / "added.pt").write_bytes(b"x"), "added.pt is not what was written"),
    ],
)
def test_a_corrupt_newest_checkpoint_is_passed_over(copied, spoil, reason):
    spoil(copied / f"checkpoint-{STEPS}")
    checkpoint, (note,) = checkpoints.newest(copied)
    assert checkpoint.name == "checkpoint-3"
    assert note.startswith(f"checkpoint-{STEPS} is passed over: ")
    assert reason in note


def everything(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("why", ["another key", "corrupt", "adapter alone"])
def test_what_cannot_be_gone_on_from_is_refused_and_left_as_it_is(job, copied, tmp_path, monkeypatch, capfd, why):
    if why == "another key":
        monkeypatch.setenv("PARDEMO_KEY", str(tmp_path / "another key"))
    for checkpoint in checkpoints.folders(copied) if why != "another key" else ():
        if why == "corrupt":
            (checkpoint / "adapter_model.safetensors").write_bytes(b"x")
        else:
            shutil.rmtree(checkpoint)
    before = everything(copied)
    assert cli.main(["finetune", saved(job, tmp_path, DROPOUT), "--resume"]) == 2
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert everything(copied) == before
    assert "--overwrite removes " in message
    names = ("an adapter and no checkpoint",) if why == "adapter alone" else (f"checkpoint-{STEPS} ", "checkpoint-3 ")
    assert all(name in message for name in names)


def test_what_to_keep(tmp_path):
    def left():
        return [path.name for path in checkpoints.folders(tmp_path)]

    for number in (2, 4, 6, 8):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if number != 4:  # never finished
            signed_folders.sign(tmp_path / f"checkpoint-{number}", step=number)
    checkpoints.remove_oldest(tmp_path, None)
    assert left() == ["checkpoint-8", "checkpoint-6", "checkpoint-2"]
    (tmp_path / "checkpoint-8" / "of somebody else").touch()
    checkpoints.remove_oldest(tmp_path, 1)
    assert left() == ["checkpoint-8", "checkpoint-6"], "what cannot be read is neither counted nor removed"


# --- faults

NO_ROOM = "no room: it takes about 1.5 GB, 3.0 MB are left for it on its disk"


def trained_until_the_disk_is_full(values):
    import resource

    from transformers import TrainerCallback

    from pardemo.finetune.train import train

    class FillsUp(TrainerCallback):
        def on_save(self, *_, **__):  # no file may grow beyond this from the first checkpoint on
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    train(recipe.from_dict(values), callbacks=[FillsUp()])


def test_a_full_disk_at_a_checkpoint_is_said(job, tmp_path):
    folder = tmp_path / "run"
    with World(2, preload=PRELOAD, timeout_s=120) as world, pytest.raises(RankFailed) as raised:
        world.run(trained_until_the_disk_is_full, recipe.to_dict(changed(job, folder)))
    line = str(raised.value).splitlines()[0]
    nbytes = checkpoints.folder_bytes(folder / "checkpoint-3") / 1e3
    assert says(line, f"checkpoint-{STEPS} could not be written", f"takes about {nbytes:.1f} kB",
                "a file may have 10.0 kB", "(ulimit -f)", "the last whole checkpoint is checkpoint-3")  # fmt: skip
    assert "enforce fail" not in line
    checkpoint, notes = checkpoints.newest(folder)
    assert checkpoint.name == "checkpoint-3"
    assert notes == [f"checkpoint-{STEPS} is passed over: it was never finished"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534\nframe"), NO_ROOM),
        (OSError(errno.ENOSPC, "No space left on device"), NO_ROOM),
        (RuntimeError("SafetensorError: Error while serializing: I/O error: (os error 28)"), NO_ROOM),
        (ValueError("another reason\nlong"), "another reason"),
        (ValueError(), "ValueError"),
    ],
)
def test_what_is_said_of_a_full_disk(tmp_path, monkeypatch, error, reason):
    part = tmp_path / "checkpoint-6"
    part.mkdir()
    (part / "begun").write_bytes(bytes(2000))
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=3e6))
    assert checkpoints.why_not_written(error, part, 1_500_000_000) == reason


def test_two_runs_do_not_write_to_one_folder(ranks, job, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    refused = rf"another run \(process {os.getpid()}\) writes to {folder}: wait for it, or give another output_dir$"
    with project.only_writer(folder, "go"):
        with pytest.raises(RankFailed) as raised:
            run(ranks, job, folder)
        assert re.match(f"ranks 0, 1: ValueError: {refused}", str(raised.value).splitlines()[0])
        with pytest.raises(ValueError, match=refused):  # before any rank starts
            launch(changed(job, folder))
        assert [path.name for path in folder.iterdir()] == [project.LOCK]
    with pytest.raises(RankFailed, match="no model folder"):
        run(ranks, job, tmp_path / "refused", "model.path=nowhere")
    assert not (tmp_path / "refused").exists(), "nothing is left of a run that cannot begin"


def ranks_of(pid):
    return [p for p in psutil.Process(pid).children(recursive=True) if p.is_running()]


@pytest.mark.nightly  # of a World the gate has it in test_world_ends.py
@pytest.mark.parametrize("whom", ["one rank", "all"])
def test_killed_in_the_middle_it_leaves_no_orphan_and_goes_on(ranks, job, tmp_path, whom):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "pardemo", "finetune", saved(job, tmp_path, "train.max_steps=400")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    drain = threading.Thread(target=process.stdout.read, daemon=True)
    drain.start()
    deadline = time.monotonic() + 240
    while not list(folder.glob(f"checkpoint-*/{signed_folders.SIGNATURE}")):  # early ones go when later ones come
        assert time.monotonic() < deadline, "no checkpoint came"
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)
    children = ranks_of(process.pid)
    if whom == "all":
        process.kill()
    else:
        rank = next(p for p in children if p.ppid() != process.pid)  # a child of the process that ranks start from
        rank.send_signal(signal.SIGKILL)
    process.wait(120)
    message = process.stderr.read()
    assert process.returncode != 0
    if whom == "one rank":
        assert "Traceback" not in message
        assert "SIGKILL" in message
    gone, alive = psutil.wait_procs(children, timeout=120)
    assert not alive, "nothing is left running"
    before = checkpoints.newest(folder)[0]
    longer = f"train.max_steps={int(before.name[11:]) + 2}"
    done = run(ranks, job, folder, longer, resume=True, allow=["train.max_steps"])
    assert done["resumed_from"] == before.name


def head(command, lines, folder):
    """Reads so many lines of a command's output, stdout and stderr in one pipe, closes it, and waits for the end."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    for _ in range(lines):
        process.stdout.readline()
    process.stdout.close()
    return process.wait(120)


@pytest.mark.nightly
def test_a_closed_pipe_does_not_end_the_training(job, tmp_path):
    file = saved(job, tmp_path, "train.save_steps=null", "train.max_steps=12")
    assert head([sys.executable, "-m", "pardemo", "finetune", file, "--ranks", "1"], 3, project.root()) == 0
    assert len(losses(tmp_path / "run")) == 12
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_recipe_for_gpus_does_not_start_on_the_cpu_unasked(job, tmp_path, capfd):
    for name in ("baichuan2-13b-lora-bf16", "baichuan2-7b-lora"):
        assert recipe.load(name).world.device == "gpu"
    file = saved(job, tmp_path, "world.device=gpu", "train.max_steps=1", "train.save_steps=null")
    assert cli.main(["finetune", file, "--ranks", "8"]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "the recipe is for 8 GPUs" in line
    with pytest.raises(ValueError, match=r"2.*GPUs.*CPU.*--on-cpu"):
        launch(recipe.load(file))
    assert not (tmp_path / "run").exists()
    assert cli.main(["finetune", file, "--ranks", "1", "--on-cpu"]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.fp16=true"], "which DeepSpeed refuses on a CPU"),
        (["model.path=nowhere"], "is no model folder: it has no config.json"),
        (["data.train=nowhere.json"], "there is no file"),
        (["data.train={bad}"], "line 2: missing field output"),
        (["lora.target_modules=[q_proj]"], "no module is called 'q_proj'; there are W_pack"),
        (["train.learning_rte=1"], "did you mean"),
    ],
)
def test_bad_input_is_one_line(job, tmp_path, changes, message, capfd):
    (tmp_path / "bad.json").write_text('[\n{"instruction": "a", "input": "b", "source": "c"}\n]')
    options = [option for change in changes for option in ("--set", change.format(bad=tmp_path / "bad.json"))]
    assert cli.main(["finetune", saved(job, tmp_path), *options]) != 0
    printed = capfd.readouterr().err
    assert message in printed.strip().splitlines()[-1]
    assert "Traceback" not in printed


@pytest.mark.nightly
def test_every_launcher_starts_the_same_run(ranks, job, tmp_path):
    """As the World does; torchrun, two hosts of it, is in the next test."""
    short = ("train.save_steps=null", "train.max_steps=2")
    ours, file = run(ranks, job, tmp_path / "world", *short), saved(job, tmp_path, *short)
    (tmp_path / "accelerate.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}\n"
        "num_processes: 2\nnum_machines: 1\nmachine_rank: 0\nmixed_precision: 'no'\nuse_cpu: false\n"
    )
    bin = Path(sys.executable).parent
    module = ["-m", "pardemo.finetune", file, "--json", "--set"]
    ways = {
        "deepspeed": [bin / "deepspeed", "--num_gpus", "2", "--master_port", "29713", "--module", *module[1:]],
        "accelerate": [bin / "accelerate", "launch", "--config_file", tmp_path / "accelerate.yaml",
                       "--main_process_port", "29714", *module],
    }  # fmt: skip
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PATH": f"{bin}:{os.environ['PATH']}"}
    for name, command in ways.items():
        folder = tmp_path / name
        done = subprocess.run([*map(str, command), f"output_dir={folder}"], env=environment, capture_output=True,
                              text=True, timeout=300, check=False)  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        assert '"engine": "DeepSpeedEngine"' in done.stdout
        assert '"ranks": 2' in done.stdout
        assert losses(folder) == pytest.approx(losses(ours["run"]), rel=1e-6)


@pytest.mark.nightly
def test_two_hosts_go_on_as_one_does(ranks, job, whole, tmp_path):
    """Two torchrun agents, a host each, on loopback: from a World's checkpoint, and a World goes on from theirs."""
    folder = interrupted(whole, tmp_path / "run")
    file = saved(job, tmp_path, DROPOUT, "train.save_total_limit=null")
    printed = launchers.run_agents(["-m", "pardemo.finetune", file, "--resume"], timeout_s=300)
    assert "going on from checkpoint-3" in printed[0]
    assert "going on" not in printed[1], "rank 0 alone tells"
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-6)
    assert apart(folder, whole) < 1e-7
    longer = [DROPOUT, f"train.max_steps={STEPS + 1}"]
    done = run(ranks, job, folder, *longer, resume=True, allow=["train.max_steps"])
    assert (done["resumed_from"], done["steps"]) == (f"checkpoint-{STEPS}", STEPS + 1)


# --- parts


def test_tokens_are_counted_once_however_often_one_asks(ranks):
    def counted():
        count = TokenCount(0)
        count.add(torch.tensor([[5, 6, 0], [7, 0, 0]]))
        return count.total(), count.total()

    assert ranks(2).run(counted) == [(6, 6)] * 2


def test_the_smoothed_loss_is_the_tools():
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * 3)) - 0.5)
    second = 4.0 * weight + 3.0 * (1 - weight)
    assert smoothed([4.0, 3.0, 2.0]) == pytest.approx([4.0, second, second * weight + 2.0 * (1 - weight)])
    assert smoothed([]) == []


def test_json_is_json_alone(job, tmp_path, capfd):
    file = saved(job, tmp_path, "train.max_steps=1", "train.save_steps=null", "world.ranks=1")
    assert cli.main(["finetune", file, "--json", "--resume"]) == 0
    outcome = json.loads(capfd.readouterr().out)
    assert (outcome["steps"], outcome["ranks"], outcome["resumed_from"]) == (1, 1, None)
    assert "from the beginning" in outcome["notes"][-1]
    assert recipe.load(tmp_path / "run" / "recipe.yaml").world.ranks == 1, "it starts the run again"


def test_recipes_are_listed_and_shown_with_their_reasons(capsys):
    assert cli.main(["finetune", "--list"]) == 0
    assert "baichuan2-13b-lora-a800x8" in capsys.readouterr().out
    assert cli.main(["finetune", "--list", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)} == set(recipe.names())
    assert cli.main(["finetune", "baichuan2-13b-lora-a800x8", "--show"]) == 0
    assert "# inferred" in capsys.readouterr().out
    assert cli.main(["finetune"]) == 2
    assert "name a recipe: " in capsys.readouterr().err
