"""Experts that are cut otherwise than attention have gradients of their rank's tokens (megatron-core 0.16.1)."""

import argparse

import torch
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--etp", type=int, default=1)
tp, etp = vars(parser.parse_args()).values()
torch.distributed.init_process_group("gloo")
torch.cuda.current_device, moe_utils.te_general_gemm = lambda: torch.device("cpu"), None  # which are not here
sizes = {"expert_tensor_parallel_size": etp}
parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False, **sizes)
sizes |= {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": tp}
sizes |= {"num_moe_experts": 2, "add_bias_linear": False, "use_cpu_initialization": True, "init_method_std": 0.5}
config, spec = TransformerConfig(**sizes, sequence_parallel=tp > 1), get_moe_module_spec(False, 2, False)
torch.manual_seed(0)
gpt = torch.nn.Module()
gpt.config, gpt.moe = config, spec(config)
cut, whole = tensor_parallel.scatter_to_sequence_parallel_region, tensor_parallel.gather_from_sequence_parallel_region
gpt.forward = lambda x: whole(gpt.moe(cut(x.transpose(0, 1).contiguous()))[0], tensor_parallel_output_grad=False)
model = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), gpt)
optimizer, replicas = torch.optim.SGD(gpt.parameters(), lr=1), parallel_state.get_data_parallel_world_size()
for step, samples in enumerate(torch.randn(3, 8, 6, 8)):
    model.zero_grad_buffer()
    model(samples.chunk(replicas)[parallel_state.get_data_parallel_rank()]).square().mean().backward()
    distributed.finalize_model_grads([model])
    gradients = [setattr(p, "grad", p.main_grad) or f"{p.grad.norm():.9f}" for p in gpt.parameters()]
    optimizer.step()
    print(f"step {step} rank {torch.distributed.get_rank()} router {gradients[0]} expert {gradients[1]}")
