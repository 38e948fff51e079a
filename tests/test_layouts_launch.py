"""What ``pardemo plan --search --write`` writes: the layout, in the words of the programs that run it.

Programs that are installed read it with their own code; of Megatron-LM that is megatron-core, since the script that
parses its arguments comes with the repository only.
"""

import ast
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from conftest import says

from pardemo.peers.accelerate import config_checks
from pardemo.peers.deepspeed import deepspeed_settings
from pardemo.planner import hardware, models
from pardemo.planner.layouts import launch, search
from pardemo.planner.layouts.configurations import shape_of_config
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import facts, job_scripts, megatron, torchtitan
from pardemo.planner.layouts.layout import SHARDING, Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.step import stage_layers

DENSE = Layout(
    tp=8, pp=4, dp=32, sharding="zero1", sequence_parallel=True, accumulation=32, chunks=5, recompute="selective"
)
EXPERTS = Layout(tp=2, cp=2, pp=2, dp=16, ep=8, sharding="zero1", sequence_parallel=True, accumulation=4)
SHARDED = Layout(dp=64, sharding="zero3", micro_batch=2, recompute="full")
GROUPS = SHARDED.but(shard_group=8)
ALONE = Layout(tp=2, dp=4, sharding="zero1", sequence_parallel=True, micro_batch=2, accumulation=4)
ONE_STAGE = Layout(tp=2, pp=4, dp=8, sharding="zero3", sequence_parallel=True, accumulation=8, chunks=2)


def job(model: str, layout: Layout, program: str = "megatron-core", **changes) -> Job:
    machine = Machine(hardware.gpu("H100"), layout.gpus, min(8, layout.gpus), 400e9)
    return Job(shape_of_config(models.find(model)), machine, find_program(program), **{"sequence": 8192} | changes)


