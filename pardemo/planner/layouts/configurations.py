"""Reads a model's configuration, built in or from a file, without Transformers; converts it to a shape."""

import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from pardemo import argument_checks, project
from pardemo.planner.layouts.shape import (
    COLUMNS,
    ROWS,
    Compressor,
    DeltaNet,
    Experts,
    GlobalHeads,
    Mamba,
    Matmul,
    Shape,
    ShortConvolution,
)  # fmt: skip

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


#: Built-in models: what counts of the config.json that their makers publish on Hugging Face (mistral-7b: v0.3).
MODELS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))
#: What kinds of models have that their configurations do not say, and the keys that are read of these.
KINDS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8"))
#: Share of a model's matrices that a shape may miss before it is refused: what is missing is then no detail.
MISSED = 0.002
#: What Transformers fills in where a configuration does not say it.
USUAL = {"hidden_act": "silu", "initializer_range": 0.02, "rms_norm_eps": 1e-6}
#: What a name on the hub may end with and have the same sizes. (Mistral's v0.1 and v0.2 have a smaller vocabulary.)
_SAME_SIZES = re.compile(
    r"(-hf|-base|-chat|-chat-hf|-instruct|-v0\.3|-instruct-v0\.3|-it|-pt|(-instruct)?-v0\.1|-0324|-17b-\d+e(-instruct)?)$"
)


def key_of(name: str) -> str | None:
    """Finds the built-in model of a name, its own or the hub's: ``meta-llama/Llama-3.1-8B-Instruct`` is llama3.1-8b.

    None where there is none, and where a folder has the name.
    """
    maker, _, model = name.lower().rpartition("/")
    if not maker:
        return model if model in MODELS else None
    if Path(name).expanduser().exists():
        return None
    base = model.removeprefix("meta-")
    if not base.startswith(tuple(KINDS["makers"].get(maker, ()))):
        return None
    if base.startswith("mistral-7b") and not base.endswith("-v0.3"):
        return None
    plain = _SAME_SIZES.sub("", base).replace("-", "")
    return next((key for key in MODELS if key.replace("-", "") == plain), None)


def not_planned(name: str) -> list[str]:
    """Returns what the configuration of a folder or file says that a plan leaves out, one clause each."""
    values = _values(name)
    if not isinstance(values, dict):
        return []
    clauses = [clause for key, clause in KINDS["not_planned"].items() if values.get(key)]
    names = values.keys() | {key for value in values.values() if isinstance(value, dict) for key in value}
    if missing := [some[0] for some in KINDS["sizes"] if not names & set(some)]:
        kind = values.get("model_type", "the model type")
        clauses.append(
            f"its own {', '.join(missing)}, which it does not say: the defaults of Transformers for {kind} are"
        )
    return clauses


def config_file(name: str) -> Path:
    """Returns the ``config.json`` of a folder, or the file itself.

    Raises:
        ValueError: there is none; the nearest built-in models are offered.
    """
    path = _path(name)
    if not path.is_file():
        hint = argument_checks.nearest(name.lower().rpartition("/")[2], MODELS, most=2, cutoff=0.4)
        raise ValueError(f"no model {name!r}{hint} (or a folder with a config.json)")
    return path


def _path(name: str) -> Path:
    path = Path(name).expanduser()
    return path / "config.json" if path.is_dir() else path


def _values(name: str) -> Any:
    """Returns what the ``config.json`` of a folder, or a file, says; None where there is none that can be read."""
    path = _path(name)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def find_configuration(name: str) -> "SimpleNamespace | PreTrainedConfig":
    """Returns the configuration that :func:`pardemo.planner.models.find` returns; of a built-in model its sizes alone.

    Raises:
        ValueError: as :func:`pardemo.planner.models.find`.
        MissingExtra: a file is to be read, and Transformers is not installed.
    """
    if key := key_of(name):
        return SimpleNamespace(**MODELS[key])
    if (config := plain(_values(name))) is not None:  # that is all there is to know
        return config
    config_file(name)  # which takes no seconds to be refused, as loading Transformers does
    from pardemo.planner import models

    return models.find(name)


def shape_of(name: str) -> Shape:
    """Returns the shape of a model by its name or file; raises as the two functions that it calls."""
    return shape_of_config(find_configuration(name))


def plain(values: Any) -> SimpleNamespace | None:
    """Returns the configuration that a ``config.json`` of such values is; None where Transformers has to read it."""
    if unsaid(values):
        return None
    return SimpleNamespace(**USUAL | {"tie_word_embeddings": False} | values)


