"""Megatron-LM's arguments for a layout: ``megatron.sh``, which torchrun starts on each host.

Names are those of ``megatron/training/arguments.py`` in NVIDIA/Megatron-LM at commit
000c4ac24f61159c138b0975def722c65245983c, and of its later form, for which megatron-core 0.16 is made: there most flags
are fields of ``TransformerConfig`` (``argument_utils.py`` beside it at 003579558fa320cbedaab8b5d1ee7b976bb3f38c) and of
``config/training_config.py`` (008e9cdb53e75bbf9733d0089a5c9bf14553ca1c) and ``config/common_config.py``
(058300773c2bc1681e0339c098ca76b88749d773). ``validate_args`` says which go together.
"""

import shlex
from itertools import groupby

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch.facts import Model
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.step import pieces

FILE = "megatron.sh"
ENVIRONMENT = {"MEGATRON": "Megatron-LM"}
Flags = dict[str, int | float | str | bool | tuple[str, ...]]

#: What a plan does not decide; a script that runs needs some value.
OWN: Flags = {
    "train-iters": 100, "lr": 1.5e-4, "min-lr": 1.5e-5, "lr-decay-style": "cosine", "lr-warmup-iters": 10,
    "weight-decay": 0.1, "adam-beta1": 0.9, "adam-beta2": 0.95, "clip-grad": 1.0, "log-interval": 1,
    "log-throughput": True, "eval-iters": 0, "distributed-timeout-minutes": 60,
}  # fmt: skip
_PRECISIONS: dict[str, Flags] = {
    "bf16": {}, "fp8": {"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"fp8-format": "e4m3", "fp8-recipe": "mxfp8"}, "nvfp4": {"fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}  # fmt: skip
_GELU = {"gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"}


def why_not(job: Job, layout: Layout, model: Model) -> str | None:
    """Why Megatron-LM cannot run the layout; None where it can."""
    shape = job.shape
    if layout.schedule != "1f1b":
        return f"Megatron-LM has no {layout.schedule} schedule"
    if layout.sharding in ("zero2", "zero3") and layout.pp > 1:
        return "Megatron-FSDP takes the place of a pipeline"
    if layout.offload and layout.pp > 1:
        return "Megatron-core offloads no activations in a pipeline"
    if layout.offload and layout.recompute != "none":
        return "Megatron-core recomputes nothing where it offloads activations"
    if "moe" in layout.modules and job.started_by_graphs:
        return "the module moe is not recomputed where CUDA graphs start its router"
    if layout.sequence_parallel and layout.tp == 1:
        return "sequence parallelism goes with tensor parallelism; TP is 1"
    if shape.experts and layout.tp > 1 and not layout.sequence_parallel:
        return "experts under tensor parallelism need sequence parallelism"
    if not model.latent and shape.groups % layout.tp and layout.tp % shape.groups:
        return f"{shape.groups} key-value heads neither divide TP {layout.tp} nor are divided by it"
    if model.positions == "learned" and model.longest < job.sequence:
        return f"{model.longest} learned positions are fewer than {job.sequence} tokens"
    return None


def flags(job: Job, layout: Layout, model: Model) -> dict[str, Flags]:
    """The arguments by name, without their dashes, in groups; True is a flag alone."""
    return {
        "the layout": _parallel(job, layout),
        "memory": _memory(job, layout),
        "the batch": {
            "micro-batch-size": layout.micro_batch, "global-batch-size": layout.batch, "seq-length": job.sequence,
        },
        "the model": _model(job, model, layout.expert_ranks > 1),
        "the vocabulary": vocabulary(job.shape.vocabulary, layout.tp),
        "what the plan does not decide": OWN,
    }  # fmt: skip


def _parallel(job: Job, layout: Layout) -> Flags:
    arguments: Flags = {
        "tensor-model-parallel-size": layout.tp,
        "pipeline-model-parallel-size": layout.pp,
        "context-parallel-size": layout.cp,
    }
    if job.shape.experts:
        arguments |= {"expert-model-parallel-size": layout.ep, "expert-tensor-parallel-size": layout.etp}
    if layout.sequence_parallel:
        arguments["sequence-parallel"] = True
        if job.stack.hides_tensor:
            arguments["tp-comm-overlap"] = True
    if layout.cp > 1:
        arguments["cp-comm-type"] = "a2a" if layout.context == "all-to-all" else "p2p"
    return arguments | _pipeline(job, layout) | _sharding(layout)


def _pipeline(job: Job, layout: Layout) -> Flags:
    """The layers of each stage; piece by piece where layers do not divide, as Megatron-LM wants it then."""
    pieces, layers = layout.pp * layout.chunks, job.shape.layers
    if layers % pieces:
        return {"pipeline-model-parallel-layout": uneven(job, layout)}
    return {"num-layers-per-virtual-pipeline-stage": layers // pieces} if layout.chunks > 1 else {}


def uneven(job: Job, layout: Layout) -> str:
    """Pieces in the order of the layers: E embedding, t a layer, m one that predicts further tokens, L the loss.

    As many in each as :func:`~pardemo.planner.layouts.step.pieces` counts. Form: ``PipelineParallelLayerLayout``
    of megatron-core.
    """
    shape = job.shape
    first, *middle, last = (_letters(count) for count in pieces(shape, layout.pp * layout.chunks))
    text = "".join(
        f"({piece}|)*{len(alike)}" if len(alike := [*equal]) > 1 else f"{piece}|" for piece, equal in groupby(middle)
    )
    return f"E{first}|{text}{last}{'m' * shape.mtp}L"


def _letters(layers: int) -> str:
    return "" if layers == 0 else "t" if layers == 1 else f"t*{layers}"


def _sharding(layout: Layout) -> Flags:
    """Zero 1 is the distributed optimizer, zero 2 and 3 are Megatron-FSDP; both in groups where states are.

    Its flags, and that it goes with tensor, expert and context parallelism: megatron-core's developer guide,
    user-guide/features/custom_fsdp.html.
    """
    if layout.sharding == "none":
        return {"overlap-grad-reduce": True} if layout.replicas > 1 else {}
    arguments: Flags = {"use-distributed-optimizer": True, "overlap-grad-reduce": True, "overlap-param-gather": True}
    if layout.sharding != "zero1":
        strategy = {"zero2": "optim_grads", "zero3": "optim_grads_params"}[layout.sharding]
        arguments |= {
            "use-megatron-fsdp": True, "data-parallel-sharding-strategy": strategy, "ckpt-format": "fsdp_dtensor",
            "no-gradient-accumulation-fusion": True, "init-model-with-meta-device": True,
        }  # fmt: skip
    if layout.shards < layout.replicas:
        arguments["num-distributed-optimizer-instances"] = layout.replicas // layout.shards
    return arguments


def _memory(job: Job, layout: Layout) -> Flags:
    arguments: Flags = {"bf16": True}
    if job.stack.gradient == 2:
        arguments["grad-reduce-in-bf16"] = True
    arguments |= _PRECISIONS[job.precision]
    if not job.fused:
        arguments["attention-backend"] = "unfused"
    if job.started_by_graphs:
        arguments |= {
            "cuda-graph-impl": "transformer_engine",
            "cuda-graph-scope": ("attn", "moe_router", "moe_preprocess"),
        }
    if layout.offload:
        arguments |= {"cpu-offloading": True, "cpu-offloading-num-layers": layout.offload}
    if layout.recompute == "full":
        arguments |= {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    elif layout.recompute == "selective":
        arguments |= {"recompute-granularity": "selective", "recompute-modules": layout.modules or "core_attn"}
    return arguments


def _model(job: Job, model: Model, spread: bool) -> Flags:
    shape = job.shape
    arguments: Flags = {
        "num-layers": shape.layers, "hidden-size": shape.hidden, "ffn-hidden-size": shape.middle,
        "num-attention-heads": shape.heads, "attention-dropout": 0.0, "hidden-dropout": 0.0,
        "init-method-std": model.std, "normalization": "RMSNorm" if model.rms else "LayerNorm",
        "norm-epsilon": model.epsilon, "max-position-embeddings": max(model.longest, job.sequence),
    }  # fmt: skip
    if model.latent:
        arguments |= _latent(model)
    else:
        arguments["kv-channels"] = shape.head
        if shape.groups != shape.heads:
            arguments |= {"group-query-attention": True, "num-query-groups": shape.groups}
    arguments |= _positions(model)
    if shape.gated:
        arguments["swiglu"] = True
    elif model.activation == "relu2":
        arguments["squared-relu"] = True
    if not shape.tied:
        arguments["untie-embeddings-and-output-weights"] = True
    if not model.linear_bias:
        arguments["disable-bias-linear"] = True
        if model.query_bias:
            arguments["add-qkv-bias"] = True
    if model.query_norm or model.latent:
        arguments["qk-layernorm"] = True
    return arguments | _experts(job, spread) | _routing(job, model)


def _routing(job: Job, model: Model) -> Flags:
    """How experts are chosen: by a softmax unless the model says otherwise (DeepSeek-V3's sigmoid, groups and bias)."""
    if job.shape.experts is None or not model.router:
        return {}
    router = model.router
    arguments: Flags = {
        "moe-router-score-function": "sigmoid", "moe-router-enable-expert-bias": True,
        "moe-router-topk-scaling-factor": router["scale"], "moe-router-dtype": "fp32",
    }  # fmt: skip
    if router["groups"] > 1:
        arguments |= {
            "moe-router-num-groups": int(router["groups"]), "moe-router-group-topk": int(router["chosen_groups"]),
        }  # fmt: skip
    return arguments


def _positions(model: Model) -> Flags:
    if model.positions != "rope":
        return {"position-embedding-type": {"learned": "learned_absolute"}.get(model.positions, "none")}
    arguments: Flags = {"position-embedding-type": "rope", "rotary-base": int(model.theta)}
    if model.rotary != 1:
        arguments["rotary-percent"] = model.rotary
    if model.factor:
        arguments |= {"use-rope-scaling": True, "rope-scaling-factor": model.factor}
    return arguments


def _latent(model: Model) -> Flags:
    """Multi-head latent attention: ``MLATransformerConfig``'s names, which are not Hugging Face's."""
    latent = model.latent
    arguments: Flags = {
        "multi-latent-attention": True, "kv-lora-rank": latent["kv_lora_rank"],
        "qk-head-dim": latent["qk_nope_head_dim"], "qk-pos-emb-head-dim": latent["qk_rope_head_dim"],
        "v-head-dim": latent["v_head_dim"], "rope-type": "rope", "no-rope-fusion": True,
    }  # fmt: skip
    return arguments | ({"q-lora-rank": latent["q_lora_rank"]} if latent["q_lora_rank"] else {})


def _experts(job: Job, spread: bool) -> Flags:
    """``spread``: whether a layer's experts are on several ranks."""
    experts = job.shape.experts
    if experts is None:
        return {}
    arguments: Flags = {
        "num-experts": experts.count, "moe-router-topk": experts.chosen, "moe-ffn-hidden-size": experts.middle,
        "moe-grouped-gemm": True, "moe-token-dispatcher-type": "alltoall",
        "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01,
    }  # fmt: skip
    if job.dispatcher == "fused" and spread:
        arguments |= {"moe-token-dispatcher-type": "flex", "moe-flex-dispatcher-backend": "deepep"}
    if experts.shared:
        arguments["moe-shared-expert-intermediate-size"] = experts.shared
    if experts.dense_layers:
        arguments["moe-layer-freq"] = f"([0]*{experts.dense_layers}+[1]*{job.shape.layers - experts.dense_layers})"
    if experts.chosen == 1:  # Megatron refuses a softmax over the one chosen: it has no gradient
        arguments["moe-router-pre-softmax"] = True
    return arguments


def vocabulary(words: int, tp: int) -> Flags:
    """The head's width: Megatron rounds it up to so many words on each tensor-parallel rank.

    Its NullTokenizer has a word more than it is told (``megatron/core/tokenizers/text/libraries/null_tokenizer.py``).
    """
    step = next((n for n in (128, 64, 32, 16, 8, 4, 2, 1) if words % (n * tp) == 0), 128)
    return {"vocab-size": words - 1, "make-vocab-size-divisible-by": step}


def left_out(model: Model) -> list[str]:
    """What the arguments leave out of the model, one line each."""
    missing = list(model.left_out)
    if model.shape.gated and model.activation != "silu":
        missing.append(f"the gate's {model.activation}, in the place of which stands SiLU")
    elif not model.shape.gated and model.activation not in (*_GELU, "relu2", "silu"):
        missing.append(f"the activation {model.activation}, in the place of which stands GeLU")
    return missing


def texts(job: Job, layout: Layout, model: Model) -> dict[str, str]:
    """``megatron.sh``: torchrun's own options are its arguments; ``slurm.sbatch`` and ``kubernetes.yaml`` give them."""
    hosts, each = job.machine.hosts, min(job.machine.host_gpus, layout.gpus)
    lines = []
    for title, group in flags(job, layout, model).items():
        lines.append(f"    # {title}")
        lines += [f"    {argument(name, value)}" for name, value in group.items()]
    sharded = layout.sharding in ("zero2", "zero3")
    comments = [f"# left out, since Megatron-LM has no argument for it: {feature}" for feature in left_out(model)]
    if job.stack.name != "megatron-core":
        comments.append(f"# planned with the constants of {job.stack.name}")
    alone, newline = "[ $# -gt 0 ] || set -- --standalone", "\n"
    if hosts > 1:
        wanted = f"megatron.sh takes torchrun's options: --nnodes {hosts} --node_rank ..."
        alone = f'[ $# -gt 0 ] || {{ echo "{wanted}" >&2; exit 2; }}'
    return {FILE: f"""#!/bin/bash
# {model.name}: {layout}, {layout.gpus} GPUs on {hosts} hosts, {layout.batch} samples of {job.sequence} tokens a step
# for megatron-core 0.16 (Megatron-LM at 0035795)
# $MEGATRON is where Megatron-LM is; $DATA takes the place of the invented data and its tokenizer
{"".join(line + newline for line in comments)}set -euo pipefail
{alone}
{_CONNECTIONS[sharded]}
arguments=(
{newline.join(lines)}
)
data=${{DATA:---mock-data --tokenizer-type NullTokenizer --split 99,1,0 --no-create-attention-mask-in-dataloader}}
# shellcheck disable=SC2086 # $data is several words
exec torchrun --nproc_per_node {each} "$@" "${{MEGATRON:-.}}/pretrain_gpt.py" "${{arguments[@]}}" $data
"""}  # fmt: skip


_CONNECTIONS = {
    False: "export CUDA_DEVICE_MAX_CONNECTIONS=1  # until Hopper, tensor and context parallelism demand it",
    True: "unset CUDA_DEVICE_MAX_CONNECTIONS  # Megatron-FSDP refuses 1",
}


def argument(name: str, value: int | float | str | bool | tuple[str, ...]) -> str:
    """One argument as a shell reads it; several words of a tuple."""
    if value is True:
        return f"--{name}"
    return f"--{name} {shlex.join(value if isinstance(value, tuple) else [str(value)])}"


def command(job: Job, torchrun: str) -> str:
    """What a host runs."""
    return f"bash {FILE} {torchrun}"
