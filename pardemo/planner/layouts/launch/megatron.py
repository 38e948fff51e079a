"""Writes Megatron-LM's arguments for a layout: ``megatron.sh``, which torchrun starts on each host.

Names are those of ``megatron/training/arguments.py`` in NVIDIA/Megatron-LM at commit
000c4ac24f61159c138b0975def722c65245983c, and of its later form, for which megatron-core 0.16 is made: there most flags
are fields of ``TransformerConfig`` (``argument_utils.py`` beside it at 003579558fa320cbedaab8b5d1ee7b976bb3f38c) and of
``config/training_config.py`` (008e9cdb53e75bbf9733d0089a5c9bf14553ca1c) and ``config/common_config.py``
(058300773c2bc1681e0339c098ca76b88749d773). ``validate_args`` says which go together.
"""

import shlex
from itertools import groupby
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch import settings
from pardemo.planner.layouts.launch.facts import ModelFacts
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.step import piece_layers

FILE = "megatron.sh"
ENVIRONMENT = {"MEGATRON": "Megatron-LM"}
Flags = dict[str, Any]

_PRECISIONS: dict[str, Flags] = {
    "bf16": {}, "fp8": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}, "nvfp4": {"fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}  # fmt: skip
_GELU = {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"}


def why_not(job: Job, layout: Layout, model: ModelFacts) -> str | None:
    """Returns why Megatron-LM cannot run the layout; None where it can."""
    shape, learned = job.shape, model.positions == "learned"
    return settings.refusal(
        (layout.schedule != "1f1b", "Megatron-LM has no {layout.schedule} schedule"),
        (layout.sharding in ("zero2", "zero3") and layout.pp > 1, "Megatron-FSDP takes the place of a pipeline"),
        (layout.offloaded_layers and layout.pp > 1, "Megatron-core offloads no activations in a pipeline"),
        (layout.offloaded_layers and layout.recompute != "none",
         "Megatron-core recomputes nothing where it offloads activations"),
        ("moe" in layout.recomputed_modules and job.started_by_graphs,
         "the module moe is not recomputed where CUDA graphs start its router"),
        (layout.sequence_parallel and layout.tp == 1, "sequence parallelism goes with tensor parallelism; TP is 1"),
        (shape.experts and layout.tp > 1 and not layout.sequence_parallel,
         "experts under tensor parallelism need sequence parallelism"),
        (not model.latent and shape.kv_heads % layout.tp and layout.tp % shape.kv_heads,
         "{shape.kv_heads} key-value heads neither divide TP {layout.tp} nor are divided by it"),
        (learned and model.longest < job.sequence,
         "{model.longest} learned positions are fewer than {job.sequence} tokens"),
        job=job, layout=layout, model=model, shape=shape,
    )  # fmt: skip


def flags(job: Job, layout: Layout, model: ModelFacts) -> dict[str, Flags]:
    """Returns the arguments by name, without their dashes, in groups; True is a flag alone."""
    values, groups, title = _values(job, layout, model), dict[str, Flags](), ""
    for group in settings.table("megatron.yaml"):
        title = group.get("title", title)
        filled = settings.fill(group["flags"], values) if settings.look_up(group.get("when", "job"), values) else {}
        groups.setdefault(title, {}).update({name: value for name, value in filled.items() if value is not False})
    return groups


def _values(job: Job, layout: Layout, model: ModelFacts) -> dict[str, Any]:
    """Returns what ``megatron.yaml`` names beside fields of layout, job and model; None: nothing is to be said."""
    shape, experts, pieces = job.shape, job.shape.experts, layout.pp * layout.chunks
    grouped, divides = not model.latent and shape.kv_heads != shape.heads, shape.layers % pieces == 0
    fused = job.dispatcher == "fused" and layout.expert_ranks > 1
    shared, dense = layout.sharding != "none", experts.first_dense_layers if experts else 0
    return {
        "job": job, "layout": layout, "shape": shape, "model": model,
        "overlaps_tensor": layout.sequence_parallel and bool(job.program.tp_overlap),
        "context": {"ring": "p2p", "all-to-all": "a2a"}[layout.context] if layout.cp > 1 else None,
        "uneven": None if divides else uneven(job, layout),  # piece by piece, as Megatron-LM wants it then
        "piece": shape.layers // pieces if divides and layout.chunks > 1 else None,
        "shared": shared, "reduces": shared or layout.replicas > 1,
        "fsdp": {"zero2": "optim_grads", "zero3": "optim_grads_params"}.get(layout.sharding),
        "instances": layout.replicas // layout.shards if shared and layout.shards < layout.replicas else None,
        "reduces_in_bf16": job.program.gradient_bytes == 2, "bits": _PRECISIONS[job.precision],
        "attention": None if job.fused else "unfused", "full": layout.recompute == "full",
        "modules": (layout.recomputed_modules or "core_attn") if layout.recompute == "selective" else None,
        "norm": "RMSNorm" if model.rms else "LayerNorm", "longest": max(model.longest, job.sequence),
        "head": None if model.latent else shape.head_dim,
        "grouped": grouped, "groups": shape.kv_heads if grouped else None,
        "positions": {"rope": "rope", "learned": "learned_absolute"}.get(model.positions, "none"),
        "rotary": model.positions == "rope", "theta": int(model.theta),
        "turned": None if model.rotary == 1 else model.rotary, "stretched": bool(model.factor),
        "squared_relu": not shape.gated and model.activation == "relu2", "untied": not shape.tied,
        "no_bias": not model.linear_bias, "query_bias": not model.linear_bias and model.query_bias,
        "query_norm": model.query_norm or bool(model.latent),
        "dispatcher": "flex" if fused else "alltoall", "dispatcher_backend": "deepep" if fused else None,
        "shared_experts": (experts and experts.shared_ffn_hidden) or None,
        "routed_layers": f"([0]*{dense}+[1]*{shape.layers - dense})" if dense else None,
        "pre_softmax": experts is not None and experts.top_k == 1,  # a softmax over the one chosen has no gradient
        "router": experts and model.router, "grouped_router": experts and model.router.get("groups", 1) > 1,
        "vocabulary": vocabulary(shape.vocabulary, layout.tp),
    }  # fmt: skip


def uneven(job: Job, layout: Layout) -> str:
    """Pieces in the order of the layers: E embedding, t a layer, m one that predicts further tokens, L the loss.

    As many in each as :func:`~pardemo.planner.layouts.step.piece_layers` counts. Form: ``PipelineParallelLayerLayout``
    of megatron-core.
    """
    shape = job.shape
    start, *middle, last = (_letters(count) for count in piece_layers(shape, layout.pp * layout.chunks))
    text = "".join(
        f"({piece}|)*{len(alike)}" if len(alike := [*equal]) > 1 else f"{piece}|" for piece, equal in groupby(middle)
    )
    return f"E{start}|{text}{last}{'m' * shape.mtp_layers}L"


def _letters(layers: int) -> str:
    return "" if layers == 0 else "t" if layers == 1 else f"t*{layers}"


def vocabulary(words: int, tp: int) -> Flags:
    """Returns the head's width: Megatron rounds it up to so many words on each tensor-parallel rank.

    Its NullTokenizer has a word more than it is told (``megatron/core/tokenizers/text/libraries/null_tokenizer.py``).
    """
    step = next((n for n in (128, 64, 32, 16, 8, 4, 2, 1) if words % (n * tp) == 0), 128)
    return {"vocab-size": words - 1, "make-vocab-size-divisible-by": step}


def left_out(model: ModelFacts) -> list[str]:
    """Returns what the arguments leave out of the model, one line each."""
    missing = list(model.left_out)
    if model.shape.gated and model.activation != "silu":
        missing.append(f"the gate's {model.activation}, in the place of which stands SiLU")
    elif not model.shape.gated and model.activation not in (*_GELU, "relu2", "silu"):
        missing.append(f"the activation {model.activation}, in the place of which stands GeLU")
    return missing


def texts(job: Job, layout: Layout, model: ModelFacts) -> dict[str, str]:
    """``megatron.sh``: torchrun's own options are its arguments; ``slurm.sbatch`` and ``kubernetes.yaml`` give them."""
    hosts, host_gpus = job.machine.hosts, min(job.machine.host_gpus, layout.gpus)
    groups = flags(job, layout, model)
    lines = [
        f"    {line}"
        for title, group in groups.items()
        for line in (f"# {title}", *(argument(name, value) for name, value in group.items()))
    ]
    comments = [f"# left out, since Megatron-LM has no argument for it: {feature}" for feature in left_out(model)]
    if job.program.name != "megatron-core":
        comments.append(f"# planned with the constants of {job.program.name}")
    alone = "[ $# -gt 0 ] || set -- --standalone"
    if hosts > 1:
        wanted = f"megatron.sh takes torchrun's options: --nnodes {hosts} --node_rank ..."
        alone = f'[ $# -gt 0 ] || {{ echo "{wanted}" >&2; exit 2; }}'
    about = settings.about(job, layout, model, f" on {hosts} hosts")
    return {FILE: settings.script(
        "megatron.sh.txt", about=about, comments="".join(f"{line}\n" for line in comments), alone=alone,
        host_gpus=host_gpus, connections=_CONNECTIONS[layout.sharding in ("zero2", "zero3")],
        arguments="\n".join(lines),
    )}  # fmt: skip


_CONNECTIONS = {
    False: "export CUDA_DEVICE_MAX_CONNECTIONS=1  # until Hopper, tensor and context parallelism demand it",
    True: "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1",
}


def argument(name: str, value: Any) -> str:
    """Returns one argument as a shell reads it; several words of a list or a tuple."""
    if value is True:
        return f"--{name}"
    return f"--{name} {shlex.join(value if isinstance(value, (list, tuple)) else [str(value)])}"


def command(job: Job, torchrun: str) -> str:
    """Returns what a host runs."""
    return f"bash {FILE} {torchrun}"
