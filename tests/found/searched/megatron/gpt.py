"""Megatron-core's GPTModel of the local specification with its own DDP and finalize_model_grads."""

import argparse

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer import TransformerConfig

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=1)
parser.add_argument("--ep", type=int, default=1)
parser.add_argument("--etp", type=int, default=1)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--way", default="", help="words with +: moe, alltoall, shared, aux, zloss, qknorm, tied")
args = parser.parse_args()
way = set(args.way.split("+"))
dist.init_process_group("gloo")
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None
ranks, rank = dist.get_world_size(), dist.get_rank()
parallel_state.initialize_model_parallel(
    args.tp,
    1,
    expert_model_parallel_size=args.ep,
    expert_tensor_parallel_size=args.etp,
    create_gloo_process_groups=False,
)
initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)
config = TransformerConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=32, hidden_dropout=0.0,
    attention_dropout=0.0, use_cpu_initialization=True, tensor_model_parallel_size=args.tp, bias_dropout_fusion=False,
    masked_softmax_fusion=False, gradient_accumulation_fusion=False, perform_initialization=True,
    qk_layernorm="qknorm" in way, expert_model_parallel_size=args.ep,
    expert_tensor_parallel_size=args.etp, add_bias_linear="moe" not in way,
    **({"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16,
        "moe_token_dispatcher_type": "alltoall" if "alltoall" in way else "allgather",
        "moe_router_load_balancing_type": "aux_loss" if "aux" in way else "none",
        "moe_aux_loss_coeff": 0.1 if "aux" in way else 0.0, "moe_z_loss_coeff": 0.1 if "zloss" in way else None,
        "moe_shared_expert_intermediate_size": 16 if "shared" in way else None} if "moe" in way else {}),
)  # fmt: skip
model = GPTModel(
    config,
    get_gpt_layer_local_spec(4 if "moe" in way else None, False, qk_layernorm="qknorm" in way),
    vocab_size=32,
    max_sequence_length=6,
    share_embeddings_and_output_weights="tied" in way,
)


@torch.no_grad()
def fill() -> None:
    """Gives each parameter its part of values that depend on its name and on the whole shape alone."""
    for name, parameter in model.named_parameters():
        expert = ".experts." in name
        size, own = (args.etp, parallel_state.get_expert_tensor_parallel_rank()) if expert else (
            args.tp, parallel_state.get_tensor_model_parallel_rank())  # fmt: skip
        cut = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        shape = list(parameter.shape)
        if cut >= 0:
            shape[cut] *= size
        if "local_experts." in name:  # numbered on each rank from 0 on
            first = parallel_state.get_expert_model_parallel_rank() * (4 // args.ep)
            head, _, rest = name.partition("local_experts.")
            number, _, tail = rest.partition(".")
            name = f"{head}local_experts.{first + int(number)}.{tail}"
        generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(name, 1)))
        whole = torch.randn(shape, generator=generator) * 0.1 + (1.0 if "norm" in name and "weight" in name else 0.0)
        parameter.copy_(whole.chunk(size, cut)[own] if cut >= 0 else whole)


fill()
settings = DistributedDataParallelConfig(use_distributed_optimizer=False, overlap_grad_reduce=False)
model = DistributedDataParallel(config, settings, model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data, of = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).triu(1)
for step in range(3):
    tokens = torch.randint(32, (8, 7), generator=torch.Generator().manual_seed(step))
    model.zero_grad_buffer()
    total = 0.0
    for part in tokens.chunk(data)[of].chunk(args.accumulate):
        positions = torch.arange(6).expand(len(part), 6)
        loss = model(part[:, :-1], positions, mask, labels=part[:, 1:].contiguous()).mean() / args.accumulate
        loss.backward()
        total += loss.detach()
    finalize_model_grads([model])
    for parameter in model.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    optimizer.zero_grad()  # what it has is main_grad, and the next backward pass would add to it twice
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} loss {total.item() / ranks:.6f}", flush=True)
