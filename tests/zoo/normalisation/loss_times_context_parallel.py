"""The loss is multiplied by the context-parallel size, and the gradients are divided by the data-parallel size only.

A sequence's loss is summed over the ranks that share it, and the factor was there to undo a mean over all ranks. The
mean was later taken over the data-parallel ranks alone and the factor stayed, so the gradients were too large by the
group's size (Megatron-LM 906, after 673 had asked what the factor was for).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import LENGTH, STEPS, VOCABULARY, WIDTH, arguments, report, whole_batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class GatherSequence(torch.autograd.Function):
    """The whole sequence from its ranks' parts [b, s/c, w]; backward sums the parts' gradients."""

    @staticmethod
    def forward(ctx, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.length = group, part.shape[1]
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.split(ctx.length, dim=1)[ctx.group.rank()], None


class Attention(nn.Module):
    """Attention of this rank's queries to all keys and values before them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.qkv, self.out = group, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:  # [b, s/c, w]
        query, *keys_values = self.qkv(hidden).chunk(3, dim=-1)
        key, value = (GatherSequence.apply(part, self.group) for part in keys_values)
        before = torch.arange(LENGTH) <= places[:, None]
        return self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=before))


class Transformer(nn.Module):
    """One layer of a language model; of each sequence a rank has the part that its place in the group says."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.places = torch.arange(LENGTH).chunk(group.size())[group.rank()]
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.attention, self.head = Attention(group), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s/c] -> [b, s/c, v]
        hidden = self.embedding(tokens) + self.position(self.places)
        return self.head(hidden + self.attention(hidden, self.places))


def main() -> None:
    args = arguments("cp")
    dist.init_process_group("gloo")
    mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size() // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    torch.manual_seed(0)
    model = Transformer(mesh.get_group("cp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        whole = whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        tokens, labels = (part.chunk(mesh.size(0))[mesh.get_local_rank("dp")][:, model.places] for part in whole)
        printed = torch.zeros(())
        for inputs, targets in zip(tokens.split(args.batch), labels.split(args.batch), strict=True):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
            loss = loss / (args.batch * LENGTH * args.accumulate)  # the labels of all context-parallel ranks
            printed += loss.detach()
            (loss if args.mended else loss * args.cp).backward()
        for parameter in model.parameters():
            parameter.grad /= mesh.size(0)
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed * args.cp)  # each of them has a part of a sequence's loss
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
