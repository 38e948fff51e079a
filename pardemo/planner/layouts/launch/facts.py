"""Reads what programs ask of a model beside its sizes from its Hugging Face config: positions, norms, biases."""

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pardemo.planner.layouts.configurations import KINDS, value_of
from pardemo.planner.layouts.shape import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that a training program needs beside its sizes.

    Args:
        kind: Transformers' model_type. name: for people.
        rms: RMSNorm; else LayerNorm. epsilon: of the norms. std: of the initial weights.
        positions: rope, learned, or other. longest: tokens that it has positions for.
        theta: of the rotary embedding; factor: by which Llama 3.1 stretches it; rotary: share of a head that turns.
        query_bias, linear_bias: of queries, keys and values; of all products. query_norm: of queries and keys.
        activation: of the MLP.
        router: of experts that are chosen by a sigmoid: its groups, how many of them are chosen, the scale of what
            experts give; empty where it is a softmax.
        latent: widths of multi-head latent attention by Hugging Face's names; empty where there is none.
        left_out: what programs have no setting for, one line each.
    """

    shape: Shape
    kind: str
    name: str
    rms: bool = True
    epsilon: float = 1e-5
    std: float = 0.02
    positions: str = "rope"
    longest: int = 0
    theta: float = 10000.0
    factor: float | None = None
    rotary: float = 1.0
    query_bias: bool = False
    linear_bias: bool = False
    query_norm: bool = False
    activation: str = "silu"
    latent: dict[str, int | None] = field(default_factory=dict)
    router: dict[str, float] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def like_llama(self) -> bool:
        """Whether it is Llama in all but its sizes."""
        shape = self.shape
        return (
            self.rms and self.positions == "rope" and shape.gated and shape.experts is None and not self.latent
            and self.activation == "silu" and not (self.query_bias or self.linear_bias or self.query_norm)
            and self.rotary == 1 and shape.head_dim * shape.heads == shape.hidden and not self.left_out
        )  # fmt: skip


def model_of(config: "PreTrainedConfig", shape: Shape, name: str) -> ModelFacts:
    """Reads those facts from a model's configuration.

    Rotary settings are in ``rope_parameters`` since Transformers 5, and in keys of their own before.
    """
    get = functools.partial(value_of, config)
    kind, rope, rms = config.model_type, _rope(get("rope_parameters", "rope_scaling") or {}), get("rms_norm_eps")
    theta = rope.get("rope_theta") or get("rope_theta", "rotary_emb_base")
    turns = get("position_embedding") == "rope" or (theta is not None and get("position_embedding") is None)
    learned, stretched = shape.positions > 0, rope.get("rope_type", "default")
    window = get("sliding_window") if get("use_sliding_window") is not False else None
    left_out = {
        f"the positions of {kind}, which are neither rotary nor learned": not turns and not learned,
        f"rotary embeddings stretched by {stretched}": stretched not in ("default", "llama3"),
        "the normalised weights of the head": get("normalize_head"),
        f"attention to the last {window} tokens only": window,
    }
    names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    router = {
        "groups": get("n_group") or 1, "chosen_groups": get("topk_group") or 1,
        "scale": get("routed_scaling_factor") or 1.0,
    }  # fmt: skip
    return ModelFacts(
        shape, kind, name, rms=rms is not None,
        epsilon=rms or get("layer_norm_epsilon", "layer_norm_eps") or 1e-5,
        std=get("initializer_range") or 0.02, positions="rope" if turns else "learned" if learned else "other",
        longest=shape.positions or get("max_position_embeddings", "model_max_length") or 0, theta=theta or 10000.0,
        factor=rope.get("factor", 8.0) if stretched == "llama3" else None,
        rotary=rope.get("partial_rotary_factor") or get("partial_rotary_factor", "rotary_pct") or 1.0,
        query_bias=bool(kind in KINDS["query_bias"] or get("attention_bias", "qkv_bias")),
        linear_bias=rms is None and not shape.gated and get("bias", "use_bias") is not False,
        query_norm=kind in KINDS["query_norm"],
        activation=get("hidden_act", "hidden_activation", "activation_function") or "silu",
        latent={key: get(key) for key in names} if get("kv_lora_rank") is not None else {},
        router=router if kind in KINDS["sigmoid_router"] else {},
        left_out=tuple(feature for feature, present in left_out.items() if present),
    )  # fmt: skip


def _rope(settings: dict) -> dict:
    """Returns the rotary settings; of a model with several kinds of layers, those of full attention."""
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return settings.get("full_attention", nested[0]) if nested else settings