def unsaid(values: Any) -> str:
    """Returns why the values of a ``config.json`` do not say all sizes themselves; "" where they do."""
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in KINDS["says_all"]:
        has = "it has no model_type" if kind is None else f"its model_type is {kind!r:.40}"
        return f"{has}, and configurations of {', '.join(sorted(KINDS['says_all']))} alone say all their sizes"
    for key in KINDS["asked"]:
        if type(values.get(key)) is not int or values[key] < 1:  # True is no size
            return f"{key} must be a whole number of at least 1, not {values.get(key)!r:.40}"
    for key in KINDS["optional"]:
        if type(values.get(key, 1)) not in (int, NoneType):
            return f"{key} must be a whole number, not {values[key]!r:.40}"
    # of some of the layers, which one derives; Qwen names a window that it does not use
    if values.get("sliding_window") and kind != "mistral" and values.get("use_sliding_window") is not False:
        return "which of its layers have the sliding window is not said"
    return ""


def shape_of_config(config: "PreTrainedConfig") -> Shape:
    """Returns the shape of a Hugging Face configuration, dense, with experts, or with other mixers than attention.

    Its parameters are the model's, one by one: of kinds whose biases and norms are known (``KINDS["exact"]``), and of
    what :func:`pardemo.planner.models.find` has counted; else biases and other norms are left out.

    Raises:
        ValueError: the sizes are not those of a transformer that is known; what is missing is named.
    """
    try:
        shape = _shape(config)
    except (AttributeError, RuntimeError, TypeError) as error:  # a list, a missing key, a size that each layer has
        reason = project.one_line(error, 120)
        raise ValueError(
            f"{config.model_type} has no one size for all its layers ({reason}): it is not planned"
        ) from None
    counted = value_of(config, "counted")
    return _as_counted(shape, counted) if counted else replace(shape, other_params=_other_params(config, shape))


def _shape(config: "PreTrainedConfig") -> Shape:
    """Makes the shape of a configuration, without biases and other norms."""
    kind = config.model_type
    names = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
    sizes = {name: value_of(config, key) for name, key in (names | {"vocabulary": "vocab_size"}).items()}
    if missing := [name for name, value in sizes.items() if value is None]:
        raise ValueError(f"{kind}: no {' and no '.join(missing)} in its config; what is planned are transformers")
    if value_of(config, "is_encoder_decoder"):
        raise ValueError(f"{kind} has an encoder and a decoder; what is planned are decoders alone, as llama or gpt2")
    hidden, heads = sizes["hidden"], sizes["heads"]
    tied = bool(value_of(config, "tie_word_embeddings"))
    if kind == "nemotron_h":
        return _one_part_a_layer(config, sizes, tied)
    if kind == "gemma4_text":
        return _global_and_windowed_heads(config, sizes, tied)
    if mixer := KINDS["other_mixers"].get(kind):
        raise ValueError(f"{kind} has layers that are not attention ({mixer}); these are not planned")
    head_dim = value_of(config, "head_dim") or hidden // heads
    rank = value_of(config, "kv_lora_rank")
    kv_heads = value_of(config, "num_key_value_heads") or value_of(config, "num_kv_heads")
    multi_query = value_of(config, "multi_query") and not value_of(config, "new_decoder_architecture")
    return Shape(
        **sizes, kv_heads=1 if multi_query else kv_heads or heads,
        ffn_hidden=_ffn_hidden(config) or 4 * hidden, gated=kind not in KINDS["ungated_mlp"], tied=tied,
        positions=(value_of(config, "max_position_embeddings") or 0) if kind in KINDS["learned_positions"] else 0,
        experts=_experts(config), name=kind, norms_per_layer=4 if kind in KINDS["four_norms"] else 2,
        qk_norm=kind.startswith(tuple(KINDS["qk_norm"])),
        unfused_activation=value_of(config, "activation_function", "hidden_act") in ("gelu_new", "gelu_fast"),
        **({"head_dim": head_dim, "value_dim": head_dim} if rank is None else _latent(config, hidden, heads, rank))
        | _gated_attention(config, hidden, heads, kv_heads or heads, head_dim) | _windows(config, sizes["layers"])
        | _linear(config, hidden) | _compressed(config, hidden, heads, head_dim),
    )  # fmt: skip


