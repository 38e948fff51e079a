"""Lists the modules of a layer that can be recomputed alone, and the work of recomputing them."""

from dataclasses import dataclass

from pardemo.planner.layouts.shape import Layer, Matmul, Shape

MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")


def missing(module: str, shape: Shape) -> str:
    """Returns what a model would need for a module to be in it; "" where it is.

    Only norms that are modules of their own can be recomputed: that of experts, and that before latent attention. The
    others are one module with the product that follows (``gpt_layer_specs.py``).
    """
    experts = shape.experts
    needed = {
        "moe": ("experts", experts),
        "moe_act": ("experts", experts),
        "shared_experts": ("shared experts", experts and experts.shared_ffn_hidden),
        "layernorm": ("experts or latent attention", experts or up_projections(shape)),
        "mla_up_proj": ("latent attention", up_projections(shape)),
        "mlp": ("layers with a dense MLP", any(kind.mlp == "dense" for kind, _ in shape.layer_kinds)),
        "core_attn": ("attention", any(kind.mixer == "attention" for kind, _ in shape.layer_kinds)),
    }
    feature, present = needed[module]
    return "" if present else feature


def up_projections(shape: Shape) -> tuple[Matmul, ...]:
    """Returns latent attention's projections from a low rank to heads; () where attention has none."""
    if any(compressor.rate > 1 for compressor in shape.compressors):  # which Megatron-core has no modules for
        return ()
    inputs = shape.projections[:-1]  # the last one is the output's
    return tuple(projection for projection in inputs if projection.inputs != shape.hidden)


@dataclass(frozen=True)
class Recomputed:
    """The work of a layer's recomputed modules in the backward pass, without the experts' own part."""

    matmuls: tuple[Matmul, ...] = ()  # matrices that a token is multiplied with once more
    blocks: int = 0  # of the layer's two, with their memory traffic and their tensor-parallel exchange
    elements: float = 0.0  # of a token, read or written beside that; tensor parallelism cuts them


def recomputed(shape: Shape, modules: tuple[str, ...], kind: Layer) -> Recomputed:
    """Returns what a layer of that kind recomputes of ``modules``."""
    matmuls: list[Matmul] = []
    elements, experts = 0.0, shape.experts
    blocks = int((kind.mlp == "dense" and "mlp" in modules) or (kind.mlp == "experts" and "moe" in modules))
    if kind.mixer == "attention" and "mla_up_proj" in modules:
        matmuls += up_projections(shape)
        elements += 2 * sum(matmul.outputs for matmul in up_projections(shape))  # positions: read and written
    if kind.mlp == "dense" and "mlp" in modules:
        matmuls += shape.mlp_matmuls(shape.ffn_hidden)
    if kind.mlp == "experts" and experts is not None:
        if "moe" in modules:
            matmuls.append(Matmul(shape.hidden, experts.count))
        if experts.shared_ffn_hidden and {"moe", "shared_experts"} & set(modules):
            matmuls += shape.mlp_matmuls(experts.shared_ffn_hidden)
        if "moe_act" in modules and "moe" not in modules:
            elements += experts.top_k * experts.ffn_hidden * (3 if shape.gated else 2)
    if "layernorm" in modules:
        elements += 2 * shape.hidden * norms(shape, kind)
    return Recomputed(tuple(matmuls), blocks, elements)


def norms(shape: Shape, kind: Layer) -> int:
    """Counts a layer's norms that are modules of their own."""
    return int(kind.mixer == "attention" and bool(up_projections(shape))) + int(kind.mlp == "experts")