def written(tmp_path, model, layout, program="megatron-core", **changes) -> dict[str, str]:
    folder = tmp_path / "out"
    names = launch.write_files(folder, job(model, layout, program, **changes), layout, model)
    assert sorted(names) == sorted(path.name for path in folder.iterdir())
    for name in names:
        if (folder / name).read_text(encoding="utf-8").startswith("#!"):
            subprocess.run(["bash", "-n", str(folder / name)], check=True)
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def started(tmp_path: Path, script: str, *arguments: str, **environment: str) -> list[list[str]]:
    """The words of each launcher or srun that a script starts, read by the shell itself."""
    there = tmp_path / "bin"
    there.mkdir(exist_ok=True)
    log = tmp_path / "log"
    log.unlink(missing_ok=True)
    for name in ("torchrun", "accelerate", "deepspeed", "scontrol"):
        noted = f'printf "%s\\0" {name} "$@" >> {log}; echo >> {log}'
        (there / name).write_text(f"#!/bin/bash\n{noted}\necho host0\n")
    (there / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    for path in there.iterdir():
        path.chmod(0o755)
    variables = os.environ | {"PATH": f"{there}:{os.environ['PATH']}"} | environment
    subprocess.run(["bash", script, *arguments], cwd=tmp_path / "out", env=variables, check=True, capture_output=True)
    lines = log.read_text(encoding="utf-8").split("\n")
    return [line.rstrip("\0").split("\0") for line in lines if line and not line.startswith("scontrol")]


def second_host(tmp_path: Path) -> list[str]:
    """The words of the launcher that Slurm's script starts on the second of two hosts."""
    slurm = {"SUBMIT_DIR": str(tmp_path / "out"), "CPUS_PER_TASK": "32", "JOB_NODELIST": "host[0-1]", "NODEID": "1"}
    [words] = started(tmp_path, "slurm.sbatch", **{f"SLURM_{name}": value for name, value in slurm.items()})
    return words


def megatron_arguments(tmp_path: Path, *torchrun: str) -> dict[str, list[str]]:
    [[_, *words]] = started(tmp_path, "megatron.sh", *torchrun)
    first = next(place for place, word in enumerate(words) if word.endswith("pretrain_gpt.py"))
    found: dict[str, list[str]] = {}
    for word in words[first + 1 :]:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            values = found[word] = []
        else:
            values.append(word)
    return found


#: Flags that are not fields of megatron-core's TransformerConfig; arguments.py adds them by name.
OTHERS = {
    "--micro-batch-size", "--global-batch-size", "--seq-length", "--max-position-embeddings", "--swiglu",
    "--position-embedding-type", "--rotary-base", "--untie-embeddings-and-output-weights", "--group-query-attention",
    "--vocab-size", "--make-vocab-size-divisible-by", "--train-iters", "--lr", "--min-lr", "--lr-decay-style",
    "--lr-warmup-iters", "--weight-decay", "--adam-beta1", "--adam-beta2", "--clip-grad", "--log-interval",
    "--log-throughput", "--eval-iters", "--distributed-timeout-minutes", "--use-distributed-optimizer",
    "--overlap-grad-reduce", "--overlap-param-gather", "--mock-data", "--tokenizer-type", "--split",
    "--no-create-attention-mask-in-dataloader", "--num-experts", "--num-layers-per-virtual-pipeline-stage",
    "--use-megatron-fsdp", "--data-parallel-sharding-strategy", "--ckpt-format", "--no-gradient-accumulation-fusion",
    "--num-distributed-optimizer-instances", "--rope-type", "--no-rope-fusion", "--squared-relu", "--use-rope-scaling",
    "--rope-scaling-factor", "--rotary-percent", "--grad-reduce-in-bf16",
}  # fmt: skip


def megatron_configs(arguments: dict[str, list[str]]):
    """megatron-core's own configurations from the arguments, as ``core_transformer_config_from_args`` makes them."""
    import torch
    import torch.nn.functional as F
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if "--multi-latent-attention" in arguments else TransformerConfig
    names = {}
    for field in dataclasses.fields(kind):
        told = field.metadata.get("argparse_meta", {}).get("arg_names", ["--" + field.name.replace("_", "-")])
        names |= dict.fromkeys(told, field)
    values = {}
    for flag, words in arguments.items():
        if flag in OTHERS:
            continue
        field = names[flag]  # KeyError: no such argument
        default = field.default
        if not words:
            values[field.name] = not default
        elif flag in ("--recompute-modules", "--cuda-graph-scope"):
            values[field.name] = words
        elif flag == "--moe-layer-freq":
            values[field.name] = eval(words[0])  # as moe_freq_type does
        else:
            [word] = words
            number = word.replace(".", "").replace("e-", "").isdigit()
            values[field.name] = (float(word) if "." in word or "e" in word else int(word)) if number else word
    pieces = arguments.get("--num-layers-per-virtual-pipeline-stage")
    if pieces:
        each = values["num_layers"] // values["pipeline_model_parallel_size"]
        assert each % int(pieces[0]) == 0
        values["virtual_pipeline_model_parallel_size"] = each // int(pieces[0])
    if "--num-experts" in arguments:
        values["num_moe_experts"] = int(arguments["--num-experts"][0])
    if "--swiglu" in arguments:
        values |= {"gated_linear_unit": True, "activation_func": F.silu}
    if "--no-rope-fusion" in arguments:
        values |= {"rope_type": arguments["--rope-type"][0], "apply_rope_fusion": False}
    whole = kind(**values, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16)
    optimizer = OptimizerConfig(bf16=True, use_distributed_optimizer="--use-distributed-optimizer" in arguments)
    parallel = DistributedDataParallelConfig(
        overlap_grad_reduce="--overlap-grad-reduce" in arguments,
        overlap_param_gather="--overlap-param-gather" in arguments,
        use_distributed_optimizer="--use-distributed-optimizer" in arguments,
        use_megatron_fsdp="--use-megatron-fsdp" in arguments,
        data_parallel_sharding_strategy=arguments.get("--data-parallel-sharding-strategy", ["no_shard"])[0],
        num_distributed_optimizer_instances=int(arguments.get("--num-distributed-optimizer-instances", ["1"])[0]),
    )
    return whole, optimizer, parallel


def same(config, layout: Layout) -> bool:
    exchanged = {"ring": "p2p", "all-to-all": "a2a"}[layout.context] if layout.cp > 1 else None
    return config.cp_comm_type == exchanged and (
        config.tensor_model_parallel_size, config.pipeline_model_parallel_size, config.context_parallel_size,
        config.expert_model_parallel_size, config.virtual_pipeline_model_parallel_size or 1, config.sequence_parallel,
    ) == (layout.tp, layout.pp, layout.cp, layout.ep, layout.chunks, layout.sequence_parallel)  # fmt: skip


def test_a_dense_model_on_a_thousand_gpus(tmp_path):
    files = written(tmp_path, "llama3-70b", DENSE)
    assert list(files) == ["megatron.sh", "slurm.sbatch", "kubernetes.yaml"]  # ZeRO 1, a pipeline of pieces: no other
    arguments = megatron_arguments(tmp_path, "--nnodes", "128")
    assert {"--micro-batch-size": ["1"], "--global-batch-size": ["1024"], "--seq-length": ["8192"]}.items() <= (
        arguments.items()
    )
    config, _, parallel = megatron_configs(arguments)
    assert same(config, DENSE)
    assert (config.num_layers, config.hidden_size, config.num_query_groups, config.ffn_hidden_size) == (
        80,
        8192,
        8,
        28672,
    )
    assert (config.normalization, config.add_bias_linear, config.hidden_dropout) == ("RMSNorm", False, 0.0)
    assert (config.recompute_granularity, config.bf16) == ("selective", True)
    assert parallel.use_distributed_optimizer
    assert parallel.overlap_param_gather
    assert arguments["--rotary-base"] == ["500000"]
    assert "#SBATCH --nodes=128\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in files["slurm.sbatch"]
    assert files["kubernetes.yaml"].count("nvidia.com/gpu: 8") == 2
    assert "replicas: 127" in files["kubernetes.yaml"]


def test_the_vocabulary_is_the_models(tmp_path):
    for words, tp in itertools.product((128256, 32000, 50257, 151936), (1, 2, 4, 8)):
        told = megatron.vocabulary(words, tp)
        unit = told["make-vocab-size-divisible-by"] * tp
        padded = -(-(told["vocab-size"] + 1) // unit) * unit  # NullTokenizer has one word more
        assert padded == words or words % tp, (words, tp)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("llama3.1-405b", Layout(tp=8, pp=16, dp=8, sequence_parallel=True, accumulation=16, sharding="zero1")),
        ("llama3-70b", Layout(tp=8, pp=4, dp=32, sequence_parallel=True, accumulation=8, sharding="zero1", chunks=8)),
        ("llama3-8b", Layout(tp=2, pp=3, dp=1, sequence_parallel=True, accumulation=6)),
    ],
)
def test_layers_that_do_not_divide_are_laid_out_as_planned(tmp_path, model, layout):
    launch.write_files(tmp_path / "out", wanted := job(model, layout), layout, model)
    arguments = megatron_arguments(tmp_path, "--standalone")
    config, *_ = megatron_configs(arguments)
    assert same(config, layout)
    laid = config.pipeline_model_parallel_layout.layout
    counts = [sum(piece.name == "decoder" for part in stage for piece in part) for stage in laid]
    assert counts == stage_layers(wanted, layout)


