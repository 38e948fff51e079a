"""``pardemo plan``: what it refuses, what it recommends, what it writes, and what others make of that."""

import json
import os
import subprocess
import sys
import warnings

import pytest
from conftest import gone, says
from transformers import CONFIG_MAPPING

from pardemo.cli import main
from pardemo.planner import hardware, models
from pardemo.planner.dry_run import engines, measured_peak
from pardemo.planner.estimate import FULLEST
from pardemo.planner.fine_tune import plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.tuning import Tuning


def two_layers():
    config = measured_peak.example_config("llama")
    config.num_hidden_layers = 2
    return config


def request(gpus=4, room=None, config=None, **changes):
    job = measured_peak.example_job("llama", "plain", 1, True, True)
    job = job.but(config=config or two_layers(), on_gpu=True, zero=measured_peak.BUCKETS)
    gpu = hardware.gpu("A800-80GB")
    if room is not None:
        gpu = hardware.Gpu("toy", room, gpu.flops, gpu.memory_bytes_per_s, gpu.link_bytes_per_s, "made up")
    return plan_table.Request(job, Machine(gpu, gpus), **{"samples_per_step": 32, "steps": 10, "price": 2.0, **changes})


@pytest.fixture(scope="module")
def found():
    return plan_table.plan(request(engines=("zero-0", "zero-2", "zero-3", "fsdp2"), checkpointing=(True,)))


def test_the_table_has_every_way(found):
    assert {row.layout.micro_batch for row in found.rows} == {1, 2, 4, 8}
    assert {(row.engine, row.layout.host_states) for row in found.rows} == {
        ("zero-0", "none"), ("zero-2", "none"), ("zero-2", "optimizer"), ("zero-3", "none"), ("zero-3", "optimizer"),
        ("zero-3", "optimizer+parameters"), ("fsdp2", "none"),
    }  # fmt: skip
    for row in found.rows:
        assert row.layout.batch == 32
        assert row.hours == pytest.approx(10 * row.seconds / 3600)  # 10 steps
        assert row.money == pytest.approx(row.hours * 4 * 2.0)
        assert row.step.tokens_per_s == pytest.approx(32 * 128 / 4 / row.seconds)


def test_fsdp2_is_compared_but_not_recommended_beside_zero(found):
    rows = {row.engine: row for row in found.rows if row.layout.micro_batch == 8 and row.layout.host_states == "none"}
    assert found.best.engine != "fsdp2"
    alone = plan_table.Plan(found.request, [rows["fsdp2"]])
    assert alone.best is rows["fsdp2"]


def test_nothing_fits_names_the_smallest_cluster(monkeypatch):
    monkeypatch.setattr(plan_table, "MOST_EXPONENT", 2)
    monkeypatch.setattr(plan_table, "least_bytes", lambda request, gpus, *_: 1e9 / gpus)
    tight = request(gpus=1, room=0.3e9 / FULLEST, engines=("zero-0",), checkpointing=(True,), batches=(8,))
    plan = plan_table.plan(tight)
    assert plan.best is None
    assert plan_table.explain_best(plan) == "nothing fits"
    assert says(plan_table.smallest_cluster(tight), "smallest", "4")
    monkeypatch.setattr(plan_table, "MOST_EXPONENT", 1)
    assert says(plan_table.smallest_cluster(tight), "even", "2")


def test_gpus_that_are_enough_are_not_told_as_too_few(monkeypatch):
    """8 samples at once do not fit one GPU, and two would: what was asked for is in the way, not the cluster."""
    monkeypatch.setattr(plan_table, "least_bytes", lambda request, gpus, *_: 0.2e9)
    tight = request(gpus=1, room=0.3e9 / FULLEST, engines=("zero-0",), checkpointing=(True,), batches=(8,))
    assert plan_table.plan(tight).best is None
    told = plan_table.smallest_cluster(tight)
    assert says(told, "GPUs", "1", "--batch")
    assert "smallest cluster" not in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tp": 3}, "do not divide by tp 3"),
        ({"gpus": 3, "tp": 3, "samples_per_step": 30}, "4 attention heads do not divide by --tp 3; 1, 2 would do"),
        ({"pp": 4, "gpus": 4, "tp": 1, "samples_per_step": 0}, "samples_per_step must be a whole number of at least 1"),
        ({"gpus": 6, "pp": 3}, "2 layers do not divide by --pp 3"),
        ({"samples_per_step": 30}, "30 samples a step do not divide over 4"),
        ({"gpus": 1, "engines": ("zero-3",)}, "ZeRO 3 shards over data-parallel ranks, and there is one"),
        ({"gpus": 0}, "must be a whole number of at least 1, not 0"),
        ({"gpus": 100_000, "samples_per_step": 100_000}, "100,000 data-parallel ranks; at most 16,384"),
        ({"batches": (5,)}, "a micro-batch of 5 does not divide a rank's 8 samples of a step"),
    ],
)
def test_contradictions(changes, told):
    with pytest.raises(ValueError, match=told):
        request(**changes)


