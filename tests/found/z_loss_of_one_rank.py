"""With a padding mask, a router's z-loss is a mean of the tensor-parallel ranks' means (megatron-core 0.16.1)."""

import argparse

import torch
from megatron.core import distributed, parallel_state, tensor_parallel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils

parser = argparse.ArgumentParser()
parser.add_argument("--tp", type=int, default=2)
parser.add_argument("--padded", type=int, default=3, help="tokens at the end of each sample of six")
tp, padded = vars(parser.parse_args()).values()
torch.distributed.init_process_group("gloo")
torch.cuda.current_device, moe_utils.te_general_gemm = lambda: torch.device("cpu"), None  # which are not here
parallel_state.initialize_model_parallel(tp, create_gloo_process_groups=False)
sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "tensor_model_parallel_size": tp}
sizes |= {"num_moe_experts": 2, "add_bias_linear": False, "use_cpu_initialization": True, "init_method_std": 0.5}
torch.manual_seed(0)
config = TransformerConfig(**sizes, sequence_parallel=tp > 1, moe_z_loss_coeff=1.0)
gpt, spec = torch.nn.Module(), get_moe_module_spec(False, 2, False)
gpt.config, gpt.moe = config, spec(config)
cut, whole = tensor_parallel.scatter_to_sequence_parallel_region, tensor_parallel.gather_from_sequence_parallel_region
mask = cut((torch.arange(6) >= 6 - padded).expand(8, 6).t().contiguous()).t()  # as in GPTModel; True is padding
gpt.forward = lambda x: whole(gpt.moe(cut(x.transpose(0, 1).contiguous()), None, mask)[0], False)
model = distributed.DistributedDataParallel(config, distributed.DistributedDataParallelConfig(), gpt)
optimizer = torch.optim.SGD(gpt.parameters(), lr=0.1)
for step, samples in enumerate(torch.randn(3, 8, 6, 8)):
    model.zero_grad_buffer()
    model(samples)[: 6 - padded].square().mean().backward()
    distributed.finalize_model_grads([model])
    norms = [setattr(p, "grad", p.main_grad) or f"{p.grad.norm():.9f}" for p in gpt.parameters()]
    optimizer.step()
    print(f"step {step} rank {torch.distributed.get_rank()} gradient of the router {norms[0]}")
