"""Accelerate on CPU ranks: what was asked for runs, trains as one process does, and bad files are told."""

import contextlib
import json
import pickle
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import RunsCode, refused

from pardemo import World, signed_folders
from pardemo.groups import ParallelDims
from pardemo.peers.accelerate import config_checks, job_settings
from pardemo.peers.accelerate import configurations as accelerate_configurations
from pardemo.peers.accelerate import launch as accelerate_launch
from pardemo.peers.accelerate import script as accelerate_script
from pardemo.peers.accelerate import training as accelerate
from pardemo.peers.accelerate.configurations import Configuration
from pardemo.peers.accelerate.scripts import train_plain
from pardemo.small_models import gpt
from pardemo.world.errors import RankError, RankFailed

pytestmark = pytest.mark.usefixtures("one_thread")
PEERS = [
    "pardemo.peers.accelerate.scripts.train_accelerate",
    "pardemo.peers.deepspeed.engine",
    "pardemo.peers.megatron",
]
PEERS += ["datasets", "transformers.integrations"]  # which Accelerate imports when it is made, in each rank
CONFIGURATIONS = [Configuration(kind, 1 if kind == "one" else 2) for kind in accelerate_configurations.KINDS]
SHORT = ["--steps", "3", "--accumulate", "2", "--clip", "0.5"]
TOLERANCE = 1e-5  # sums over ranks come in another order


@pytest.fixture(scope="module")
def ranks():
    worlds = {n: World(n, preload=PEERS, timeout_s=120) for n in (1, 2)}
    yield worlds
    for world in worlds.values():
        world.close()


def plain(*arguments):
    return [loss for *_, loss in train_plain.train(train_plain.parse(list(arguments)))]


def environment_of(configuration, folder):
    """What ``accelerate launch`` sets for ranks of this configuration, whose files are written."""
    return config_checks.environment(configuration.write(folder))


def train(ranks, configuration, folder, *arguments, function=accelerate_script.train):
    arguments = (environment_of(configuration, folder), configuration.expected(), *arguments)
    return ranks[configuration.processes].run(function, *arguments)


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=lambda configuration: configuration.kind)
def test_every_configuration_trains_and_resumes_as_one_process(ranks, configuration, tmp_path):
    saves = [*SHORT, "--folder", str(tmp_path)]
    expected = pytest.approx(plain(*SHORT), abs=TOLERANCE)
    assert train(ranks, configuration, tmp_path, *saves, "--save-at", "1") == [expected] * configuration.processes
    resumed = pytest.approx(plain(*SHORT)[1:], abs=TOLERANCE)
    assert train(ranks, configuration, tmp_path, *saves, "--resume", "1") == [resumed] * configuration.processes


def test_a_checkpoint_that_is_not_signed_is_not_read(ranks, tmp_path):
    """DeepSpeed's states are pickles: nothing of a folder from elsewhere is unpickled."""
    configuration = Configuration("zero2", 2)
    train(ranks, configuration, tmp_path, *SHORT, "--folder", str(tmp_path), "--save-at", "1")
    mark = tmp_path / "mark"
    for path in (tmp_path / "step-1").rglob("*"):
        if path.suffix in (".pt", ".pkl", ".bin"):
            path.write_bytes(pickle.dumps(RunsCode(str(mark))))
    for message in ("is not what was written", "it was never finished"):
        with pytest.raises(RankFailed, match=f"step-1 is not read, since it may hold pickles: .*{message}"):
            train(ranks, configuration, tmp_path, *SHORT, "--folder", str(tmp_path), "--resume", "1")
        (tmp_path / "step-1" / signed_folders.SIGNATURE).unlink(missing_ok=True)
    assert not mark.exists()