def test_remote_code_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(ValueError, match=r"needs.*pardemo"):
        models.find(str(tmp_path))
    path.write_text("{}")
    with pytest.raises(ValueError, match="has no model_type"):
        models.find(str(path))


@pytest.mark.parametrize(
    ("hub", "name"),
    [
        ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "qwen2.5-0.5b"),
        ("Qwen/Qwen3-8B-Base", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-2-13b-chat-hf", "llama2-13b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("baichuan-inc/Baichuan2-13B-Chat", "baichuan2-13b"),
        ("openai-community/gpt2", "gpt2"),
    ],
)
def test_built_in_models_are_found_by_their_name_on_the_hub(hub, name):
    assert models.find(hub).to_dict() == models.find(name).to_dict()


@pytest.mark.parametrize(
    ("hub", "near"),
    [
        ("mistralai/Mistral-7B-v0.1", "mistral-7b"),  # another vocabulary
        ("Qwen/Qwen2.5-Coder-7B", "qwen2.5-"),
        ("somebody/Llama-3.1-8B", "llama3.1-8b"),
        ("Qwen/Llama-3.1-8B", "llama3.1-8b"),
    ],
)
def test_other_models_of_the_hub_are_refused_with_the_nearest(hub, near):
    with pytest.raises(ValueError, match=f"no model '{hub}'; did you mean .*{near}") as refused:
        models.find(hub)
    assert "\n" not in str(refused.value)


def test_a_folder_of_a_name_on_the_hub_comes_before_the_built_in_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen" / "Qwen2.5-7B").mkdir(parents=True)
    text = json.dumps({"model_type": "qwen2", "num_hidden_layers": 3})
    (tmp_path / "Qwen" / "Qwen2.5-7B" / "config.json").write_text(text)
    assert models.find("Qwen/Qwen2.5-7B").num_hidden_layers == 3


def test_official_baichuan_needs_no_remote_code(tmp_path):
    sizes = {"hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 125696}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "baichuan", "auto_map": {"AutoConfig": "x.Y"}, **sizes}))
    assert models.find(str(tmp_path)).position_embedding == "alibi"


#: Parameters in 10⁹, as the models' pages on Hugging Face give them (of their safetensors files).
PUBLISHED = {
    "baichuan2-7b": 7.506, "baichuan2-13b": 13.897, "gpt2": 0.124,
    "llama2-7b": 6.738, "llama2-13b": 13.016, "llama2-70b": 68.977, "llama3-8b": 8.030, "llama3-70b": 70.554,
    "llama3.1-8b": 8.030, "llama3.1-70b": 70.554, "llama3.1-405b": 405.853, "llama3.2-1b": 1.236, "llama3.2-3b": 3.213,
    "mistral-7b": 7.248, "qwen2.5-0.5b": 0.494, "qwen2.5-1.5b": 1.544, "qwen2.5-3b": 3.086, "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764, "qwen2.5-72b": 72.706,
    "qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.768, "qwen3-32b": 32.762,
    "phi-4": 14.660, "phi-4-mini": 3.836, "mistral-small-24b": 23.572,
}  # fmt: skip
#: The same of models whose layers differ; what sees and what predicts further tokens is taken off where it is counted.
PUBLISHED_MIXED = {
    "qwen3-30b-a3b": 30.5, "qwen3-235b-a22b": 235.1, "mixtral-8x7b": 46.7, "mixtral-8x22b": 140.6, "deepseek-v3": 671,
    "kimi-k2": 1026, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "glm-4.5": 353, "glm-4.5-air": 106.9,
    "llama4-scout": 107.8, "llama4-maverick": 400.7, "gemma3-1b": 1.0, "gemma3-4b": 3.88, "gemma3-12b": 11.77,
    "gemma3-27b": 27.01,
}  # fmt: skip


def test_every_built_in_model_has_its_published_size():
    """On the meta device, with two layers and with three: the rest is the number of layers."""
    assert set(PUBLISHED) | set(PUBLISHED_MIXED) == set(configurations.MODELS)
    for name, billions in PUBLISHED.items():
        layers = models.find(name).num_hidden_layers
        two, three = (parameters_of(name, count) for count in (2, 3))
        assert (two + (layers - 2) * (three - two)) / 1e9 == pytest.approx(billions, abs=0.0006), name
    for name, billions in PUBLISHED_MIXED.items():
        assert configurations.shape_of_config(models.find(name)).params / 1e9 == pytest.approx(billions, rel=0.004), (
            name
        )


def parameters_of(name, layers):
    config = models.find(name)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    return sum(p.numel() for p in engines.outline(RankJob(config, sequence=8)).parameters())


def small_config(tmp_path, kind, **values):
    CONFIG_MAPPING[kind](**values).save_pretrained(tmp_path / kind)
    return str(tmp_path / kind)


TEXT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 128, "vocab_size": 512, "head_dim": 16}  # fmt: skip