def test_experts(tmp_path):
    files = written(tmp_path, "mixtral-8x7b", EXPERTS)
    assert list(files) == ["megatron.sh", "slurm.sbatch", "kubernetes.yaml"]
    arguments = megatron_arguments(tmp_path, "--nnodes", "16")
    config, *_ = megatron_configs(arguments)
    assert same(config, EXPERTS)
    assert (config.num_moe_experts, config.moe_router_topk, config.moe_ffn_hidden_size) == (8, 2, 14336)
    assert config.expert_tensor_parallel_size == EXPERTS.etp == 1  # as the planner counts experts
    assert config.moe_token_dispatcher_type == "flex"
    assert config.tp_comm_overlap == (EXPERTS.tp > 1)
    assert config.cuda_graph_impl == "transformer_engine", "as it is planned"
    assert arguments["--rotary-base"] == ["1000000"]


def test_latent_attention_and_layers_without_experts(tmp_path):
    model = "deepseek-v3"
    layout = Layout(tp=1, pp=16, dp=64, ep=64, sharding="zero1", accumulation=16)
    launch.write_files(tmp_path / "out", job(model, layout, sequence=4096), layout, model)
    config, *_ = megatron_configs(megatron_arguments(tmp_path, "--nnodes", "128"))
    assert same(config, layout)
    assert (config.kv_lora_rank, config.q_lora_rank, config.qk_pos_emb_head_dim) == (512, 1536, 64)
    assert config.moe_layer_freq == [0] * 3 + [1] * 58
    assert config.moe_shared_expert_intermediate_size == 2048
    assert (config.moe_router_score_function, config.moe_router_enable_expert_bias) == ("sigmoid", True)
    assert (config.moe_router_num_groups, config.moe_router_group_topk) == (8, 4)
    assert config.moe_router_topk_scaling_factor == 2.5