def value_of(config: "PreTrainedConfig | SimpleNamespace", *names: str) -> Any:
    """Returns what a configuration says under the first of these names that it has; None where it has none."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _ffn_hidden(config: "PreTrainedConfig") -> int | None:
    """Returns the width of a layer's MLP."""
    if config.model_type == "granitemoehybrid":
        return config.shared_intermediate_size
    ffn_hidden = value_of(
        config, "intermediate_size_mlp", "ffn_hidden_size", "intermediate_size", "ffn_dim", "n_inner", "inner_dim"
    )
    if ffn_hidden and value_of(config, "block_auto_adjust_ff_dim"):  # LFM2, as Llama 1: two thirds, rounded up
        multiple, scale = config.block_multiple_of, config.block_ffn_dim_multiplier or 1
        ffn_hidden = int(scale * (2 * ffn_hidden // 3))
        ffn_hidden = -(-ffn_hidden // multiple) * multiple
    if isinstance(ffn_hidden, list):
        raise TypeError("its MLP has a size for each layer")
    return ffn_hidden


def _latent(config: "PreTrainedConfig", hidden: int, heads: int, rank: int) -> dict:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 2.1): low-rank products before those by heads."""
    rope, plain, value_dim = config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim
    low = getattr(config, "q_lora_rank", None)
    queries = heads * (plain + rope)
    to_queries = (Matmul(hidden, low), Matmul(low, queries, COLUMNS)) if low else (Matmul(hidden, queries, COLUMNS),)
    rest = (
        Matmul(hidden, rank + rope), Matmul(rank, heads * (plain + value_dim), COLUMNS),
        Matmul(heads * value_dim, hidden, ROWS),
    )  # fmt: skip
    return {"head_dim": plain + rope, "value_dim": value_dim, "projections": (*to_queries, *rest)}


def _windows(config: "PreTrainedConfig", layers: int) -> dict[str, Any]:
    """Returns how many layers see a part of the sequence alone, and how many tokens that is.

    ``layer_types`` says it layer by layer, where Transformers fills it in; Mistral's window is every layer's; Qwen's
    is of the layers from ``max_window_layers`` on, and of none unless ``use_sliding_window`` says so.
    """
    sliding = value_of(config, "sliding_window")
    window = sliding or value_of(config, "attention_chunk_size")
    if not window or value_of(config, "use_sliding_window") is False:
        return {}
    if types := value_of(config, "layer_types"):
        seen = sum(kind in ("sliding_attention", "chunked_attention") for kind in types)
    elif (pattern := value_of(config, "sliding_window_pattern")) and pattern > 1:
        seen = layers - layers // pattern
    else:
        seen = layers - (value_of(config, "max_window_layers") or 0)
    return {"window": window, "windowed_layers": max(0, min(seen, layers)), "chunked": not sliding}


#: Types of layers whose mixer is attention.
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")


def _one_part_a_layer(config: "PreTrainedConfig", sizes: dict[str, int], tied: bool) -> Shape:
    """Nemotron-H's layers: each is a Mamba-2 mixer, attention, an MLP or experts, as its pattern says."""
    pattern = config.hybrid_override_pattern
    mamba = Mamba(config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.n_groups,
                  config.conv_kernel, value_of(config, "use_conv_bias") is not False)  # fmt: skip
    experts = None
    if "E" in pattern:
        experts = Experts(
            config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size,
            value_of(config, "moe_shared_expert_intermediate_size") or 0,
            latent_dim=value_of(config, "moe_latent_size") or 0,
        )  # fmt: skip
    return Shape(
        **sizes,  # type: ignore[arg-type]
        kv_heads=config.num_key_value_heads, ffn_hidden=config.intermediate_size, gated=False, tied=tied,
        head_dim=config.head_dim, experts=experts, name=config.model_type, pattern=pattern, linear_mixer=mamba,
    )  # fmt: skip


def _global_and_windowed_heads(config: "PreTrainedConfig", sizes: dict[str, int], tied: bool) -> Shape:
    """Gemma 4's layers: those that see the whole sequence have wider and fewer heads, whose keys may be the values.

    Raises:
        ValueError: it has the smaller models' inputs of each layer, or layers that share keys and values.
    """
    if value_of(config, "hidden_size_per_layer_input") or value_of(config, "num_kv_shared_layers"):
        raise ValueError(
            f"{config.model_type}: embeddings of each layer, or keys and values shared by layers: not planned"
        )
    types = config.layer_types
    windowed, full = (config.per_layer_config[types.index(kind)] for kind in ("sliding_attention", "full_attention"))
    experts = None
    if config.enable_moe_block:
        experts = Experts(
            config.num_experts, config.top_k_experts, config.moe_intermediate_size, config.intermediate_size
        )
    return Shape(
        **sizes,  # type: ignore[arg-type]
        kv_heads=windowed.num_key_value_heads, ffn_hidden=config.intermediate_size, tied=tied,
        head_dim=windowed.head_dim, experts=experts, name=config.model_type, window=config.sliding_window,
        windowed_layers=types.count("sliding_attention"), norms_per_layer=4, qk_norm=True,
        global_heads=GlobalHeads(full.head_dim, full.num_key_value_heads, not config.attention_k_eq_v),
    )  # fmt: skip


def _linear(config: "PreTrainedConfig", hidden: int) -> dict[str, Any]:
    """Returns the mixer of the layers that have no attention, and how many these are."""
    kind, types = config.model_type, value_of(config, "layer_types", "layers_block_type") or ()
    if kind not in KINDS["mixers"] or not (layers := sum(layer_type not in _ATTENTION for layer_type in types)):
        return {}
    mixer: Mamba | DeltaNet | ShortConvolution
    if KINDS["mixers"][kind] == "delta":
        mixer = DeltaNet(
            config.linear_num_value_heads, config.linear_value_head_dim, config.linear_num_key_heads,
            config.linear_key_head_dim, config.linear_conv_kernel_dim,
        )  # fmt: skip
    elif KINDS["mixers"][kind] == "convolution":
        mixer = ShortConvolution(hidden, config.conv_L_cache)
    else:
        width = config.mamba_d_head
        if width == "auto":
            width = config.mamba_expand * hidden // config.mamba_n_heads
        mixer = Mamba(config.mamba_n_heads, width, config.mamba_d_state, config.mamba_n_groups, config.mamba_d_conv,
                      bool(config.mamba_conv_bias))  # fmt: skip
    return {"linear_mixer": mixer, "linear_layers": layers}


def _gated_attention(config: "PreTrainedConfig", hidden: int, heads: int, kv_heads: int, head_dim: int) -> dict:
    """Attention whose output has a gate, which is made with the queries (Qwen3-Next)."""
    if config.model_type not in KINDS["gated_attention"]:
        return {}
    inner = (2 * heads + 2 * kv_heads) * head_dim
    return {"projections": (Matmul(hidden, inner, COLUMNS), Matmul(heads * head_dim, hidden, ROWS))}


def _compressed(config: "PreTrainedConfig", hidden: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Returns compressed or selected attention: DeepSeek-V4 (its paper's 2.3), DeepSeek-V3.2 (arXiv 2512.02556, 2.1).

    V4's queries are low-rank, one head of keys that are the values, too; the output goes through a low rank by groups.
    """
    kind, low = config.model_type, value_of(config, "q_lora_rank")
    if kind in KINDS["chooses_tokens"]:
        scores, key_width = config.index_n_heads * config.index_head_dim, config.index_head_dim
        products = (Matmul(low, scores, COLUMNS), Matmul(hidden, key_width), Matmul(hidden, config.index_n_heads))
        types = value_of(config, "indexer_types") or ["full"] * config.num_hidden_layers
        asks = sum(indexer_type == "full" for indexer_type in types)
        own_index = Compressor(1, asks, products, config.index_topk, scores, 2 * key_width)
        shared = Compressor(1, len(types) - asks, (), config.index_topk)
        return {"compressors": tuple(compressor for compressor in (own_index, shared) if compressor.layers)}
    if kind != "deepseek_v4":
        return {}
    rates, types = config.compress_rates, config.layer_types
    sparse, heavy = "compressed_sparse_attention", "heavily_compressed_attention"
    scores, index = config.index_n_heads * config.index_head_dim, config.index_head_dim
    chooses = (
        Matmul(hidden, 4 * head_dim), Matmul(hidden, 4 * index), Matmul(low, scores, COLUMNS),
        Matmul(hidden, config.index_n_heads),
    )  # fmt: skip
    compressors = (
        Compressor(rates[sparse], types.count(sparse), chooses, config.index_topk, scores,
                   2 * rates[sparse] * (head_dim + index) + head_dim + index),
        Compressor(rates[heavy], types.count(heavy), (Matmul(hidden, 2 * head_dim),),
                   params=(rates[heavy] + 1) * head_dim),
    )  # fmt: skip
    narrow = config.o_groups * config.o_lora_rank
    projections = (
        Matmul(hidden, low), Matmul(low, heads * head_dim, COLUMNS), Matmul(hidden, head_dim),
        Matmul(heads * head_dim // config.o_groups, narrow, COLUMNS), Matmul(narrow, hidden, ROWS),
    )  # fmt: skip
    return {
        "projections": projections, "compressors": tuple(compressor for compressor in compressors if compressor.layers),
        "window": config.sliding_window, "windowed_layers": types.count("sliding_attention"),
        "residual_streams": config.hc_mult,
    }  # fmt: skip


def _experts(config: "PreTrainedConfig") -> Experts | None:
    count = value_of(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not count or count < 2:
        return None
    ffn_hidden = value_of(config, "moe_intermediate_size", "expert_intermediate_size")
    ffn_hidden = ffn_hidden or value_of(config, "intermediate_size", "ffn_hidden_size")
    shared = value_of(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:
        count_shared = value_of(config, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
        shared = (count_shared or 0) * ffn_hidden
    if config.model_type.startswith("llama4"):  # one for all tokens, which no key of its configuration says
        shared = ffn_hidden
    top_k = value_of(config, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts") or 2
    interval = value_of(config, "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval") or 1
    if types := value_of(config, "mlp_layer_types"):
        dense = sum(mlp_type == "dense" for mlp_type in types)
    else:
        dense = value_of(config, "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index") or len(
            value_of(config, "mlp_only_layers") or ()
        )
    return Experts(count, top_k, ffn_hidden, shared, dense, interval, config.model_type == "gpt_oss")


def _other_params(config: "PreTrainedConfig", shape: Shape) -> int:
    """Counts parameters of biases and of other norms, of the kinds of models that :data:`KINDS` says them of."""
    params = KINDS["other_params"].get(config.model_type, {})
    named = {part: [*params.get(part, ())] for part in ("once", "layer", "attention", "dense", "experts")}
    for flag, given in params.get("if", {}).items():
        if value_of(config, flag):
            for part, names in given.items():
                named[part] += names
    widths = _widths(config, shape)
    total = float(sum(widths[name] for name in named["once"]))
    for kind, count in shape.layer_kinds:
        widths = _widths(config, shape.with_heads_of(kind))
        parts = ("layer", kind.mixer, kind.mlp)
        total += count * sum(widths[name] for part in parts for name in named.get(part, ()))
    return round(total)


def _widths(config: "PreTrainedConfig", shape: Shape) -> dict[str, int]:
    """Numbers of a bias or a norm, by the names in ``KINDS["other_params"]``."""
    experts, streams, up = shape.experts, shape.residual_streams, 2 if shape.gated else 1
    return {
        "hidden": shape.hidden, "head_dim": shape.head_dim, "heads": shape.heads,
        "queries": shape.heads * shape.head_dim, "keys": shape.kv_heads * shape.head_dim,
        "values": shape.kv_heads * shape.value_dim,
        "ffn_hidden": shape.ffn_hidden, "up": shape.ffn_hidden * up,
        "query_rank": value_of(config, "q_lora_rank") or 0, "key_rank": value_of(config, "kv_lora_rank") or 0,
        "experts": experts.count if experts else 0,
        "experts_biases": experts.count * (up * experts.ffn_hidden + shape.hidden) if experts else 0,
        "streams": 2 * ((2 + streams) * streams * (streams * shape.hidden + 1) + 3),
        "joined_streams": streams * (streams * shape.hidden + 1) + 1,
    }  # fmt: skip


def _as_counted(shape: Shape, counted: dict[str, Any]) -> Shape:
    """Returns the shape with all parameters of the model that was counted.

    Raises:
        ValueError: the model has matrices that the shape has not, or the other way round.
    """
    for matrices, planned, counted_params in (
        ("its experts", round(shape.expert_layers * shape.expert_params), counted["experts"]),
        ("its layers, embedding and head", shape.matrix_params, counted["matrices"]),
    ):
        if abs(planned - counted_params) > MISSED * counted_params:
            names = f": {', '.join(counted['unknown'])}" if counted["unknown"] else ""
            raise ValueError(
                f"{shape.name}: {counted_params:,} parameters in the matrices of {matrices}, of which {planned:,} are "
                f"known; a layer of it has parts that are not planned{names}"
            )
    return replace(shape, other_params=counted["all"] - shape.params)


def usual_target(kind: str) -> tuple[str, ...] | None:
    """Returns the modules that LoRA goes to by default, by ``model_type``; None where they are not known here."""
    return tuple(KINDS["lora"].get(kind, ())) or None
