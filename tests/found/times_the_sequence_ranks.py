"""Under Ulysses for transformers, ZeRO 1 and 2 multiply gradients by the sequence ranks (deepspeed 0.19.8)."""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch.distributed.nn.functional import all_gather
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--sp", type=int, default=2)
parser.add_argument("--stage", type=int, default=2)
args = parser.parse_args()
deepspeed.ops.__compatible_ops__ = {}  # or it compiles an operator that nothing here uses
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM._from_config(LlamaConfig(**sizes), attn_implementation="sdpa")
mpu = UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", args.sp, micro_batch_size=1)
settings = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": args.sp, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": args.stage}}  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)[0]
for step in range(3):
    tokens, labels = torch.randint(64, (2, 1, 8), generator=torch.Generator().manual_seed(step))
    part, places = (one.chunk(args.sp, 1)[dist.get_rank()] for one in (tokens, torch.arange(8)[None]))
    logits = engine(input_ids=part, position_ids=places, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[0], labels.chunk(args.sp, 1)[dist.get_rank()][0])
    engine.backward(sum(all_gather(loss, group=mpu and mpu.get_sequence_parallel_group())) / args.sp)
    engine.step()
    if dist.get_rank() == 0:
        print(f"step {step} norm of the gradient {engine.get_global_grad_norm():.6f}")