@pytest.mark.parametrize("layout", [SHARDED, GROUPS])
def test_states_that_are_shared_whole(tmp_path, layout):
    files = written(tmp_path, "llama3-8b", layout, "torchtitan")
    first, *rest = files
    assert first == "torchtitan.toml"
    others = {"torchtitan_config.py", "megatron.sh", "slurm.sbatch", "kubernetes.yaml"}
    assert set(rest) - {"accelerate.yaml", "deepspeed.json"} == others
    assert ("deepspeed.json" in rest) == (layout.shard_group == 0)
    config, _, parallel = megatron_configs(megatron_arguments(tmp_path, "--nnodes", "8"))
    assert same(config, layout)
    assert parallel.data_parallel_sharding_strategy == "optim_grads_params"
    assert parallel.num_distributed_optimizer_instances == layout.replicas // layout.shards
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in files["megatron.sh"]
    found = tomllib.loads(files["torchtitan.toml"])
    degrees = found["parallelism"]
    assert degrees["data_parallel_shard_degree"] == layout.shards
    assert degrees["data_parallel_shard_degree"] * degrees["data_parallel_replicate_degree"] == layout.dp
    assert (found["model"]["name"], found["model"]["flavor"]) == ("llama3", "8B")
    training = found["training"]
    assert (training["local_batch_size"], training["global_batch_size"], training["seq_len"]) == (2, 128, 8192)
    assert found["activation_checkpoint"]["mode"] == "full"


