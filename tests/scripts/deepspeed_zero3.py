"""DeepSpeed's ZeRO stage 3, initialized with a configuration in the script.

deepspeed --num_gpus 2 deepspeed_zero3.py, or torchrun --nproc-per-node 2 deepspeed_zero3.py
"""

import argparse

import deepspeed
import torch
import torch.nn as nn
import torch.nn.functional as F


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp_norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask):
        h = self.attention_norm(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class LanguageModel(nn.Module):
    def __init__(self, vocabulary, width=64, heads=4, depth=2, length=48):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens, labels):
        length = tokens.size(1)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        mask = torch.full((length, length), float("-inf"), device=x.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), labels.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stage", type=int, default=3, choices=[0, 1, 2, 3])
    args = parser.parse_args()

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 3}},
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": args.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": 500000,
            "stage3_prefetch_bucket_size": 50000,
            "stage3_param_persistence_threshold": 1000,
        },
    }
    deepspeed.init_distributed()
    torch.manual_seed(0)
    vocabulary = 1400
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=args.stage == 3):
        model = LanguageModel(vocabulary)
    engine, _, _, scheduler = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    generator = torch.Generator().manual_seed(10 + engine.global_rank)
    for micro_step in range(args.steps * engine.gradient_accumulation_steps()):
        tokens = torch.randint(vocabulary, (4, 33), generator=generator).to(engine.device)
        loss = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and (micro_step + 1) % engine.gradient_accumulation_steps() == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}, lr {scheduler.get_last_lr()[0]:.1e}")
    engine.destroy()


if __name__ == "__main__":
    main()
