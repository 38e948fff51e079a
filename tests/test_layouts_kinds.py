"""Kinds of models: each configuration's parameters are those of the model that Transformers makes of it, one by one."""

import json

import pytest
from transformers import CONFIG_MAPPING

from pardemo.cli import main
from pardemo.planner import hardware, models
from pardemo.planner.dry_run.engines import outline
from pardemo.planner.job import RankJob
from pardemo.planner.layouts import configurations, programs
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.shape import Layer
from pardemo.planner.layouts.step import predict_step

SIZES = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 384, "vocab_size": 1000, "pad_token_id": 0,
}  # fmt: skip
ROUTED = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "kv_lora_rank": 48, "q_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_group": 1, "topk_group": 1, "num_key_value_heads": 8,
}  # fmt: skip
INDEXED = LATENT | {"index_n_heads": 4, "index_head_dim": 32, "index_topk": 64}
DELTA = {
    "linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 24, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_expand": 2,
}  # fmt: skip
#: Nemotron 3 Super's layers with the sizes of a small model, and DeepSeek-V4's.
NEMOTRON = {
    "hybrid_override_pattern": "MEM*E-", "mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 24,
    "n_groups": 2, "conv_kernel": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 96,
    "moe_shared_expert_intermediate_size": 192, "moe_latent_size": 64,
}  # fmt: skip
DEEPSEEK_V4 = {
    "num_hidden_layers": 5, "num_key_value_heads": 1, "q_lora_rank": 64, "o_groups": 4, "o_lora_rank": 48,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 96, "hc_mult": 4, "sliding_window": 128, "compress_ratios": [128, 128, 4, 128, 0],
}  # fmt: skip
GEMMA4 = {
    "hidden_size_per_layer_input": 0, "global_head_dim": 64, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
    "sliding_window": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}  # fmt: skip
MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
QWEN = ROUTED | DELTA | {"layer_types": MIXED, "shared_expert_intermediate_size": 64}
KINDS = [
    ("llama", {}), ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {}), ("mixtral", {"num_local_experts": 4}), ("qwen2", {}), ("qwen2_moe", ROUTED),
    ("qwen2_moe", ROUTED | {"mlp_only_layers": [0], "shared_expert_intermediate_size": 200}),
    ("qwen3", {}), ("qwen3", {"attention_bias": True}), ("qwen3_moe", ROUTED), ("phi3", {}),
    ("gpt2", {"n_embd": 256, "n_layer": 3, "n_head": 8, "n_positions": 64}), ("gemma2", {}), ("gemma3_text", {}),
    ("olmo2", {}), ("olmo3", {}), ("gpt_oss", {"num_local_experts": 4}), ("deepseek_v3", LATENT),
    ("deepseek_v3", LATENT | {"q_lora_rank": None}),
    ("glm4_moe", {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True}),
    ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 512, "interleave_moe_layer_step": 2}),
    # the kinds of 2026
    ("deepseek_v32", INDEXED), ("glm_moe_dsa", INDEXED | {"indexer_types": ["full", "shared", "shared", "full"]}),
    ("deepseek_v4", DEEPSEEK_V4), ("nemotron_h", NEMOTRON),
    ("nemotron_h", NEMOTRON | {"moe_latent_size": None, "use_conv_bias": False}),
    ("qwen3_next", QWEN),
    ("qwen3_5_text", DELTA | {"layer_types": MIXED}),
    ("qwen3_5_moe_text", QWEN),
    ("olmo_hybrid", DELTA | {"layer_types": MIXED}),
    ("bamba", MAMBA | {"attn_layer_indices": [2]}),
    ("granitemoehybrid", MAMBA | {"num_local_experts": 4, "shared_intermediate_size": 64, "layer_types": MIXED}),
    ("granitemoehybrid", MAMBA | {"num_local_experts": 0, "shared_intermediate_size": 640, "layer_types": MIXED}),
    ("gemma4_text", GEMMA4), ("gemma4_text", GEMMA4 | {"attention_k_eq_v": False, "attention_bias": False}),
    ("gemma4_text", GEMMA4 | ROUTED | {"enable_moe_block": True, "top_k_experts": 2}),
    ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    ("lfm2_moe", ROUTED | {"num_dense_layers": 1, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
]  # fmt: skip


#: Some of the kinds whose biases and norms are counted from the model.
COUNTED = [
    ("starcoder2", {}), ("cohere2", {}), ("exaone4", {}), ("olmoe", {"num_experts": 8}),
    ("minimax_m2", {"num_local_experts": 8}),
    ("apertus", {}), ("nanochat", {}), ("ernie4_5_moe", ROUTED | {"moe_num_experts": 8}),
]  # fmt: skip


def config_of(kind, more):
    return CONFIG_MAPPING[kind](**(more if kind == "gpt2" else SIZES | more))


def real(config):
    return sum(parameter.numel() for parameter in outline(RankJob(config, sequence=8)).parameters())


@pytest.mark.parametrize(("kind", "more"), KINDS)
def test_parameters_are_the_models_one_by_one(kind, more):
    config = config_of(kind, more)
    assert configurations.shape_of_config(config).params == real(config)


def test_each_kind_that_is_said_to_be_exact_is_held_to_its_model():
    assert set(configurations.KINDS["exact"]) - {"baichuan"} == {kind for kind, _ in KINDS}
    assert set(configurations.KINDS["says_all"]) <= set(configurations.KINDS["exact"])


@pytest.mark.parametrize(("kind", "more"), COUNTED)
def test_what_is_not_known_of_a_kind_is_counted_from_its_model(kind, more, tmp_path):
    config_of(kind, more).save_pretrained(tmp_path)
    read = models.find(str(tmp_path))
    assert configurations.shape_of_config(read).params == real(read)


@pytest.mark.parametrize(
    ("kind", "more", "told"),
    [("jetmoe", {"kv_channels": 32, "num_local_experts": 4}, "a layer of it has parts that are not planned"),
     ("gemma3n_text", {"num_kv_shared_layers": 0}, "gemma3n_text has no one size for all its layers")],
)  # fmt: skip
def test_a_model_with_parts_that_no_plan_has_is_refused_in_one_line(kind, more, told, tmp_path, capsys):
    config_of(kind, more).save_pretrained(tmp_path)
    assert main(["plan", "--search", "--model", str(tmp_path), "--gpus", "8", "--gpu", "H100"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


#: As their makers published them; sizes of Nemotron 3 are those of the config.json on Hugging Face.
ULTRA = {
    "hybrid_override_pattern": "M" * 48 + "E" * 48 + "*" * 12, "hidden_size": 8192, "num_attention_heads": 64,
    "num_key_value_heads": 2, "mamba_num_heads": 256, "n_routed_experts": 512, "num_experts_per_tok": 22,
    "moe_intermediate_size": 5120, "moe_latent_size": 2048, "moe_shared_expert_intermediate_size": 10240,
}  # fmt: skip
SUPER = ULTRA | {
    "hybrid_override_pattern": "M" * 40 + "E" * 40 + "*" * 8, "hidden_size": 4096, "num_attention_heads": 32,
    "mamba_num_heads": 128, "moe_intermediate_size": 2688, "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
}  # fmt: skip
PRO = {
    "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
    "n_routed_experts": 384, "moe_intermediate_size": 3072, "index_topk": 1024,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "billions", "active"),
    [("deepseek_v4", {}, 284, 13), ("deepseek_v4", PRO, 1600, 49), ("nemotron_h", SUPER, 120, 12),
     ("nemotron_h", ULTRA, 550, 55)],
)  # fmt: skip
def test_models_of_2026_have_their_published_sizes(kind, sizes, billions, active):
    shape = configurations.shape_of_config(CONFIG_MAPPING[kind](**sizes))
    assert shape.params / 1e9 == pytest.approx(billions, rel=0.03)
    unused = shape.expert_layers * shape.expert_params * (1 - shape.experts.top_k / shape.experts.count)
    assert (shape.params - unused) / 1e9 == pytest.approx(active, rel=0.1)


def job(shape, gpus=64, **more):
    return Job(shape, Machine(hardware.gpu("H100"), gpus, 8, 4e11), programs.MEGATRON, **more)


def test_a_delta_net_sees_no_sequence_and_compressed_attention_little_of_it():
    """Per token: attention's operations grow with the sequence, the state's do not, and compressed entries are few."""
    mixed = configurations.shape_of_config(config_of("qwen3_5_text", DELTA | {"layer_types": MIXED}))
    assert dict(mixed.layer_kinds) == {Layer(): 1, Layer("linear"): 3}
    all_state = mixed.attended_tokens(Layer("linear"), 4096), mixed.linear_mixer.scan_flops
    assert all_state[1] == 7 * 8 * 48 * 32
    v4 = configurations.shape_of_config(CONFIG_MAPPING["deepseek_v4"]())
    sparse, heavy = (Layer("attention", "experts", 128, place) for place in (1, 2))
    assert [each.rate for each in v4.compressors] == [4, 128]
    near = v4.attended_tokens(Layer("attention", "experts", 128), 65536)
    assert v4.attended_tokens(heavy, 65536) - near == 65536 / 128 / 2
    chosen = 512 - 512**2 / (2 * 65536 / 4)
    scored = 65536 / 4 / 2 * (64 * 128) / (64 * 2 * 512)
    assert v4.attended_tokens(sparse, 65536) - near == pytest.approx(chosen + scored)
    assert v4.attended_tokens(sparse, 65536) < 0.2 * v4.attended_tokens(Layer(), 65536)


def test_wider_heads_of_the_layers_that_see_everything_are_counted():
    shape = configurations.shape_of_config(config_of("gemma4_text", GEMMA4))
    near, far = Layer(window=128), Layer()
    assert dict(shape.layer_kinds) == {near: 3, far: 1}
    assert [shape.with_heads_of(kind).head_dim for kind in (near, far)] == [32, 64]
    assert [shape.matmuls(kind)[0].outputs for kind in (near, far)] == [(8 + 2 * 4) * 32, (8 + 2) * 64]
    narrow = configurations.shape_of_config(config_of("gemma4_text", GEMMA4 | {"global_head_dim": 32}))
    layout = Layout(dp=64, sharding="zero1")
    for of in (shape, narrow):
        assert of.flops(8192) > 0
    assert predict_step(job(shape), layout).parts["attention"] > predict_step(job(narrow), layout).parts["attention"]
    assert (
        predict_memory(job(shape), layout).lines["activations"]
        > predict_memory(job(narrow), layout).lines["activations"]
    )


def test_experts_behind_a_latent_width_get_less_on_the_wire():
    wide, narrow = (
        configurations.shape_of_config(config_of("nemotron_h", NEMOTRON | {"moe_latent_size": latent}))
        for latent in (None, 64)
    )
    layout = Layout(dp=64, ep=8, sharding="zero1")
    sent = [
        predict_step(job(shape, overlap=False), layout).parts["expert-parallel traffic"] for shape in (wide, narrow)
    ]
    assert sent[1] < sent[0]
    kept = [predict_memory(job(shape), layout).lines["activations"] for shape in (wide, narrow)]
    assert kept[1] < kept[0]


@pytest.mark.parametrize(
    ("kind", "more"),
    [("qwen3_5_moe_text", QWEN), ("deepseek_v4", DEEPSEEK_V4), ("nemotron_h", NEMOTRON), ("gemma4_text", GEMMA4)],
    ids=lambda kind: str(kind)[:12],
)
def test_a_layout_is_found_for_layers_without_attention_and_no_fine_tune_nor_file(kind, more, tmp_path, capsys):
    config_of(kind, more).save_pretrained(tmp_path)
    asked = ["--model", str(tmp_path), "--gpus", "16", "--gpu", "H100"]
    assert main(["plan", "--search", *asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"][0]["seconds"] > 0
    assert main(["plan", "--search", *asked, "--write", str(tmp_path / "out")]) == 2
    assert "files are written for layers of attention and an MLP" in capsys.readouterr().err
    assert main(["plan", *asked, "--full"]) == 2
    assert "--search and --explain plan their training" in capsys.readouterr().err