def test_torchtitans_pipeline_is_cut_as_planned(tmp_path):
    found = tomllib.loads(written(tmp_path, "llama3-8b", ONE_STAGE, "torchtitan-compiled")["torchtitan.toml"])
    degrees, training = found["parallelism"], found["training"]
    assert degrees["pipeline_parallel_schedule"] == "Interleaved1F1B"
    sizes = (degrees[f"{name}_degree"] for name in ("data_parallel_shard", "tensor_parallel", "pipeline_parallel"))
    assert tuple(sizes) == (8, 2, 4)
    weights = sum(degrees[f"pipeline_parallel_{place}_stage_less_layers"] for place in ("first", "last"))
    # as pipeline_llm of torchtitan counts its pieces
    assert -(-(32 + weights) // degrees["pipeline_parallel_layers_per_stage"]) == ONE_STAGE.pp * ONE_STAGE.chunks
    assert training["local_batch_size"] // degrees["pipeline_parallel_microbatch_size"] == ONE_STAGE.accumulation
    assert training["global_batch_size"] == training["local_batch_size"] * ONE_STAGE.dp == ONE_STAGE.batch
    assert found["compile"]["enable"]


def read_python(text: str, monkeypatch) -> dict[str, dict]:
    """What ``torchtitan_config.py`` calls with which keywords, with stand-ins for torchtitan's modules."""
    tree, modules = ast.parse(text), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            modules[node.module] = mock.MagicMock()
            monkeypatch.setitem(sys.modules, node.module, modules[node.module])
    names: dict = {}
    exec(compile(tree, "torchtitan_config.py", "exec"), names)
    names["planned"]()
    called = {"registry": next(value for name, value in modules.items() if ".models." in name and "common" not in name)}
    found = {"flavor": called["registry"].model_registry.call_args.args[0]}
    for name in ("TrainingConfig", "ParallelismConfig", "CompileConfig"):
        found[name] = getattr(modules["torchtitan.config"], name).call_args.kwargs
    whole = modules["torchtitan.trainer"].Trainer.Config.call_args.kwargs
    return found | {"recompute": whole["activation_checkpoint"], "registry": called["registry"].model_registry}


@pytest.mark.parametrize(
    ("layout", "program"),
    [(SHARDED, "torchtitan"), (GROUPS, "torchtitan"), (ONE_STAGE, "torchtitan-compiled"),
     (Layout(dp=16, cp=4, sharding="zero3", accumulation=2), "torchtitan")],
)  # fmt: skip
def test_torchtitans_python_says_what_its_toml_says(tmp_path, monkeypatch, layout, program):
    """The field's names were tried by hand with the classes of that commit."""
    files = written(tmp_path, "llama3-8b", layout, program)
    toml, found = tomllib.loads(files["torchtitan.toml"]), read_python(files["torchtitan_config.py"], monkeypatch)
    training, degrees = found["TrainingConfig"], dict(found["ParallelismConfig"])
    assert training["max_context_length"] == toml["training"]["seq_len"] == 8192
    assert training["num_tokens_per_microbatch_per_dp_rank"] == layout.micro_batch * 8192
    assert training["num_tokens_per_train_step"] == toml["training"]["global_batch_size"] * 8192
    assert training["disable_cuda_graphs"]
    assert degrees.pop("num_pp_microbatches", 1) == (layout.accumulation if layout.pp > 1 else 1)
    assert degrees.pop("context_parallel_load_balancer", None) == ("ptrr" if layout.cp > 1 else None)
    assert degrees == {key: value for key, value in toml["parallelism"].items() if "microbatch" not in key}
    assert found["flavor"] == toml["model"]["flavor"] == "8B"
    assert found["CompileConfig"]["enable"] == toml["compile"]["enable"]
    assert (found["recompute"] is None) == (layout.recompute == "none")
    assert "# for torchtitan's main branch at b5bcd76c6 (2026-08-21)" in files["torchtitan_config.py"]
    assert "up to 0.2.2" in files["torchtitan.toml"]


def test_a_job_takes_the_configuration_that_its_torchtitan_reads(tmp_path):
    layout = Layout(dp=16, sharding="zero3")
    written(tmp_path, "llama3-8b", layout, "torchtitan")
    there = tmp_path / "out" / "torchtitan"
    for file, told in (
        ("job_config.py", ["--job.config_file", str(tmp_path / "out" / "torchtitan.toml")]),
        ("configs.py", ["--module", "torchtitan_config", "--config", "planned"]),
    ):
        (there / "torchtitan" / "config").mkdir(parents=True, exist_ok=True)
        (there / "torchtitan" / "config" / file).touch()
        words = second_host(tmp_path)
        assert words[words.index("torchtitan.train") + 1 :] == told


def test_experts_that_torchtitans_main_branch_cannot_cut_have_the_toml_alone(tmp_path):
    layout = Layout(tp=2, dp=8, sharding="zero3", sequence_parallel=True)
    files = written(tmp_path, "qwen3-30b-a3b", layout, "torchtitan")
    assert "torchtitan_config.py" not in files
    assert "is not there: torchtitan's main branch cuts no experts by ETP 1" in files["torchtitan.toml"]


@pytest.mark.parametrize(
    ("ep", "etp", "cuts"), [(1, 1, False), (1, 2, True), (2, 1, True), (2, 2, False), (4, 1, True)]
)
def test_torchtitans_main_branch_cuts_experts_by_tp_without_ep_alone(ep, etp, cuts):
    layout = Layout(tp=2, dp=8, ep=ep, etp=etp, sharding="zero3", sequence_parallel=True)
    told = torchtitan.python_why_not(job("qwen3-30b-a3b", layout, "torchtitan"), layout)
    assert told == (None if cuts else f"torchtitan's main branch cuts no experts by ETP {etp} beside EP {ep} and TP 2")


def test_a_flavor_that_torchtitan_lacks_is_said(tmp_path):
    text = written(tmp_path, "llama2-70b", SHARDED.but(dp=512), "torchtitan", sequence=4096)["torchtitan.toml"]
    assert says(text, "'llama2-70b'")
    assert tomllib.loads(text)["model"]["flavor"] == "llama2-70b"


def test_one_host(tmp_path):
    files = written(tmp_path, "llama3-8b", ALONE, "nanotron")
    assert list(files) == ["nanotron.yaml", "megatron.sh", "slurm.sbatch", "kubernetes.yaml"]
    found = yaml.safe_load(files["nanotron.yaml"])
    degrees, tokens, optimizer = found["parallelism"], found["tokens"], found["optimizer"]
    assert degrees["dp"] * degrees["tp"] * degrees["pp"] == 8
    assert (degrees["tp_mode"], degrees["pp_engine"]) == ("REDUCE_SCATTER", "1f1b")
    assert tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * degrees["dp"] == ALONE.batch
    assert (optimizer["zero_stage"], optimizer["accumulate_grad_in_fp32"]) == (1, True)
    assert isinstance(found["model"]["model_config"]["rms_norm_eps"], float)
    assert found["model"]["model_config"]["num_key_value_heads"] == 8
    words = second_host(tmp_path)
    assert words[:4] == ["torchrun", "--nproc_per_node", "8", "--standalone"]
    job_ = yaml.safe_load(files["kubernetes.yaml"])
    assert set(job_["spec"]["pytorchReplicaSpecs"]) == {"Master"}
    [words] = started(tmp_path, "megatron.sh")
    assert "--standalone" in words


@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "zero3"])
def test_zero_alone_is_deepspeeds(tmp_path, monkeypatch, sharding):
    from deepspeed.runtime import config

    layout = Layout(dp=16, sharding=sharding, micro_batch=2, accumulation=3)
    files = written(tmp_path, "llama3-8b", layout, "llm-foundry")
    assert next(iter(files)) == "accelerate.yaml"
    monkeypatch.setattr(config_checks, "most_processes", lambda: 8)
    found = config_checks.read_config(tmp_path / "out" / "accelerate.yaml")  # checks deepspeed.json too
    assert (found["num_processes"], found["num_machines"]) == (16, 2)
    assert load_config_from_file(str(tmp_path / "out" / "accelerate.yaml")).num_processes == 16
    settings = json.loads(files["deepspeed.json"])
    deepspeed_settings.check_settings(settings, 16)
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 16)
    read = config.DeepSpeedConfig(settings)
    assert (read.train_batch_size, read.gradient_accumulation_steps) == (layout.batch, 3)
    assert read.zero_config.stage == SHARDING.index(sharding)
    words = second_host(tmp_path)
    first = "accelerate launch --config_file accelerate.yaml --num_machines 2 --machine_rank 1"
    rest = f"--main_process_ip host0 --main_process_port 29500 {tmp_path / 'out' / 'train.py'}"
    assert words == f"{first} {rest}".split()


