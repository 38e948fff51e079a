"""What ``pardemo plan --write`` writes for Transformers' Trainer: programs read it, ranks run it, really cut."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import types
from importlib import metadata

import pytest
import torch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from conftest import few, says
from deepspeed.launcher import runner
from deepspeed.runtime import config as deepspeed_config
from safetensors.torch import load_file
from test_layouts_launch import started
from test_plan_reasons import row
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, GPT2Config, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pardemo import RankError, World, compat
from pardemo.finetune import recipe
from pardemo.peers import launchers
from pardemo.peers.accelerate import config_checks
from pardemo.peers.accelerate.training import as_launched, wrapped
from pardemo.peers.deepspeed import deepspeed_settings
from pardemo.planner import hardware
from pardemo.planner.dry_run import measured_peak
from pardemo.planner.fine_tune import files, plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuning import FULL, Tuning

LORA = Tuning(rank=4, target=("q_proj", "v_proj"), alpha=16, dropout=0.0)
BASE = recipe.load("baichuan2-13b-lora-bf16")


def made(folder, **changes):
    """A folder with a random Llama of two layers and a tokenizer of some words."""
    words = {word: number for number, word in enumerate(["<unk>", "</s>", *(f"w{n}" for n in range(62))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=64, max_position_embeddings=64, **sizes, **changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return made(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Eight samples of several kinds and lengths: those of one step."""
    path = tmp_path_factory.mktemp("data") / "train.jsonl"
    rows = [{"prompt": f"w{n} w{n + 1}", "completion": " ".join(f"w{n + m}" for m in range(n + 1))} for n in range(4)]
    rows += [{"text": f"w{n} w{2 * n} w{3 * n}"} for n in range(1, 5)]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def world():
    with World(2, preload=["pardemo.peers.deepspeed.engine", "pardemo.finetune.train"], timeout_s=240) as two:
        yield two