def test_the_tests_own_script_is_sensitive(tmp_path):
    """Clipping, accumulation and the data matter to the losses that the configurations are compared by."""
    base = plain(*SHORT, "--steps", "5")
    for change in (["--clip", "0.05"], ["--accumulate", "1"], ["--batch", "4"]):
        assert max(abs(a - b) for a, b in zip(plain(*SHORT, "--steps", "5", *change), base, strict=True)) > 1e-4


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
def test_bf16_comes_from_the_configuration(ranks, kind, tmp_path):
    for losses in train(ranks, Configuration(kind, 2, "bf16"), tmp_path, "--steps", "2"):
        assert losses == pytest.approx(plain("--bf16", "--steps", "2"), abs=0.02)  # 2⁻⁸ of a loss near 4
        assert losses != pytest.approx(plain("--steps", "2"), abs=1e-6)


def test_another_form_than_the_expected_is_an_error(ranks, tmp_path):
    environment = environment_of(Configuration("ddp", 2), tmp_path)
    with pytest.raises(RankFailed, match=r"distributed_type.*'MULTI_CPU'.*'FSDP'"):
        ranks[2].run(accelerate_script.train, environment, Configuration("fsdp2", 2).expected(), "--steps", "1")


def without_shim(environment, cpu, name_backend):
    """What runs where a script does not call ``cpu_ranks``: the distributed type, the processes, the model's class.

    Args:
        cpu: whether Accelerator is told so. name_backend: whether it is told gloo.
    """
    from accelerate import Accelerator, InitProcessGroupKwargs
    from deepspeed.comm.torch import TorchBackend  # in a module whose attribute torch is torch

    # DeepSpeed would compile its exchange over shared memory: a minute and a half, for what is not looked at
    with accelerate.as_launched(environment), pytest.MonkeyPatch.context() as patch:
        patch.setitem(TorchBackend.__init__.__globals__, "build_shm_op", lambda: None)
        handlers = [InitProcessGroupKwargs(backend="gloo")] if name_backend else []
        accelerator = Accelerator(cpu=cpu, kwargs_handlers=handlers)
        model = gpt.seeded(lambda: gpt.GPT(vocabulary=64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(gpt.text(8, 33, 64), batch_size=8)
        model, *_ = accelerator.prepare(model, optimizer, loader)
        return "{distributed_type}, {num_processes}: {wrapped}".format(**accelerate.what_runs(model))


@pytest.mark.parametrize(
    ("kind", "cpu", "name_backend", "runs"),
    [
        ("ddp", False, False, "NO, 1: GPT"),
        ("fsdp2", True, False, "MULTI_CPU, 2: DistributedDataParallel"),
        ("fsdp2", False, True, "NO, 2: GPT"),
        ("zero2", False, False, "DEEPSPEED, 1: DeepSpeedEngine"),
    ],
)
def test_without_the_shim_something_else_runs(ranks, tmp_path, kind, cpu, name_backend, runs):
    """Should an Accelerate of another day run on CPU ranks by itself, the shim can go."""
    configuration = Configuration(kind, 2)
    environment = environment_of(configuration, tmp_path)
    if kind == "zero2":  # with it two products would not agree, and DeepSpeed would say so
        settings = {key: value for key, value in configuration.deepspeed().items() if key != "train_batch_size"}
        (tmp_path / "zero2-2.json").write_text(json.dumps(settings))
    assert ranks[2].run(without_shim, environment, cpu, name_backend) == [runs] * 2


def test_bytes_and_states_of_ddp_and_fsdp2(ranks, tmp_path):
    sizes = ["--hidden", "128", "--layers", "4"]
    for kind, sent, kept in (("ddp", 2, 16), ("fsdp2", 4, 8)):
        for rank in train(ranks, Configuration(kind, 2), tmp_path, *sizes, function=accelerate_script.measure):
            psi = rank["parameters"]
            assert rank["sent_bytes"] == pytest.approx(sent * 4 * psi / 2, rel=0.015)
            assert states_of(rank) == pytest.approx(kept * psi, rel=0.01)
            buckets = 4 * psi if kind == "ddp" else 0  # DDP sends from copies of its gradients
            assert rank["kept"]["others"] - buckets < 1 << 20


def states_of(rank):
    return sum(rank["kept"][kind] for kind in ("parameters", "gradients", "optimizer states"))


def test_two_replicas_in_shards_train_as_one_process(tmp_path):
    """HSDP by ParallelismConfig: a rank keeps its part of one copy."""
    configuration = Configuration("fsdp2", 4, replicas=2)
    with World(4, preload=PEERS, timeout_s=120) as world:
        for rank in train({4: world}, configuration, tmp_path, function=accelerate_script.measure):
            assert rank["losses"] == pytest.approx(plain(), abs=TOLERANCE)
            assert states_of(rank) == pytest.approx(8 * rank["parameters"], rel=0.01)
            assert rank["ring_bytes"] == pytest.approx(4 * rank["parameters"] * (3 / 2 + 1 / 2), rel=0.05)
    with pytest.raises(ValueError, match=r"3.*fsdp2.*4"):
        Configuration("fsdp2", 4, replicas=3)
    with pytest.raises(ValueError, match=r"2.*4.*processes"):
        Configuration("ddp", 4, replicas=2)


# --- configuration files ----------------------------------------------------------------------------------------------

FSDP2 = Configuration("fsdp2", 2).config()
ROOM = config_checks.most_processes()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_procs": 2}, "the configuration has no key 'num_procs'; did you mean 'num_processes'?"),
        ({"num_processes": ROOM + 1}, f"num_processes {ROOM + 1} is more than the machine allows: it has"),
        ({"num_processes": "two"}, "num_processes must be a whole number of at least 1, not 'two'"),
        ({"num_processes": 3, "num_machines": 2}, "num_processes 3 does not divide among num_machines 2"),
        ({"num_machines": 2}, "2 machines need main_process_ip, where they meet"),
        ({"distributed_type": "MULTI_CPU"}, "start one process without a word"),
        ({"distributed_type": "FDSP"}, "distributed_type is one of NO, MULTI_GPU"),
        ({"distributed_type": "MULTI_GPU"}, "fsdp_config is ignored under distributed_type MULTI_GPU"),
        ({"mixed_precision": "fp17"}, "mixed_precision is one of no, bf16, fp16, fp8, not 'fp17'"),
        ({"mixed_precision": False}, "not False (YAML reads a bare no as that: put it in quotes)"),
        ({"fsdp_config": "yes"}, "fsdp_config must be a section of keys, not 'yes'"),
        (
            {"parallelism_config": {"parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 2}},
            "parallelism_config is dp_shard 2 × tp 2: not num_processes 2",
        ),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(changes, message, tmp_path):
    with refused(message):
        accelerate_configurations.write(tmp_path / "bad.yaml", FSDP2 | changes)
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(FSDP2 | changes))
    with pytest.raises(ValueError, match=r"bad\.yaml: "):
        accelerate_launch.commands(tmp_path / "bad.yaml")


def test_the_wrong_number_for_one_process_or_two():
    with pytest.raises(ValueError, match=r"distributed_type.*NO.*num_processes.*2"):
        config_checks.check(Configuration("one", 2).config())
    with pytest.raises(ValueError, match=r"MULTI_GPU.*num_processes.*2.*1"):
        config_checks.check(Configuration("ddp", 1).config())
    with pytest.raises(ValueError, match="no configuration 'zero4'"):
        Configuration("zero4", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_clipping": "auto"}, "gradient_clipping has to be a number"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage is 0, 1, 2 or 3, not 4"),
    ],
)
def test_deepspeeds_own_file_is_checked_too(changes, message, tmp_path):
    configuration = Configuration("zero2", 2)
    path = configuration.write(tmp_path)
    (tmp_path / "zero2-2.json").write_text(json.dumps(configuration.deepspeed() | changes))
    with refused(message) as error:
        config_checks.read_config(path)
    assert "zero2-2.yaml: " in str(error.value)


def test_files_that_are_no_configurations(tmp_path):
    for text, message in (("a: [", "is not YAML"), ("- 1", "a configuration has keys and values")):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            config_checks.read_config(tmp_path / "x.yaml")
    with pytest.raises(FileNotFoundError):
        config_checks.read_config(tmp_path / "none.yaml")


def test_what_is_written_accelerate_reads(tmp_path):
    """Accelerate's own reader, of every configuration, on one machine and on two."""
    from accelerate.commands.config.config_args import load_config_from_file

    for configuration in [
        *CONFIGURATIONS,
        Configuration("zero3", 4, machines=2),
        Configuration("ddp", 4, "bf16", machines=2),
        Configuration("fsdp2", 4, replicas=2),
    ]:
        path = configuration.write(tmp_path)
        assert config_checks.read_config(path) == configuration.config()
        assert load_config_from_file(str(path)).num_processes == configuration.processes


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero3_init_is_what_accelerate_itself_takes(stage, monkeypatch):
    """Its GatheredParameters gathers by this flag alone: told false under stage 3, a script finds empty weights."""
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin, DistributedType, operations

    job = job_settings.settings("DEEPSPEED", 2)
    written = job_settings.deepspeed(job, "ds.json", stage)["deepspeed_config"]["zero3_init_flag"]
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    assert DeepSpeedPlugin(hf_ds_config=settings).zero3_init_flag == written
    gathered = []
    monkeypatch.setattr(
        deepspeed.zero, "GatheredParameters", lambda *a, **k: gathered.append(stage) or contextlib.nullcontext()
    )
    for flag in (written, False):
        plugin = DeepSpeedPlugin(hf_ds_config=settings, zero3_init_flag=flag)
        state = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED, deepspeed_plugin=plugin)
        monkeypatch.setattr(operations, "AcceleratorState", lambda state=state: state)
        with operations.GatheredParameters([]):
            pass
    assert gathered == [stage] * (stage == 3), "with the flag that is written, and not without it"


