"""Megatron-core's GPTModel: tensor parallel by 2, its DistributedDataParallel and its distributed optimizer.

torchrun --nproc-per-node 2 megatron_gpt.py (or 4: two replicas of two ranks)
"""

import argparse
import os

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY, LENGTH = 1152, 32


def initialize_distributed(args):
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend="nccl")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_parallel,
        pipeline_model_parallel_size=args.pipeline_parallel,
        expert_model_parallel_size=args.expert_parallel,
    )


def model_provider(args):
    experts = {}
    if args.num_experts:
        experts = {
            "num_moe_experts": args.num_experts,
            "expert_model_parallel_size": args.expert_parallel,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": args.dispatcher,
            "moe_router_load_balancing_type": "none",
            "add_bias_linear": False,
        }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=192,
        tensor_model_parallel_size=args.tensor_parallel,
        pipeline_model_parallel_size=args.pipeline_parallel,
        bf16=args.bf16,
        params_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if args.bf16 else torch.float32,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if args.recompute else None,
        recompute_method="uniform" if args.recompute else None,
        recompute_num_layers=1 if args.recompute else None,
        **experts,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(num_experts=args.num_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=args.tie,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


def batches(args):
    """The same for all ranks of a tensor-parallel group."""
    generator = torch.Generator().manual_seed(100 + parallel_state.get_data_parallel_rank())
    positions = torch.arange(LENGTH, device="cuda").repeat(args.micro_batch_size, 1)
    later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    while True:
        tokens = torch.randint(VOCABULARY, (args.micro_batch_size, LENGTH + 1), generator=generator).cuda()
        yield tokens[:, :-1].contiguous(), positions, later, tokens[:, 1:].contiguous()


def forward_step(data_iterator, model):
    tokens, positions, mask, labels = next(data_iterator)
    losses = model(tokens, positions, mask, labels=labels)

    def loss_function(losses):
        loss = losses.float().mean()
        return loss, {"lm loss": loss.detach().clone()}

    return losses, loss_function


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tensor-parallel", type=int, default=2)
    parser.add_argument("--pipeline-parallel", type=int, default=1)
    parser.add_argument("--expert-parallel", type=int, default=1)
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--dispatcher", choices=["alltoall", "allgather"], default="alltoall")
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--tie", action="store_true", help="one weight for the embedding and the output")
    parser.add_argument("--all-reduce", action="store_true", help="no distributed optimizer")
    parser.add_argument("--micro-batch-size", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()

    initialize_distributed(args)
    torch.manual_seed(123)
    model_parallel_cuda_manual_seed(123)
    gpt = model_provider(args).cuda()
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16, overlap_grad_reduce=False, use_distributed_optimizer=not args.all_reduce
    )
    model = DistributedDataParallel(config=gpt.config, ddp_config=ddp_config, module=gpt)
    gpt.config.finalize_model_grads_func = finalize_model_grads
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        bf16=args.bf16,
        params_dtype=gpt.config.params_dtype,
        use_distributed_optimizer=not args.all_reduce,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    gpt.config.grad_scale_func = optimizer.scale_loss

    forward_backward = get_forward_backward_func()
    data_iterator = batches(args)
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = forward_backward(
            forward_step_func=forward_step,
            data_iterator=data_iterator,
            model=[model],
            num_microbatches=args.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=args.micro_batch_size,
            decoder_seq_length=LENGTH,
            forward_only=False,
        )
        successful, grad_norm, _ = optimizer.step()
        if losses and parallel_state.is_pipeline_last_stage() and parallel_state.get_data_parallel_rank() == 0:
            loss = torch.stack([one["lm loss"] for one in losses]).mean().item()
            print(f"step {step}: loss {loss:.4f}, grad norm {grad_norm:.3f}, {'updated' if successful else 'skipped'}")

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
