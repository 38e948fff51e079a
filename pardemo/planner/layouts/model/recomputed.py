"""What Megatron-core recomputes module by module: which modules a model has, and what a layer makes again of them.

``recompute_modules`` of ``megatron/core/transformer/transformer_config.py`` (megatron-core 0.16.1). ``moe_act``,
``layernorm`` and ``mla_up_proj`` throw their outputs away; the others keep their inputs and run once more.
"""

from dataclasses import dataclass

from pardemo.planner.layouts.model.shape import Layer, Product, Shape

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def missing(module: str, shape: Shape) -> str:
    """What a model would need for a module to be in it; "" where it is.

    Only norms that are modules of their own can be recomputed: that of experts, and that before latent attention. The
    others are one module with the product that follows (``gpt_layer_specs.py``).
    """
    experts = shape.experts
    needed = {
        "moe": ("experts", experts),
        "moe_act": ("experts", experts),
        "shared_experts": ("shared experts", experts and experts.shared),
        "layernorm": ("experts or latent attention", experts or up_projections(shape)),
        "mla_up_proj": ("latent attention", up_projections(shape)),
        "mlp": ("layers with a dense MLP", any(kind.mlp == "dense" for kind, _ in shape.kinds)),
        "core_attn": ("attention", any(kind.mixer == "attention" for kind, _ in shape.kinds)),
    }
    what, there = needed[module]
    return "" if there else what


def up_projections(shape: Shape) -> tuple[Product, ...]:
    """Of latent attention, the products from a low rank to heads; () where attention has none."""
    before = shape.attention[:-1]  # the last one is the output's
    return tuple(each for each in before if each.inputs != shape.hidden)


@dataclass(frozen=True)
class Again:
    """What a layer's modules make again in the backward pass, the experts' own part left out.

    Args:
        weights: what a token is multiplied with once more. blocks: how many of the layer's two run a third time, with
            their way through memory and their tensor-parallel exchange. numbers: of a token that are read or written
            beside that, cut by tensor parallelism.
    """

    weights: tuple[Product, ...] = ()
    blocks: int = 0
    numbers: float = 0.0


def again(shape: Shape, modules: tuple[str, ...], kind: Layer) -> Again:
    """What a layer of that kind makes again of ``modules``."""
    weights: list[Product] = []
    numbers, of = 0.0, shape.experts
    blocks = int((kind.mlp == "dense" and "mlp" in modules) or (kind.mlp == "experts" and "moe" in modules))
    if kind.mixer == "attention" and "mla_up_proj" in modules:
        weights += up_projections(shape)
        numbers += 2 * sum(each.outputs for each in up_projections(shape))  # positions: read and written
    if kind.mlp == "dense" and "mlp" in modules:
        weights += shape.mlp(shape.middle)
    if kind.mlp == "experts" and of is not None:
        if "moe" in modules:
            weights.append(Product(shape.hidden, of.count))
        if of.shared and {"moe", "shared_experts"} & set(modules):
            weights += shape.mlp(of.shared)
        if "moe_act" in modules and "moe" not in modules:
            numbers += of.chosen * of.middle * (3 if shape.gated else 2)
    if "layernorm" in modules:
        numbers += 2 * shape.hidden * norms(shape, kind)
    return Again(tuple(weights), blocks, numbers)


def norms(shape: Shape, kind: Layer) -> int:
    """A layer's norms that are modules of their own."""
    return int(kind.mixer == "attention" and bool(up_projections(shape))) + int(kind.mlp == "experts")
