"""fully_shard (FSDP2) on each block and on the root, in bfloat16, after an initialization on the meta device.

torchrun --nproc-per-node 2 fsdp2.py --steps 6
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward = nn.Sequential(nn.Linear(dim, 3 * dim), nn.SiLU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocab_size=1536, dim=96, heads=4, layers=3, max_length=64):
        super().__init__()
        self.tok_embeddings, self.positions = nn.Embedding(vocab_size, dim), nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens) + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


@torch.no_grad()
def init_weights(model):
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            module.reset_parameters()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--mixed-precision", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--keep-gathered", action="store_true", help="do not reshard after the forward")
    args = parser.parse_args()

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device_type = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    device = torch.device(f"{device_type}:{os.environ['LOCAL_RANK']}" if device_type != "cpu" else "cpu")
    if device_type != "cpu":
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(backend=torch.distributed.get_default_backend_for_device(device))
    mesh = init_device_mesh(device_type, (world_size,), mesh_dim_names=("fsdp",))

    with torch.device("meta"):
        model = Transformer()
    options = {"mesh": mesh, "reshard_after_forward": not args.keep_gathered}
    if args.mixed_precision:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    assert isinstance(model, FSDPModule)
    model.to_empty(device=device)
    torch.manual_seed(0)
    init_weights(model)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device=device).manual_seed(100 + rank)
    for step in range(args.steps):
        tokens = torch.randint(1536, (args.batch, args.length + 1), device=device, generator=generator)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.4f}, norm {norm:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