@pytest.mark.parametrize("program", ["megatron-core", "torchtitan", "nanotron"])
def test_slurm_and_kubernetes_start_the_same_on_every_host(tmp_path, program):
    layout = Layout(dp=16, sharding="zero3" if program == "torchtitan" else "zero1")
    files = written(tmp_path, "llama3-8b", layout, program)
    (tmp_path / "out" / "torchtitan").mkdir()
    words = second_host(tmp_path)
    head = ["torchrun", "--nproc_per_node", "8", "--nnodes", "2", "--node_rank", "1", "--master_addr", "host0"]
    assert words[: len(head)] == head
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n" in files["slurm.sbatch"]
    found = yaml.safe_load(files["kubernetes.yaml"])
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == (
        "kubeflow.org/v1",
        "PyTorchJob",
        "llama3-8b",
    )
    roles = found["spec"]["pytorchReplicaSpecs"]
    assert {role: one["replicas"] for role, one in roles.items()} == {"Master": 1, "Worker": 1}
    [container] = roles["Worker"]["template"]["spec"]["containers"]
    assert (container["name"], container["resources"]["limits"]) == ("pytorch", {"nvidia.com/gpu": 8})
    (tmp_path / "out" / "pod.sh").write_text(container["command"][2], encoding="utf-8")
    variables = {one["name"]: one["value"].replace("/workspace", str(tmp_path / "out")) for one in container["env"]}
    [there] = started(tmp_path, "pod.sh", RANK="1", MASTER_ADDR="host0", MASTER_PORT="29500", **variables)
    assert there == words


