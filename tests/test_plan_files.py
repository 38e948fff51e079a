"""What ``pardemo plan --write`` writes: the job that was planned, as recipes, DeepSpeed and Accelerate read it."""

import json

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from deepspeed.launcher import runner
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from test_layouts_launch import started
from test_plan_reasons import row
from torch.distributed.run import get_args_parser

from pardemo import project
from pardemo.cli import main
from pardemo.finetune import recipe
from pardemo.peers.deepspeed import deepspeed_settings
from pardemo.planner import hardware
from pardemo.planner.dry_run import measured_peak
from pardemo.planner.fine_tune import files, plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuning import Tuning

BASE = recipe.load("baichuan2-13b-lora-bf16")


def request(gpu="A800-80GB", gpus=4, hosts=1, job=None, **changes):
    """A small Baichuan2 with LoRA, of which nothing is the recipe's own."""
    tuning = Tuning(rank=4, target=("o_proj",), alpha=16, dropout=0.0)
    job = {"batch": 4, "sequence": 128, "tuning": tuning} | (job or {})
    machine = Machine(hardware.gpu(gpu), gpus, gpus // hosts)
    settings = {"samples_per_step": 128, "steps": 10, **changes}
    return plan_table.Request(RankJob(measured_peak.example_config("baichuan2"), **job), machine, **settings)


def test_the_recipe_is_the_planned_job():
    written = files.as_recipe(request(), row("zero-1", batch=4, checkpointing=False), BASE)
    assert written.lora == recipe.Lora(r=4, lora_alpha=16, lora_dropout=0.0, target_modules=["o_proj"])
    assert written.data.cutoff_len == 128
    train = written.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps, written.world.ranks) == (4, 8, 4)
    assert (train.precision, train.activation_checkpointing) == ("bf16", False)
    assert written.deepspeed["zero_optimization"]["stage"] == 1
    assert (train.learning_rate, train.num_train_epochs) == (BASE.train.learning_rate, BASE.train.num_train_epochs)


@pytest.mark.parametrize("engine", ["zero-1", "zero-2", "zero-3"])
@pytest.mark.parametrize("offload", ["none", "optimizer", "optimizer+parameters"])
def test_deepspeed_reads_the_offload_that_was_planned(engine, offload):
    for settings in (
        files.deepspeed_configuration(request(), row(engine, offload), BASE),
        files.as_recipe(request(), row(engine, offload), BASE).deepspeed,
    ):
        read = DeepSpeedZeroConfig(**settings["zero_optimization"])
        states, parameters = read.offload_optimizer, read.offload_param
        assert (states.device if states else "none") == ("none" if offload == "none" else "cpu")
        assert (parameters.device if parameters else "none") == ("cpu" if "parameters" in offload else "none")
        # DeepSpeed refuses to offload the states of an optimizer that is not its own
        assert ("optimizer" in settings) == (offload != "none")


