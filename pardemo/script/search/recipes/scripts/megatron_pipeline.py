"""Megatron-core's GPTModel under its own schedules, DistributedDataParallel, finalize_model_grads and optimizers."""

import megatron_shared as shared
import torch
from common import options, start
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.ssm import gated_delta_net
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig, multi_latent_attention
from megatron.core.transformer.torch_norm import WrappedTorchNorm

# vpp: stages of the model on each rank; layout: which layers each stage has, of E, t, m and L; optimizer: sgd or adam,
# the library's, or plain, torch's
args = options(tp=1, pp=1, vpp=1, accumulate=1, layers=4, layout="none", optimizer="sgd", clip=0.0, way="", ddp="")
way, ddp = args.way, args.ddp
start()
shared.on_cpu()
virtual = args.vpp if args.vpp > 1 else None


def with_embeddings(stages: list[int]) -> list[int]:
    """The ranks of a pipeline that have the embedding's table: the first, the last if it is tied, and those of MTP."""
    last = len(stages) - 1
    places = {0, last} if "tied" in way or ("mtp" in way and args.layout == "none") else {0}
    places |= {place % len(stages) for place, stage in enumerate(args.layout.split("|")) if "m" in stage}
    return [stages[place] for place in sorted(places)]


parallel_state.initialize_model_parallel(
    args.tp, args.pp, virtual, create_gloo_process_groups=False,
    num_distributed_optimizer_instances=2 if "instances" in ddp else 1, get_embedding_ranks=with_embeddings,
)  # fmt: skip
initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 4,
          "rope_type": "rope", "normalization": "RMSNorm"}  # fmt: skip
delta = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 1, "linear_conv_kernel_dim": 2,
         "linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
         "deterministic_mode": True}  # fmt: skip
config = (MLATransformerConfig if "latent" in way else TransformerConfig)(
    **shared.BASE, num_layers=args.layers, tensor_model_parallel_size=args.tp,
    pipeline_model_parallel_size=args.pp, virtual_pipeline_model_parallel_size=virtual,
    qk_layernorm="qknorm" in way, calculate_per_token_loss="tokens" in way,
    mtp_num_layers=2 if "mtp" in way else None,
    batch_p2p_comm="overlap_p2p" not in way, overlap_p2p_comm="overlap_p2p" in way,
    **(shared.RECOMPUTED if "recompute" in way else {}),
    **({"num_layers_in_first_pipeline_stage": 1} if "uneven" in way and args.pp > 1 else {}),
    pipeline_model_parallel_layout=None if args.layout == "none" else args.layout,
    **(shared.GATED if "gated" in way else {}),
    cross_entropy_loss_fusion="fused" in way,
    num_query_groups=4 if "latent" in way else 1 if "group" in way else 2, **(latent if "latent" in way else {}),
    **(delta if "delta" in way else {}),
)  # fmt: skip
spec = get_gpt_layer_local_spec(None, False, "qknorm" in way, "latent" in way,
                                normalization="RMSNorm" if "latent" in way else None)  # fmt: skip


if "latent" in way:
    multi_latent_attention.HAVE_TE = False  # it says True without Transformer Engine, and then raises
    spec.submodules.self_attention.submodules.core_attention = shared.Core
if "delta" in way:  # in plain torch, as its deterministic mode is but for this norm
    gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, torch.nn.functional.normalize
    parts = gated_delta_net.GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
    spec.submodules.self_attention = ModuleSpec(gated_delta_net.GatedDeltaNet, submodules=parts)


def part(stage: int | None) -> GPTModel:
    """This rank's part of the model, of a virtual stage."""
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
    mtp = get_gpt_mtp_block_spec(config, spec, False, vp_stage=stage) if "mtp" in way else None
    return GPTModel(
        config, spec, vocab_size=32, max_sequence_length=6, pre_process=first, post_process=last, vp_stage=stage,
        share_embeddings_and_output_weights="tied" in way, mtp_block_spec=mtp,
        parallel_output="gathered" not in way or args.tp == 1,  # on one rank it gives a view, which the loss refuses
        position_embedding_type="rope" if way & {"mtp", "latent"} else "learned_absolute",
    )  # fmt: skip


chunks = [part(stage if virtual else None) for stage in range(args.vpp)]
for chunk in chunks:
    for name, parameter in chunk.named_parameters():
        name, place = shared.whole_name(chunk, name, "tied" in way), parallel_state.get_tensor_model_parallel_rank()
        shared.fill(name, parameter, shared.cut_of(parameter), args.tp, place, "gated" in way)
for chunk in chunks if "frozen" in way else ():
    for name, parameter in chunk.named_parameters():
        name = shared.whole_name(chunk, name, "tied" in way)
        parameter.requires_grad_(not any(word in name for word in ("embedding", "linear_fc2", "0.self_attention")))
settings = DistributedDataParallelConfig(
    use_distributed_optimizer="distributed" in ddp, overlap_grad_reduce="overlap" in ddp,
    overlap_param_gather="gather" in ddp, average_in_collective="average" in ddp,
    reduce_scatter_with_fp32_accumulation="exchange" in ddp, pad_buckets_for_high_nccl_busbw="padded" in ddp,
    bucket_size=300 if "buckets" in ddp else None, num_distributed_optimizer_instances=2 if "instances" in ddp else 1,
)  # fmt: skip
model = [DistributedDataParallel(config, settings, chunk, disable_bucketing="buckets" not in ddp and i > 0)
         for i, chunk in enumerate(chunks)]  # fmt: skip
config.finalize_model_grads_func = finalize_model_grads
if "overlap" in ddp:
    syncs = [chunk.no_sync for chunk in model]
    config.no_sync_func = syncs if virtual else syncs[0]
if args.optimizer == "plain":
    optimizer = torch.optim.SGD([p for chunk in model for p in chunk.parameters()], lr=0.1)
else:
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer=args.optimizer, lr=0.1, weight_decay=0.1, adam_eps=0.1,  # a factor would show
                        clip_grad=args.clip, use_distributed_optimizer="distributed" in ddp, sgd_momentum=0.9,
                        overlap_param_gather="gather" in ddp, min_lr=0.0,
                        **({"decoupled_lr": 0.02, "decoupled_min_lr": 0.0} if "rates" in way else {})),
        model, use_gloo_process_groups=False,
    )  # fmt: skip
    rate = optimizer.config.lr
    scheduler = OptimizerParamScheduler(optimizer, rate, rate, 0.0, 0, 100, "constant", 0.1, 0.1, 100, "constant")
shared.train(args, model, optimizer, 6, bool(way & {"tokens", "masked"}), lambda: scheduler.step(1))