def test_who_can_run_a_layout_is_told_without_writing():
    wanted, config = job("llama3-8b", GROUPS), models.find("llama3-8b")
    found = launch.why_not_by_file(wanted, GROUPS, facts.model_of(config, wanted.shape, "llama3-8b"))
    assert [name for name, reason in found.items() if reason is None] == ["megatron.sh", "torchtitan.toml"]


def test_a_program_that_cannot_is_left_out_and_said(tmp_path):
    files = written(tmp_path, "llama3-70b", DENSE, "torchtitan")
    assert "torchtitan.toml" not in files
    for name in ("slurm.sbatch", "kubernetes.yaml"):
        assert "# torchtitan.toml is not there: torchtitan has no zero1" in files[name]
        assert "megatron.sh" in files[name]


def test_what_cannot_run_is_refused_in_one_line(tmp_path):
    zero_bubble = DENSE.but(schedule="zb-h1", chunks=1)
    with pytest.raises(ValueError, match=r"TP8.*zb-h1.*schedule") as told:
        launch.write_files(tmp_path / "out", job("llama3-70b", zero_bubble), zero_bubble, "llama3-70b")
    assert "\n" not in str(told.value)
    with pytest.raises(ValueError, match=r"1024.*GPUs.*8"):
        launch.write_files(tmp_path / "out", job("llama3-70b", ALONE), DENSE, "llama3-70b")
    odd = Layout(dp=12, sharding="zero1")
    with pytest.raises(ValueError, match=r"12.*GPUs.*8"):
        launch.write_files(tmp_path / "out", job("llama3-8b", odd), odd, "llama3-8b")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_there_stays(tmp_path):
    wanted = job("llama3-70b", DENSE)
    names = launch.write_files(tmp_path / "out", wanted, DENSE, "llama3-70b")
    assert launch.write_files(tmp_path / "out", wanted, DENSE, "llama3-70b") == names  # the same again is no loss
    (tmp_path / "out" / "slurm.sbatch").write_text("mine", encoding="utf-8")
    (tmp_path / "out" / "megatron.sh").unlink()
    with pytest.raises(ValueError, match=r"slurm.sbatch"):
        launch.write_files(tmp_path / "out", wanted, DENSE, "llama3-70b")
    assert (tmp_path / "out" / "slurm.sbatch").read_text(encoding="utf-8") == "mine"
    assert not (tmp_path / "out" / "megatron.sh").exists()


def test_megatron_core_would_refuse_what_is_not_written():
    """The guard has teeth: its own checks do refuse a layout that does not divide."""
    from megatron.core.transformer import TransformerConfig

    with pytest.raises(ValueError, match="must be a multiple"):
        TransformerConfig(num_layers=4, hidden_size=48, num_attention_heads=6, tensor_model_parallel_size=4)


def test_models_facts():
    def model(name):
        config = models.find(name)
        return facts.model_of(config, shape_of_config(config), name)

    llama = model("llama3.1-8b")
    assert (llama.theta, llama.rms, llama.positions, llama.like_llama) == (5e5, True, "rope", True)
    qwen = model("qwen2.5-7b")
    assert (qwen.query_bias, qwen.like_llama, torchtitan.name_of(qwen)) == (True, False, None)
    assert model("qwen3-8b").query_norm
    gpt = model("gpt2")
    assert (gpt.positions, gpt.longest, gpt.rms, gpt.linear_bias) == ("learned", 1024, False, True)
    baichuan = model("baichuan2-13b")
    assert baichuan.positions == "other"
    assert len(megatron.left_out(baichuan)) == 2  # its positions and its head
    assert megatron.why_not(job("gpt2", ALONE), ALONE, gpt) == "1024 learned positions are fewer than 8192 tokens"