@pytest.mark.parametrize("told", [{}, {"overlap_comm": True}, {"use_multi_rank_bucket_allreduce": False}])
def test_the_written_configuration_does_what_was_planned(told):
    asked = request(job={"zero": told})
    for stage in (0, 1, 2, 3):
        planned = row(f"zero-{stage}", overlaps=told.get("overlap_comm"))
        settings = files.deepspeed_configuration(asked, planned, BASE)["zero_optimization"]
        assert settings["overlap_comm"] == (stage == 3 if "overlap_comm" not in told else stage > 0)
        assert settings["use_multi_rank_bucket_allreduce"] == told.get("use_multi_rank_bucket_allreduce", True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("told", [{}, {"reduce_bucket_size": 123_456_789, "stage3_prefetch_bucket_size": 0}])
def test_what_the_plan_left_to_deepspeed_is_left_to_it_in_the_file(stage, told):
    """The dry run has the job's keys and DeepSpeed's defaults for the rest: so must the written file."""
    planned = DeepSpeedZeroConfig(stage=stage, **told).model_dump()
    settings = files.deepspeed_configuration(request(job={"zero": told}), row(f"zero-{stage}"), BASE)
    read = DeepSpeedZeroConfig(**settings["zero_optimization"]).model_dump()
    # which neither takes memory in the step nor sends: how a checkpoint is saved, and overlap, which stage 0 ignores
    aside = {"gather_16bit_weights_on_model_save"} | ({"overlap_comm"} if stage == 0 else set())
    assert {name for name, value in planned.items() if read[name] != value} <= aside


@pytest.mark.parametrize(("gpu", "precision"), [("A800-80GB", "bf16"), ("V100", "fp16")])
def test_a_gpu_without_bf16_gets_fp16_with_loss_scaling(gpu, precision):
    asked = request(gpu, job={"precision": precision})
    written = files.as_recipe(asked, row(), BASE)
    assert written.train.precision == precision
    assert written.deepspeed[precision]["enabled"] == "auto"
    assert not {"bf16", "fp16"} - {precision} & set(written.deepspeed)
    alone = files.deepspeed_configuration(asked, row(), BASE)
    assert alone[precision]["enabled"] is True
    assert alone[precision].get("loss_scale") == (0 if precision == "fp16" else None)  # 0 is dynamic
    deepspeed_settings.check_settings(alone, 4, on_cpu=False)


@pytest.mark.parametrize("changes", [{"tp": 2}, {"pp": 2}])
def test_what_nobody_runs_is_not_written(changes, tmp_path):
    with pytest.raises(ValueError, match=r"ZeRO.*FSDP2.*Megatron-LM.*--tp.*\d.*--pp.*\d") as refused:
        files.write_plan(tmp_path / "out", request(gpus=8, **changes), row(), BASE)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "engine", "written"),
    [
        ({}, "zero-2", "recipe.yaml"),
        ({"job": {"tuning": Tuning()}}, "zero-2", "train.py"),
        ({"engines": ("fsdp2",)}, "fsdp2", "train.py"),
        ({}, "fsdp2", "train.py"),  # where nothing else fits
    ],
)
def test_what_finetune_does_not_run_is_for_the_trainer(changes, engine, written, tmp_path):
    names = files.write_plan(tmp_path / "out", request(**changes), row(engine), BASE)
    assert written in names
    assert ("recipe.yaml" in names) != ("train.py" in names)
    assert ("ds_config.json" in names) == (engine != "fsdp2")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(["--tp", "2"], "Megatron-LM would run --tp 2"), (["--model", "FILE"], "needs the model's folder, not a file")],
)
def test_the_command_refuses_before_any_dry_run(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("pardemo.planner.dry_run.memory_curve.run", lambda job: pytest.fail("a dry run"))
    measured_peak.example_config("baichuan2").save_pretrained(tmp_path)
    arguments = [str(tmp_path / "config.json") if word == "FILE" else word for word in arguments]
    assert main(["plan", *arguments, "--write", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("asked", [["--zero", "3", "--full"], ["--zero", "fsdp2"]])
def test_the_command_writes_for_other_models(asked, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(project, "available_cores", lambda: 1)
    measured_peak.example_config("llama").save_pretrained(tmp_path / "llama")
    arguments = ["--model", str(tmp_path / "llama"), "--gpus", "4", "--sequence", "64", "--per-step", "128"]
    rest = ["--checkpointing", "on", "--batch", "8", "--json", "--write", str(tmp_path / "out")]
    assert main(["plan", *arguments, *asked, *rest]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["written"]) == sorted(path.name for path in (tmp_path / "out").iterdir())
    script = (tmp_path / "out" / "train.py").read_text()
    assert f'ENGINE, RANKS = "{found["rows"][found["recommended"]]["engine"]}", 4\n' in script
    assert ("LORA: dict[str, Any] | None = None\n" in script) == ("--full" in asked)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("small")
    measured_peak.example_config("baichuan2").save_pretrained(out)
    return str(out)


def test_what_is_written_plans_the_same_row_again(tmp_path, capsys, folder, monkeypatch):
    """Model, LoRA's modules, length, precision, batch, stage: the recipe says it all; only the GPUs are told again."""
    monkeypatch.setattr(project, "available_cores", lambda: 1)  # small: processes would start for longer
    cluster = ["--gpu", "V100", "--hosts", "2", "--zero", "2", "--checkpointing", "on", "--batch", "8", "--json"]
    out = tmp_path / "out"
    arguments = ["--model", folder, "--target", "W_pack,o_proj", "--gpus", "4", "--sequence", "64", "--per-step", "128"]
    assert main(["plan", *arguments, *cluster, "--write", str(out)]) == 0
    first = json.loads(capsys.readouterr().out)
    assert sorted(first["written"]) == sorted(path.name for path in out.iterdir())
    assert main(["plan", "--recipe", str(out / "recipe.yaml"), *cluster]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == first["rows"]
    assert again["steps"] == first["steps"]
    written = recipe.load(out / "recipe.yaml")
    assert recipe.locate(written.model.path).samefile(folder)
    assert written.lora.target_modules == ["W_pack", "o_proj"]
    assert written.train.precision == "fp16"

    settings = json.loads((out / "ds_config.json").read_text())
    assert settings["train_batch_size"] == 128
    deepspeed_settings.check_settings(settings, 4, on_cpu=False)
    loaded = load_config_from_file(str(out / "accelerate.yaml"))
    assert (loaded.num_processes, loaded.num_machines) == (4, 2)
    assert (out / "hostfile").read_text() == "host0 slots=2\nhost1 slots=2\n"
    for name, words in {
        "launch.sh": ("deepspeed --hostfile hostfile", "torchrun", "accelerate launch --config_file accelerate.yaml"),
        "job.slurm": ("#SBATCH --nodes=2", "#SBATCH --gpus-per-node=2", "torchrun --nproc_per_node 2 --nnodes 2"),
    }.items():
        text = (out / name).read_text()
        assert all(word in text for word in words)


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("engine", ["zero-2", "zero-3"])
def test_every_launcher_starts_the_recipe(tmp_path, engine, hosts):
    files.write_plan(tmp_path / "out", request(hosts=hosts), row(engine), BASE)
    [torchrun] = started(tmp_path, "launch.sh", "torchrun", "--resume")
    [slurm] = started(tmp_path, "job.slurm", "--resume", SLURM_SUBMIT_DIR=str(tmp_path / "out"), SLURM_NODEID="1",
                      SLURM_CPUS_PER_TASK="8", SLURM_JOB_NODELIST="host[0-1]")  # fmt: skip
    for line in (torchrun, slurm):
        found = get_args_parser().parse_args(line[1:])
        assert (found.nproc_per_node, found.standalone) == (str(4 // hosts), hosts == 1)
        assert hosts == 1 or found.nnodes == "2"
        assert (found.module, found.training_script) == (True, "pardemo.finetune")
        assert found.training_script_args == ["recipe.yaml", "--resume"]
    [accelerate] = started(tmp_path, "launch.sh", "accelerate", MACHINE_RANK="1")
    words = "--config_file accelerate.yaml --machine_rank 1 -m pardemo.finetune recipe.yaml"
    assert " ".join(accelerate[2:]) == words
    [deepspeed] = started(tmp_path, "launch.sh", "deepspeed")
    assert runner.parse_args(deepspeed[1:]).user_args == ["recipe.yaml"]
    read = yaml.safe_load((tmp_path / "out" / "accelerate.yaml").read_text())
    assert (read["distributed_type"], read["deepspeed_config"]["zero3_init_flag"]) == ("DEEPSPEED", engine == "zero-3")