def test_the_megatron_lm_plugins_file(tmp_path):
    settings = accelerate_configurations.megatron_lm(8, tp=2, pp=2, micro_batches=4)
    variables = config_checks.environment(accelerate_configurations.write(tmp_path / "m.yaml", settings))
    assert variables["ACCELERATE_USE_MEGATRON_LM"] == "true"
    names = ("TP_DEGREE", "PP_DEGREE", "NUM_MICRO_BATCHES")
    assert [variables[f"MEGATRON_LM_{name}"] for name in names] == ["2", "2", "4"]
    with pytest.raises(ValueError, match="did you mean 'megatron_lm_tp_degree'"):
        config_checks.check(settings | {"megatron_lm_config": {"megatron_lm_tp_degre": 2}})


# --- launchers --------------------------------------------------------------------------------------------------------


#: A rank of any launcher's says of how many it is, and only that: nothing is loaded for it.
HOW_MANY = """import json, os; print(json.dumps({"losses": [], "world": os.environ.get("WORLD_SIZE")}))"""


@pytest.mark.nightly
def test_the_written_commands_start_what_they_say(tmp_path):
    accelerate_launch.write_scripts(tmp_path)
    configuration, zero2 = Configuration("fsdp2", 2, machines=2), Configuration("zero2", 2)
    arguments = ["--steps", "2"]
    jobs = {
        "two hosts": accelerate_launch.commands(configuration.write(tmp_path), "accelerate", arguments),
        "variables": accelerate_launch.commands(zero2.write(tmp_path), "torchrun", arguments),
        "trap": ["accelerate launch --cpu --num_processes 2 how_many.py"],
    }
    (tmp_path / "how_many.py").write_text(HOW_MANY)
    assert accelerate_launch.write_commands(tmp_path, jobs).read_text().count("accelerate launch") == 3
    results = accelerate_launch.run(jobs, tmp_path)
    for job, written in (("two hosts", configuration), ("variables", zero2)):
        assert len(results[job]) == 2
        for rank in results[job]:
            accelerate.assert_runs(rank, written.expected())
            assert rank["losses"] == pytest.approx(plain(*arguments), abs=TOLERANCE)
    assert [rank["world"] for rank in results["trap"]] == [None], "one, of two asked for: the trap is still there"