def request(folder, gpus=2, hosts=1, tuning=LORA, gpu="A800-80GB", job=None, **changes):
    asked = RankJob(AutoConfig.from_pretrained(folder), sequence=32, tuning=tuning, clipping=1.0, **(job or {}))
    machine = Machine(hardware.gpu(gpu), gpus, gpus // hosts)
    return plan_table.Request(asked, machine, **{"samples_per_step": 4 * gpus, "steps": 2} | changes)


def based(folder):
    changes = [f"model.path={folder}", "train.learning_rate=1e-2", "train.save_steps=null", "train.warmup_steps=0"]
    return recipe.override(BASE, [*changes, "train.logging_steps=1", "train.lr_scheduler_type=constant"])


def planned(engine, offload="none", checkpointing=True):
    """A row with 2 × 2 samples on each rank."""
    return row(engine, offload, batch=2, checkpointing=checkpointing, accumulation=2)


def written(folder, asked, chosen, base):
    names = files.write_plan(folder, asked, chosen, base)
    there = {path.name for path in folder.iterdir()} - {"__pycache__"}  # of a script that a test has imported
    assert set(names) == there
    return folder


# --- run


def script_of(folder):
    spec = importlib.util.spec_from_file_location("written_train", folder / "train.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def on_rank(folder, environment, data, output, gpus_pretended):
    """Runs the written script as this rank, and tells what the rank holds then, asked of torch and of DeepSpeed.

    Accelerate takes FSDP2 up on GPUs alone: it is told that there are some.
    """
    from accelerate.state import DistributedType

    from pardemo.finetune.train import forget_earlier_runs

    forget_earlier_runs()
    with as_launched(environment):
        script = script_of(folder)
        if gpus_pretended:
            own = script.arguments_of

            def arguments_of(options):
                arguments = own(options)
                compat.PartialState_shared["distributed_type"] = DistributedType.MULTI_GPU
                return arguments

            script.arguments_of = arguments_of
        trainer = script.main(["--data", str(data), "--output", str(output), "--offline"])
        return {
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            **held(trainer.model_wrapped),
        }


def held(engine):
    """Elements that are trained, in all and on this rank; under ZeRO those of the optimizer's states."""
    trained = [parameter for parameter in engine.parameters() if parameter.requires_grad]
    if wrapped(engine) == "FSDPModule":
        own = sum(parameter.to_local().numel() for parameter in trained)
        return {"engine": "fsdp2", "ranks": trained[0].device_mesh.size(), "own": own,
                "whole": sum(parameter.numel() for parameter in trained)}  # fmt: skip
    stage = engine.zero_optimization_stage()
    if stage == 3:
        everything = list(engine.parameters())
        assert all(parameter.ds_tensor.numel() * 2 >= parameter.ds_numel > 0 for parameter in everything)
        assert sum(parameter.ds_tensor.numel() for parameter in everything) * 2 == sum(
            parameter.ds_numel for parameter in everything
        )
    moments = [state["exp_avg"] for state in engine.optimizer.optimizer.state.values()]
    return {"engine": f"zero-{stage}", "ranks": engine.dp_world_size, "own": sum(one.numel() for one in moments),
            "whole": sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)}  # fmt: skip


def by_hand(folder, data, tuning):
    """The losses of two steps over all samples in one process, in fp32, without any of these libraries' trainers."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(BASE.train.seed)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if tuning.lora:
        settings = LoraConfig(r=tuning.rank, lora_alpha=tuning.alpha, target_modules=list(tuning.target))
        model = get_peft_model(model, settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(2):
        total, count = torch.zeros(()), 0
        for line in data.read_text(encoding="utf-8").splitlines():
            sample = {"prompt": "", **json.loads(line)}
            prompt, rest = ([int(word[1:]) + 2 for word in text.split()]
                            for text in (sample["prompt"], sample.get("completion", sample.get("text"))))  # fmt: skip
            ids = torch.tensor([*prompt, *rest, 1])
            first = max(1, len(prompt))
            logits = model(input_ids=ids[None]).logits[0, first - 1 : -1]
            total = total + torch.nn.functional.cross_entropy(logits, ids[first:], reduction="sum")
            count += len(ids) - first
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((total / count).item())
    return losses


@pytest.mark.parametrize("tuning", few([LORA, FULL]), ids=["LoRA", "full"])
@pytest.mark.parametrize("launcher", few(["torchrun", "accelerate"]))
@pytest.mark.parametrize("engine", ["zero-0", "zero-1", "zero-2", "zero-3", "fsdp2"])
def test_the_script_trains_cut_as_planned(world, model, data, tmp_path, engine, launcher, tuning):
    folder = written(tmp_path / "plan", request(model, tuning=tuning), planned(engine), based(model))
    [config] = folder.glob("accelerate*.yaml")
    environment = config_checks.environment(config) if launcher == "accelerate" else {}
    found = world.run(on_rank, folder, environment, data, tmp_path / "out", engine == "fsdp2")
    whole = 2048 if tuning.lora else sum(p.numel() for p in LlamaForCausalLM.from_pretrained(model).parameters())
    for rank in found:
        assert (rank["engine"], rank["ranks"], rank["whole"]) == (engine, 2, whole)
        assert rank["own"] == (whole if engine == "zero-0" else whole // 2)
        assert rank["losses"] == pytest.approx(by_hand(model, data, tuning), rel=1e-2)
        assert rank["losses"][1] < 0.98 * rank["losses"][0]
    name = "adapter_model.safetensors" if tuning.lora else "model.safetensors"
    saved = load_file(tmp_path / "out" / name)
    if tuning.lora:
        assert all(tensor.abs().max() > 5e-3 for key, tensor in saved.items() if "lora_B" in key)
        assert sum(tensor.numel() for tensor in saved.values()) == whole
    else:
        before = load_file(model / name)
        assert saved.keys() == before.keys()
        assert all((saved[key] - before[key]).abs().max() > 5e-3 for key in before if "norm" not in key)


@pytest.mark.parametrize("engine", ["zero-3", "fsdp2"])
def test_a_head_that_the_embedding_shares(world, data, tmp_path, engine):
    tied = made(tmp_path / "tied", tie_word_embeddings=True)
    folder = written(tmp_path / "plan", request(tied, tuning=FULL), planned(engine, checkpointing=False), based(tied))
    environment = config_checks.environment(next(folder.glob("accelerate*.yaml")))
    whole = sum(parameter.numel() for parameter in LlamaForCausalLM.from_pretrained(tied).parameters())
    for rank in world.run(on_rank, folder, environment, data, tmp_path / "out", engine == "fsdp2"):
        assert rank["whole"] == 2 * rank["own"] == whole
        assert rank["losses"] == pytest.approx(by_hand(tied, data, FULL), rel=1e-2)
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    assert trained.lm_head.weight is trained.model.embed_tokens.weight


def test_ranks_that_are_not_cut_end_before_the_first_step(world, model, data, tmp_path):
    """Without a GPU Accelerate leaves FSDP2 out, and says nothing: each rank would train a copy of its own."""
    folder = written(tmp_path / "plan", request(model), planned("fsdp2"), based(model))
    with pytest.raises(RankError, match=r"fsdp2.*2.*\w+.*2"):
        world.run(on_rank, folder, {}, data, tmp_path / "out", False)
    assert not (tmp_path / "out" / "adapter_model.safetensors").exists()


@pytest.mark.nightly
def test_torchrun_really_starts_it_and_it_goes_on(model, data, tmp_path, monkeypatch):
    # DeepSpeed compiles for it what torch keeps for this user, and a build that was killed has left a lock there
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    folder, out = written(tmp_path / "plan", request(model), planned("zero-3"), based(model)), tmp_path / "out"
    command = f"sh launch.sh torchrun --data {data} --output {out}"
    for more in ("--set save_strategy=steps --set save_steps=1", "--resume --set max_steps=3"):
        [said] = launchers.together({"torchrun": f"{command} {more}"}, 180, folder)
        assert says(said, "zero-3", "2")
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert [log["step"] for log in state["log_history"]] == [1, 2]
    assert said.count("'loss'") == 1, "the third step alone"
    assert (out / "adapter_model.safetensors").exists()


def test_another_number_of_ranks_is_refused_in_one_line(model, tmp_path, capsys):
    script = script_of(written(tmp_path / "plan", request(model), planned("zero-2"), based(model)))
    with pytest.raises(SystemExit):
        script.main(["--data", "rows.jsonl"])
    assert says(capsys.readouterr().err, "2", "1", "launch.sh")


# --- read


WAYS = [
    ("zero-0", "none"), ("zero-1", "optimizer"), ("zero-2", "none"), ("zero-2", "optimizer"), ("zero-3", "none"),
    ("zero-3", "optimizer"), ("zero-3", "optimizer+parameters"), ("fsdp2", "none"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "offload", "checkpointing", "gpu"),
    [*((*way, True, "A800-80GB") for way in WAYS), ("zero-3", "none", False, "V100"), ("fsdp2", "none", False, "V100")],
)
def test_each_program_reads_what_is_written_for_it(model, tmp_path, monkeypatch, engine, offload, checkpointing, gpu):
    precision = "fp16" if gpu == "V100" else "bf16"
    asked = request(model, gpus=16, hosts=2, gpu=gpu, job={"precision": precision})
    folder = written(tmp_path / "out", asked, planned(engine, offload, checkpointing), based(model))
    monkeypatch.setattr(config_checks, "most_processes", lambda: 8)
    monkeypatch.setattr(config_checks, "_check_precision", lambda settings: None)  # fp16 is refused on a CPU
    monkeypatch.setattr(
        deepspeed_settings, "check_settings", functools.partial(on_gpus, deepspeed_settings.check_settings)
    )
    [config] = folder.glob("accelerate*.yaml")
    read = load_config_from_file(str(config))
    assert (read.num_processes, read.num_machines, read.main_process_port) == (16, 2, 29500)
    found = config_checks.read_config(config)
    launched = config_checks.environment(config)
    settings = json.loads((folder / "ds_config.json").read_text()) if engine != "fsdp2" else None
    if settings is None:
        assert found["fsdp_config"]["fsdp_version"] == 2
        assert launched["ACCELERATE_MIXED_PRECISION"] == precision
        plugin = plugin_of(launched, monkeypatch)
        assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
        assert plugin.transformer_cls_names_to_wrap == ["LlamaDecoderLayer"]
    else:
        assert launched["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert found["deepspeed_config"]["zero3_init_flag"] == (engine == "zero-3")
        monkeypatch.setattr(deepspeed_config.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(deepspeed_config.dist, "get_world_size", lambda: 16)
        whole = deepspeed_config.DeepSpeedConfig(settings)
        assert (whole.train_batch_size, whole.train_micro_batch_size_per_gpu) == (64, 2)
        assert (f"zero-{whole.zero_config.stage}", whole.gradient_clipping) == (engine, 1.0)
        states, parameters = whole.zero_config.offload_optimizer, whole.zero_config.offload_param
        assert (states is not None, parameters is not None) == (offload != "none", "parameters" in offload)
        assert "auto" not in (folder / "ds_config.json").read_text()
    heads = [path.read_text() for path in folder.iterdir() if path.name != "ds_config.json"]
    version = f"Transformers {metadata.version('transformers')}, Accelerate {metadata.version('accelerate')}"
    assert all(version in text[:600] for text in heads)
    assert runner.fetch_hostfile(str(folder / "hostfile")) == {"host0": 8, "host1": 8}


def on_gpus(check, settings, processes, on_cpu=True):
    """DeepSpeed's rules for GPUs: on a CPU it refuses fp16."""
    check(settings, processes, on_cpu=False)


def plugin_of(environment, monkeypatch):
    """What Accelerate makes of the variables that its launcher sets."""
    from accelerate import FullyShardedDataParallelPlugin

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return FullyShardedDataParallelPlugin()


@pytest.mark.parametrize(("engine", "offload"), WAYS[::2] + WAYS[-1:])
def test_transformers_reads_its_arguments(world, model, tmp_path, engine, offload):
    folder = written(tmp_path / "out", request(model), planned(engine, offload), based(model))
    found = world.run(read_arguments, folder)[0]
    assert found == {
        "steps": 2, "batch": 2, "accumulation": 2, "clipping": 1.0, "bf16": True, "again": True, "rate": 1e-2,
        "stage": None if engine == "fsdp2" else int(engine[-1]), "fsdp": 2 if engine == "fsdp2" else None,
        "mismatches": [],
    }  # fmt: skip


def read_arguments(folder):
    from pardemo.finetune.train import forget_earlier_runs

    forget_earlier_runs()
    with as_launched({}):
        options = types.SimpleNamespace(set=[], output=str(folder / "output"))
        arguments = script_of(folder).arguments_of(options)
    deepspeed = arguments.hf_deepspeed_config if arguments.deepspeed else None
    return {
        "steps": arguments.max_steps, "batch": arguments.per_device_train_batch_size,
        "accumulation": arguments.gradient_accumulation_steps, "clipping": arguments.max_grad_norm,
        "bf16": arguments.bf16, "again": arguments.activation_checkpointing, "rate": arguments.learning_rate,
        "stage": deepspeed.get_value("zero_optimization.stage") if deepspeed else None,
        "fsdp": arguments.fsdp_plugin_args["fsdp_version"] if arguments.fsdp else None,
        "mismatches": deepspeed.mismatches if deepspeed else [],
    }  # fmt: skip


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("engine", ["zero-3", "fsdp2"])
def test_launchers_read_their_own_options(model, tmp_path, engine, hosts):
    written(tmp_path / "out", request(model, gpus=16, hosts=hosts), planned(engine), based(model))
    words = ["--data", "rows.jsonl", "--set", "max_steps=1"]
    [torchrun] = started(tmp_path, "launch.sh", "torchrun", *words)
    [accelerate] = started(tmp_path, "launch.sh", "accelerate", *words, MACHINE_RANK="1")
    [slurm] = started(tmp_path, "job.slurm", *words, SLURM_SUBMIT_DIR=str(tmp_path / "out"), SLURM_NODEID="1",
                      SLURM_CPUS_PER_TASK="32", SLURM_JOB_NODELIST="host[0-1]")  # fmt: skip
    from torch.distributed.run import get_args_parser

    for line in (torchrun, slurm):
        found = get_args_parser().parse_args(line[1:])
        assert (found.nproc_per_node, found.training_script) == (str(16 // hosts), "train.py")
        assert found.training_script_args == words
    assert ("--master_addr host0 --master_port 29500" in " ".join(slurm)) == (hosts == 2)
    parsed = launch_command_parser().parse_args(accelerate[2:])
    assert (parsed.machine_rank, parsed.training_script, parsed.training_script_args) == (1, "train.py", words)
    if engine == "fsdp2":
        with pytest.raises(subprocess.CalledProcessError):
            started(tmp_path, "launch.sh", "deepspeed", *words)
    else:
        [line] = started(tmp_path, "launch.sh", "deepspeed", *words)
        found = runner.parse_args(line[1:])
        assert (found.num_gpus, found.user_script, found.user_args) == (16 // hosts, "train.py", words)
        assert found.hostfile == ("hostfile" if hosts > 1 else "/job/hostfile")


# --- other models, other data


def test_a_model_without_a_folder_is_asked_for(model, tmp_path):
    asked = request(model)
    for name, known in (("llama2-7b", None), ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"), (str(model), str(model))):
        folder = written(tmp_path / "out", asked, planned("zero-2"), based(name))
        assert known == script_of(folder).MODEL


def test_gpt2s_weights_lie_the_other_way_round(tmp_path):
    GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=64).save_pretrained(tmp_path / "gpt2")
    asked = request(tmp_path / "gpt2", tuning=dataclasses.replace(LORA, target=("c_attn",)))
    folder = written(tmp_path / "out", asked, planned("zero-2"), based(tmp_path / "gpt2"))
    assert script_of(folder).LORA["fan_in_fan_out"] is True


def test_baichuan2_in_full_is_known_to_the_script(tmp_path):
    measured_peak.example_config("baichuan2").save_pretrained(tmp_path / "model")
    asked = request(tmp_path / "model", tuning=FULL)
    folder = written(tmp_path / "out", asked, planned("zero-3"), based(tmp_path / "model"))
    assert "\nimport pardemo.baichuan2 " in (folder / "train.py").read_text()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "has no samples"),
        ('{"text": "w1"}\n{"text"', "line 2 is not JSON"),
        ('{"prompt": "w1"}', "line 1 has no text"),
    ],
)
def test_a_bad_line_is_named(model, tmp_path, text, told):
    folder = written(tmp_path / "out", request(model), planned("zero-2"), based(model))
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=told):
        script_of(folder).Samples(str(tmp_path / "rows.jsonl"), None)


def test_samples_are_cut_where_they_are_too_long(model, tmp_path):
    script = script_of(written(tmp_path / "out", request(model), planned("zero-2"), based(model)))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    long = " ".join(f"w{n}" for n in range(40))
    rows = [{"prompt": long, "completion": "w1 w2"}, {"prompt": "w1", "completion": long}, {"text": long}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    first, second, third = script.Samples(str(tmp_path / "rows.jsonl"), tokenizer)
    assert first["input_ids"][-4:] == [41, 3, 4, 1]  # the completion is whole, and of the prompt the end is left
    assert first["labels"] == [-100] * 29 + [3, 4, 1]
    assert second["labels"] == second["input_ids"] == list(range(2, 34))
    assert third["input_ids"] == list(range(2, 34))


def test_a_line_ends_where_json_lines_end(model, tmp_path):
    script = script_of(written(tmp_path / "out", request(model), planned("zero-2"), based(model)))
    rows = [{"text": "w1\u2028w2"}, {"text": "w1\x85"}]
    text = "".join(json.dumps(one, ensure_ascii=False) + "\r\n" for one in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8", newline="")
    assert script.Samples(str(tmp_path / "rows.jsonl"), None).rows == rows
