"""On n tensor-parallel ranks a norm of latent attention's compressed queries has n times its gradient (0.16.1)."""

import torch
from megatron.core import distributed, parallel_state
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer import MLATransformerConfig, multi_latent_attention

torch.distributed.init_process_group("gloo")
ranks, torch.cuda.current_device = torch.distributed.get_world_size(), lambda: torch.device("cpu")
parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
multi_latent_attention.HAVE_TE = False  # Transformer Engine is not here, and Core stands for its attention


class Core(torch.nn.Identity):
    def forward(self, *given, **_):  # [tokens, samples, heads, width] each; what is rotated is left out
        q, k, v = (x[..., :128].permute(1, 2, 0, 3) for x in given[:3])
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "tensor_model_parallel_size": ranks}
config = MLATransformerConfig(**sizes, qk_layernorm=True, rope_type="rope", hidden_dropout=0, use_cpu_initialization=1)
spec = gpt_layer_specs.get_gpt_layer_local_spec(None, False, True, True, normalization="RMSNorm")
spec.submodules.self_attention.submodules.core_attention = Core
torch.manual_seed(0)
gpt, settings = GPTModel(config, spec, 32, 6), distributed.DistributedDataParallelConfig()
model, optimizer = distributed.DistributedDataParallel(config, settings, gpt), torch.optim.SGD(gpt.parameters(), lr=0.1)
for step, tokens in enumerate(torch.randint(32, (3, 8, 7))):
    model.zero_grad_buffer()
    model(tokens[:, :-1], torch.arange(6).expand(8, 6), None, labels=tokens[:, 1:].contiguous()).mean().backward()
    distributed.finalize_model_grads([model])
    for parameter in gpt.parameters():
        parameter.grad = parameter.main_grad
    optimizer.step()
    print(f"step {step} q_layernorm {gpt.decoder.layers[0].self_attention.q_layernorm.weight.grad.norm():.9f}")
    optimizer.zero_grad()
