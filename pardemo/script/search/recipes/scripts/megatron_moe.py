"""Megatron-core's experts and sequence parallelism in a GPTModel, under its schedules, DDP and optimizers, on CPUs."""

import contextlib

import megatron_shared as shared
import torch
import torch.distributed as dist
from common import options, start
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# balance: aux_loss, seq_aux_loss; optimizer: sgd or adam, the library's, or plain, torch's
args = options(tp=1, pp=1, ep=1, etp=1, accumulate=1, balance="none", optimizer="plain", clip=0.0, way="", ddp="")
way, ddp = args.way, args.ddp
ranks, _ = start()


class Nothing:
    """A stream and its events, of which a CPU has none."""

    def __getattr__(self, name):
        return lambda *_, **__: self


moe_utils.te_general_gemm = None  # it asks whether it is None, and without Transformer Engine there is no such name
shared.on_cpu()
torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: Nothing()
torch.cuda.stream = lambda *_: contextlib.nullcontext()
plain_gather, plain_scatter = dist.all_gather, dist.reduce_scatter


def gather(parts, mine, group=None, **how):
    """All-gather of parts that need not have one length, which gloo refuses."""
    if len({part.shape for part in parts}) == 1:
        plain_gather(parts, mine, group=group, **how)
        return
    for place, part in enumerate(parts):
        if place == group.rank():
            part.copy_(mine)
        dist.broadcast(part, group=group, group_src=place)


def scatter(mine, parts, group=None, **how):
    """Reduce-scatter of such parts."""
    if len({part.shape for part in parts}) == 1:
        plain_scatter(mine, parts, group=group, **how)
        return
    for place, part in enumerate(parts):
        total = part.contiguous().clone()
        dist.all_reduce(total, group=group)
        if place == group.rank():
            mine.copy_(total)


dist.all_gather, dist.reduce_scatter = gather, scatter
parallel_state.initialize_model_parallel(
    args.tp, args.pp, expert_model_parallel_size=args.ep, expert_tensor_parallel_size=args.etp,
    create_gloo_process_groups=False, num_distributed_optimizer_instances=2 if "instances" in ddp and ranks > 1 else 1,
)  # fmt: skip
initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
experts = None if "dense" in way else 4
moe = {
    "num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall" if "alltoall" in way else "allgather",
    "moe_router_load_balancing_type": args.balance, "moe_aux_loss_coeff": 0.1 if "aux" in args.balance else 0.0,
    "moe_z_loss_coeff": 0.1 if "zloss" in way else None,
    "moe_shared_expert_intermediate_size": 16 if "shared" in way else None, "moe_shared_expert_gate": "gate" in way,
    "moe_shared_expert_overlap": "overlap" in way,
    "moe_router_score_function": "sigmoid" if "bias" in way else "softmax",
    "moe_router_enable_expert_bias": "bias" in way, "moe_router_bias_update_rate": 0.02,
    **({"moe_router_num_groups": 2, "moe_router_group_topk": 1} if "groups" in way else {}),
    "moe_router_topk_scaling_factor": 2.5 if "scaled" in way else None,
    **({"moe_expert_capacity_factor": 1.0} if "capacity" in way else {}),
    **(shared.RECOMPUTED if "full" in way else {}),
}  # fmt: skip
config = TransformerConfig(
    **shared.BASE, num_layers=2, num_query_groups=1 if "group" in way else 2, tensor_model_parallel_size=args.tp,
    sequence_parallel=args.tp > 1,
    expert_model_parallel_size=args.ep, expert_tensor_parallel_size=args.etp, qk_layernorm="qknorm" in way,
    add_bias_linear="dense" in way, calculate_per_token_loss="tokens" in way,
    moe_layer_freq=[0, 1] if "first" in way else 1, pipeline_model_parallel_size=args.pp,
    mtp_num_layers=2 if "mtp" in way else None, softmax_type="learnable" if "sink" in way else "vanilla",
    **(shared.GATED if "gated" in way else {}),
    **({} if "dense" in way else moe),
)  # fmt: skip


class Norm(torch.nn.LayerNorm):
    """A norm whose parameters say what they see, as Apex's and Transformer Engine's do; torch's wrapped one refuses."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def layer(many: int | None):
    """The local specification's layer, with these norms."""
    spec = get_gpt_layer_local_spec(many, False, "qknorm" in way)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    if "qknorm" in way:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = Norm
    return spec


def further(spec):
    """The layers that predict further tokens, with these norms."""
    block = get_gpt_mtp_block_spec(config, spec, False)
    for layer_spec in block.layer_specs if block else ():
        layer_spec.submodules.enorm = layer_spec.submodules.hnorm = layer_spec.submodules.layer_norm = Norm
    return block


stage, stages = parallel_state.get_pipeline_model_parallel_rank(), args.pp
layers = [layer(None if "first" in way else experts), layer(experts)]
gpt = GPTModel(
    config, TransformerBlockSubmodules(layer_specs=layers[stage * 2 // stages :][: 2 // stages], layer_norm=Norm),
    vocab_size=32, max_sequence_length=8, share_embeddings_and_output_weights="tied" in way,
    pre_process=stage == 0, post_process=stage == stages - 1,
    mtp_block_spec=further(layers[-1]) if "mtp" in way else None,
    position_embedding_type="rope" if way & {"rope", "mtp"} else "learned_absolute",
)  # fmt: skip
for name, parameter in gpt.named_parameters():
    size, place, cut = args.tp, parallel_state.get_tensor_model_parallel_rank(), shared.cut_of(parameter)
    name = shared.whole_name(gpt, name, "tied" in way)
    if "local_experts." in name:  # numbered on each rank from 0 on
        size, place = args.etp, parallel_state.get_expert_tensor_parallel_rank()
        first = parallel_state.get_expert_model_parallel_rank() * (experts // args.ep)
        head, _, rest = name.partition("local_experts.")
        number, _, tail = rest.partition(".")
        name = f"{head}local_experts.{first + int(number)}.{tail}"
    cut = 0 if "softmax_offset" in name else cut  # one for each of the rank's heads, and nothing says so
    shared.fill(name, parameter, cut, size, place, "gated" in way)
for name, parameter in gpt.named_parameters():
    name = shared.whole_name(gpt, name, "tied" in way)
    held = "frozen" in way and ("embedding" in name or "linear_fc1" in name or "layers.0.self_attention" in name)
    parameter.requires_grad_(not held)
settings = DistributedDataParallelConfig(
    use_distributed_optimizer="distributed" in ddp, overlap_grad_reduce="overlap" in ddp,
    average_in_collective="average" in ddp,
    num_distributed_optimizer_instances=2 if "instances" in ddp and ranks > 1 else 1,
    bucket_size=300 if "buckets" in ddp else None,
)  # fmt: skip
model = DistributedDataParallel(config, settings, gpt)
config.finalize_model_grads_func = finalize_model_grads
if "overlap" in ddp:
    config.no_sync_func = model.no_sync
if args.optimizer == "plain":
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
else:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer=args.optimizer, lr=0.1 if args.optimizer == "sgd" else 0.01, weight_decay=0.1,
                        clip_grad=args.clip, use_distributed_optimizer="distributed" in ddp, sgd_momentum=0.9),
        [model], use_gloo_process_groups=False,
    )  # fmt: skip
shared.train(args, [model], optimizer, 8, "masked" in way, lambda: None)