def test_of_a_model_that_sees_the_language_model_is_planned(tmp_path):
    """Gemma 3's sizes stand in its text_config."""
    config = models.find(small_config(tmp_path, "gemma3", text_config=TEXT))
    assert (config.model_type, config.num_attention_heads) == ("gemma3_text", 4)
    asked = request(config=config, tp=2, engines=("zero-0",), checkpointing=(True,), batches=(1,))
    assert plan_table.plan(asked).best.layout.micro_batch == 1


@pytest.mark.parametrize(
    ("kind", "values", "told"),
    [
        ("qwen2_5_vl", {"text_config": TEXT}, "qwen2_5_vl_text: no causal language model"),
        ("mamba", {"hidden_size": 64, "num_hidden_layers": 2}, "mamba has no attention heads"),
    ],
)
def test_a_model_that_cannot_be_planned_is_one_line(tmp_path, capsys, kind, values, told):
    assert main(["plan", "--model", small_config(tmp_path, kind, **values), "--zero", "0", "--batch", "1"]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if not line.endswith("…")]
    assert len(error) == 1
    assert told in error[0]


@pytest.mark.parametrize(
    ("kind", "target"),
    [("gpt2", ("c_attn",)), ("llama", ("q_proj", "v_proj")), ("qwen3", ("q_proj", "v_proj")),
     ("gpt_neox", ("query_key_value",)), ("phi3", ("qkv_proj",))],
)  # fmt: skip
def test_lora_goes_where_peft_puts_it_in_each_architecture(kind, target):
    """GPT-2's c_attn is a Conv1D, whose weight is [in, out]."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    config = CONFIG_MAPPING[kind](**sizes, pad_token_id=0)
    assert models.lora_target(config) == target
    with warnings.catch_warnings(action="error"):
        module = engines.outline(RankJob(config, sequence=8, tuning=Tuning(2, models.lora_target(config))))
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * len(target), "A and B of each, in two layers"
    assert all(any(f".{one}.lora_" in name for one in target) for name in trained)


KILLED = """
import time
from pardemo.planner.dry_run import memory_curve
if __name__ == "__main__":
    worker = memory_curve.worker()
    worker.submit(time.sleep, 0).result()
    print(*worker._processes, flush=True)
    time.sleep(60)
"""


def test_a_dry_run_beside_a_page_ends_with_a_killed_kernel(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(KILLED)
    kernel = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    (pid,) = kernel.stdout.readline().split()
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()
    assert gone([int(pid)])


@pytest.mark.nightly
def test_a_dry_run_whose_kernel_was_killed_before_it_began_ends_too():
    prepare = f"memory_curve.prepare_worker({os.getppid()})"
    other = f"from pardemo.planner.dry_run import memory_curve; {prepare}; print('goes on')"
    begun = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, timeout=120, check=False)
    assert (begun.returncode, begun.stdout) == (1, "")