def test_commands_name_no_folder_and_every_launcher(tmp_path):
    path = Configuration("zero2", 4, machines=2).write(tmp_path)
    for launcher, hosts in (("accelerate", 2), ("torchrun", 2)):
        texts = accelerate_launch.commands(path, launcher)
        assert len(texts) == hosts
        assert not any(str(tmp_path) in text for text in texts)
    assert str(tmp_path) not in path.with_suffix(".env").read_text()
    with pytest.raises(ValueError, match=r"deepspeed.*reaches"):
        accelerate_launch.commands(path, "deepspeed")
    with pytest.raises(ValueError, match="no launcher 'mpirun'"):
        accelerate_launch.commands(path, "mpirun")


def test_a_command_that_fails_or_hangs_is_told_and_nothing_is_left(tmp_path):
    with pytest.raises(RankError, match=r"status.*3"):
        accelerate_launch.run({"bad": ["echo no such thing >&2; exit 3"]}, tmp_path)
    with pytest.raises(RankError, match=r"within.*1"):
        accelerate_launch.run({"slow": ["sleep 4242 & wait"]}, tmp_path, timeout_s=1)
    assert subprocess.run(["pgrep", "-f", "^sleep 4242$"], capture_output=True, check=False).returncode == 1


# --- Megatron and DeepSpeed -------------------------------------------------------------------------------------------


