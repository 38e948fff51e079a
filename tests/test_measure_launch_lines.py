"""``pardemo measure -- torchrun …``: lines of launchers, read as they read them, and what their ranks get and run."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import yaml
from conftest import few, says

from pardemo import cli, measure, project
from pardemo.script.runtime import launch_lines
from pardemo.script.step import measurement

SCRIPTS = project.root() / "tests" / "scripts"
FSDP = {
    "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8, "num_machines": 1, "use_cpu": False,
    "fsdp_config": {
        "fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 5000,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}  # fmt: skip
DEEPSPEED = {
    "distributed_type": "DEEPSPEED", "mixed_precision": "no", "num_processes": 2, "num_machines": 1, "use_cpu": False,
    "deepspeed_config": {"gradient_accumulation_steps": 2, "zero_stage": 2},
}  # fmt: skip
ALONE = {"distributed_type": "NO", "mixed_precision": "no", "num_processes": 1, "num_machines": 1, "use_cpu": False}
#: Writes what a rank was given; what is of this test alone, and not of launchers, is left out.
TELLS = """
import json, os, sys
names = [n for n in os.environ if n.startswith(("ACCELERATE", "FSDP", "PARALLELISM", "CROSS", "ROLE", "GROUP"))]
names += ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_MAX_RESTARTS", "MASTER_ADDR"]
given = {"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}
with open(f"rank{os.environ['RANK']}.json", "w") as stream:
    json.dump(given, stream)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with a script, and configurations of Accelerate; nobody's own configuration is found."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TELLS)
    for name, settings in (("fsdp2", FSDP), ("zero2", DEEPSPEED), ("alone", ALONE)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"compute_environment": "LOCAL_MACHINE", **settings}))
    return tmp_path


@pytest.mark.parametrize(
    ("line", "script", "arguments", "ranks"),
    [
        ("train.py --batch 8", "train.py", ("--batch", "8"), None),
        ("python -u -X dev train.py --batch 8", "train.py", ("--batch", "8"), None),
        ("/usr/bin/python3.11 -m package.train x", "package.train", ("x",), None),
        ("torchrun --standalone --nproc-per-node 2 train.py --lr 1", "train.py", ("--lr", "1"), 2),
        ("/opt/venv/bin/torchrun --nnodes=2 --nproc_per_node=3 --node_rank=1 train.py", "train.py", (), 6),
        ("torchrun --nnodes 1:4 --nproc-per-node 2 -m package.train", "package.train", (), 2),
        ("torchrun train.py", "train.py", (), 1),
        ("torchrun --nproc-per-node gpu train.py", "train.py", (), None),
        ("python -m torch.distributed.run --nproc-per-node 5 train.py -h", "train.py", ("-h",), 5),
        ("python -m torch.distributed.launch --nproc-per-node 5 train.py", "train.py", (), 5),
        ("env NCCL_DEBUG=INFO A= torchrun --nproc-per-node 2 train.py", "train.py", (), 2),
        ("accelerate launch --config_file fsdp2.yaml train.py --epochs 1", "train.py", ("--epochs", "1"), 8),
        ("accelerate launch --config_file fsdp2.yaml --num_processes 4 train.py", "train.py", (), 4),
        ("accelerate launch --num_processes 3 -m package.train", "package.train", (), 3),
        ("accelerate-launch --config_file zero2.yaml train.py", "train.py", (), 2),
        ("accelerate launch --config_file alone.yaml train.py", "train.py", (), 1),
        ("python -m accelerate.commands.launch --num_processes 2 train.py", "train.py", (), 2),
        ("accelerate launch train.py", "train.py", (), 4),
        ("deepspeed --num_gpus 4 train.py --deepspeed ds.json", "train.py", ("--deepspeed", "ds.json"), 4),
        ("deepspeed --include localhost:1,3,5 --module package.train", "package.train", (), 3),
        ("deepspeed train.py", "train.py", (), None),
    ],
)  # fmt: skip
def test_what_a_line_starts(here, line, script, arguments, ranks):
    launch = launch_lines.read_launch(line.split())
    assert (launch.script, launch.arguments, launch.ranks) == (script, arguments, ranks)
    assert launch.module == (script == "package.train")
    assert bool(launch.notes) == (ranks is None and line.split()[0] in ("torchrun", "deepspeed"))