@pytest.mark.parametrize("model", ["llama3-8b", "qwen2.5-7b", "qwen3-8b", "baichuan2-7b"])
def test_every_layout_of_a_search_is_one_that_megatron_core_takes(model):
    """All ways to cut a small job: each is written by some program, and megatron-core builds its configuration."""
    machine = Machine(hardware.gpu("H100"), 16, 8, 400e9)
    wanted = Job(shape := shape_of_config(config := models.find(model)), machine, find_program("megatron-core"), 4096)
    described, seen = facts.model_of(config, shape, model), set()
    for layout in search.layouts(shape, machine, 32, 4096):
        key = (layout.tp, layout.pp, layout.cp, layout.chunks, layout.sharding, layout.shard_group, layout.recompute,
               layout.context)  # fmt: skip
        if not wanted.program.can_run(layout) or key in seen or len(seen) > 400:
            continue
        seen.add(key)
        if (why := megatron.why_not(wanted, layout, described)) is not None:
            assert "key-value heads" in why
            continue
        groups = megatron.flags(wanted, layout, described).values()
        flat = {name: value for group in groups for name, value in group.items()}
        made, _, parallel = megatron_configs({f"--{n}": [] if v is True else [str(v)] for n, v in flat.items()})
        assert same(made, layout), layout
        strategy = {"zero2": "optim_grads", "zero3": "optim_grads_params"}.get(layout.sharding, "no_shard")
        assert parallel.data_parallel_sharding_strategy == strategy, layout
    assert {key[4] for key in seen} == {"zero1", "zero2", "zero3", "none"}
    assert {key[-1] for key in seen} == {"ring", "all-to-all"}


def test_labels_and_resources():
    assert job_scripts.label("Qwen/Qwen2.5_7B ") == "qwen-qwen2-5-7b"
    assert job_scripts.label("模型") == "pardemo"
    assert [job_scripts.resource(name) for name in ("H100", "MI300X", "Ascend-910B")] == [
        "nvidia.com/gpu", "amd.com/gpu", "huawei.com/Ascend910",
    ]  # fmt: skip


def test_activations_that_wait_on_the_host(tmp_path):
    layout = Layout(dp=64, sharding="zero3", micro_batch=2, offloaded_layers=20)
    files = written(tmp_path, "llama3-70b", layout)
    assert list(files) == ["megatron.sh", "slurm.sbatch", "kubernetes.yaml"], "no other program offloads layer by layer"
    config, *_ = megatron_configs(megatron_arguments(tmp_path, "--nnodes", "8"))
    assert (config.cpu_offloading, config.cpu_offloading_num_layers) == (True, 20)
    pipeline = Layout(tp=8, pp=2, dp=4, sequence_parallel=True, accumulation=4, offloaded_layers=4)
    with pytest.raises(ValueError, match=r"offloads.*activations"):
        launch.texts(job("llama3-70b", pipeline), pipeline, "llama3-70b")


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "nvfp4"])
def test_products_in_few_bits(tmp_path, precision):
    wanted = job("llama3-70b", DENSE)
    wanted = dataclasses.replace(
        wanted, machine=dataclasses.replace(wanted.machine, gpu=hardware.gpu("B200")), precision=precision
    )
    launch.write_files(tmp_path / "out", wanted, DENSE, "llama3-70b")
    config, *_ = megatron_configs(megatron_arguments(tmp_path, "--nnodes", "128"))
    told = {"fp8": ("hybrid", "tensorwise", None), "mxfp8": ("e4m3", "mxfp8", None), "nvfp4": (None, None, "e2m1")}
    fp8, recipe, fp4 = told[precision]
    assert (config.fp8, config.fp4) == (fp8, fp4)
    assert recipe is None or config.fp8_recipe == recipe
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"megatron.sh", "slurm.sbatch", "kubernetes.yaml"}, (
        "no other program was planned with these products"
    )