def with_megatron(steps=3):
    from pardemo.groups import Groups
    from pardemo.peers import megatron
    from pardemo.peers.deepspeed import engine as deepspeed

    settings = deepspeed.zero_settings(1, batch=4) | {"bf16": {"enabled": False}}
    settings["optimizer"]["params"]["weight_decay"] = 0.01  # torch's default
    with megatron.megatron(tp=2), Groups(ParallelDims(tp=2, dp=2)) as groups:
        net = megatron.GPT(gpt.seeded(lambda: gpt.GPT(vocabulary=64)))
        engine = deepspeed.engine(net, settings, megatron.groups())
        part = torch.distributed.get_rank(groups.dp)
        losses = []
        for step in range(steps):
            loss = net.loss(gpt.text(8, 17, 64, seed=step)[4 * part : 4 * part + 4])
            engine.backward(loss)
            engine.step()
            mean = loss.detach().clone()
            torch.distributed.all_reduce(mean, group=groups.dp)
            losses.append(mean.item() / 2)
        partitions = engine.dp_world_size
        deepspeed.close(engine)
    return losses, partitions


def test_megatron_cores_layers_under_deepspeed():
    net, expected = gpt.seeded(lambda: gpt.GPT(vocabulary=64)), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(3):
        loss = net.loss(gpt.text(8, 17, 64, seed=step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    with World(4, preload=PEERS, timeout_s=120) as world:
        for losses, partitions in world.run(with_megatron):
            assert losses == pytest.approx(expected, abs=TOLERANCE)
            assert partitions == 2


def test_both_scripts_stay_comparable():
    """The plain script's options are the other's and --bf16, which the configuration says there."""
    from pardemo.peers.accelerate.scripts import train_accelerate

    ours, theirs = (vars(script.parse([])) for script in (train_plain, train_accelerate))
    assert ours.keys() - theirs.keys() == {"bf16"}
    assert {key: ours[key] for key in theirs} == theirs
    assert Path(train_accelerate.__file__).name == accelerate_launch.SCRIPT