def test_variables_before_a_command_are_the_ranks(here):
    launch = launch_lines.read_launch(["env", "NCCL_DEBUG=INFO", "MASTER_PORT=29500", "A=", "torchrun", "train.py"])
    assert launch.environment == {"NCCL_DEBUG": "INFO", "A": ""}, "where ranks meet is pardemo's"
    assert "NCCL_DEBUG" not in os.environ


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("srun -N 2 torchrun --nproc-per-node 8 t.py", "paste what stands behind it: pardemo measure -- torchrun --np"),
        ("mpirun -np 4 ./job", "paste the script and its arguments: pardemo measure --ranks 4 -- train.py ARGS"),
        ("ray job submit -- python train.py", "paste what stands behind it: pardemo measure -- python train.py"),
        ("horovodrun -np 4 python train.py", "horovodrun starts processes on nodes that are not here"),
        ("bash train.sh", "bash is a program, not a script"),
        ("accelerate config", "accelerate starts jobs by accelerate launch alone"),
        ("python -c pass", "python -c runs no file"),
        ("python -u", "python names no script"),
        ("python -m", "python -m names no module"),
        ("torchrun --nproc-per-node 2", "torchrun would refuse its line: the following arguments are required"),
        ("torchrun --nproc-per-node many train.py", "torchrun: Unsupported nproc_per_node value: many"),
        ("torchrun --nproc-per-node 65 train.py", "the line would start 65 ranks: say from 1 to 64 with --ranks"),
        ("torchrun --no-python train.sh", "torchrun --no-python runs train.sh"),
        ("accelerate launch --nonsense train.py", "accelerate launch would refuse its line: unrecognized arguments"),
        ("accelerate launch --config_file no.yaml train.py", "configuration file `no.yaml` does not exist"),
        ("accelerate launch --cpu --num_processes 2 train.py", "would start one process for this line, not 2"),
        ("accelerate launch --config_file alone.yaml --num_processes 2 train.py", "would start one process"),
        ("deepspeed --num_gpus 2 --include localhost:1 train.py", "Cannot specify num_nodes/gpus with include"),
        ("deepspeed --num_gpus 2 --num_nodes 2 train.py", "--num_nodes wants a hostfile, and there is none"),
        ("deepspeed --autotuning run train.py", "deepspeed --autotuning tries many runs"),
        ("no.py --batch 8", "there is no script no.py"),
    ],
)
def test_a_line_that_cannot_be_run_is_told_in_one_line(here, capsys, line, said):
    assert cli.main(["measure", "--", *line.split()]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told
    assert "\n" not in told


LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "train.py", "--a", "1"],
    "launch": ["-m", "torch.distributed.launch", "--nproc-per-node", "2", "--master-port", "0", "train.py", "--a", "1"],
    "accelerate fsdp2": [
        "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "fsdp2.yaml", "--num_processes", "2",
        "--main_process_port", "0", "train.py", "--a", "1",
    ],
    "accelerate zero2": [
        "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", "zero2.yaml", "--main_process_port", "0",
        "train.py", "--a", "1",
    ],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "train.py", "--a", "1"],
}  # fmt: skip


@pytest.mark.parametrize("name", few(LAUNCHERS))
def test_ranks_get_what_the_launcher_itself_gives_them(here, name):
    """The launcher runs the same line; both have the script write down what it was given."""
    line = LAUNCHERS[name]
    surroundings = os.environ | {"DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}  # DeepSpeed's number of CPU "devices"
    subprocess.run([sys.executable, *line], check=True, env=surroundings, timeout=120, capture_output=True)
    files = [here / f"rank{rank}.json" for rank in range(2)]
    theirs = [json.loads(file.read_text()) for file in files]
    for file in files:
        file.unlink()
    launch = launch_lines.read_launch(["python", *line])
    with pytest.raises(measure.ScriptError, match="without a step"):
        measurement.measure_launch(launch, ranks=launch.ranks, cluster=None, steps=1, folder=here, timeout_s=60)
    ours = [json.loads(file.read_text()) for file in files]
    if name == "deepspeed":
        for given in ours:
            assert given.pop("LOCAL_WORLD_SIZE") == "2", "without a GPU: how many a script is told of"
        for given in theirs:
            assert given.pop("LOCAL_WORLD_SIZE") is None
    for given in (*ours, *theirs):
        given["MASTER_ADDR"] = given["MASTER_ADDR"].replace("localhost", "127.0.0.1")
    assert ours == theirs


def measured_json(capsys, *arguments):
    assert cli.main(["measure", "--steps", "1", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "kind"),
    few(
        [
            ("accelerate launch --config_file fsdp2.yaml --num_processes 2 {} --mixed_precision no", "FSDP2"),
            ("accelerate launch --config_file zero2.yaml {}", "DeepSpeed ZeRO-2"),
            ("accelerate launch --multi_gpu --num_processes 2 {}", "DDP"),
        ]
    ),
)
def test_accelerates_line_decides_what_runs(here, capsys, line, kind):
    measured = measured_json(capsys, "--", *line.format(SCRIPTS / "accelerate_script.py").split())
    assert [(one["kind"], one["ranks"]) for one in measured["parallelism"]] == [(kind, [0, 1])]
    assert sum(row["bytes"] for row in measured["collectives"]) > 0
    assert not any("nothing is summed" in one["what"] for one in measured["findings"])


def test_deepspeeds_line(here, capsys):
    asked = ["--", "deepspeed", "--num_gpus", "8", str(SCRIPTS / "deepspeed_zero3.py"), "--stage", "3"]
    measured = measured_json(capsys, "--ranks", "2", *asked)
    assert [(one["kind"], one["ranks"]) for one in measured["parallelism"]] == [("DeepSpeed ZeRO-3", [0, 1])]
    assert "the line would start 8 ranks; it ran on 2, as you said" in measured["notes"]


def test_a_single_process_of_accelerate_knows_of_no_others(here, capsys):
    asked = ["accelerate", "launch", "--config_file", "alone.yaml", str(SCRIPTS / "accelerate_script.py")]
    measured = measured_json(capsys, "--", *asked)
    assert (measured["ranks"], measured["parallelism"], measured["backend"]) == (1, [], "")


def test_a_line_of_two_hosts(here, capsys):
    source = """
        import os, torch
        rank, beside = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        assert beside == 2 and int(os.environ["GROUP_RANK"]) == rank // 2 and int(os.environ["LOCAL_RANK"]) == rank % 2
        torch.distributed.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    """
    (here / "train.py").write_text(textwrap.dedent(source))
    line = ["torchrun", "--nnodes", "2", "--nproc-per-node", "2", "train.py"]
    assert measured_json(capsys, "--", *line)["ranks"] == 4
    assert cli.main(["measure", "--ranks", "3", "--", *line]) == 2
    assert says(capsys.readouterr().err, "2", "machines", "3")
