"""LoRA under tensor parallelism: the half of each adapter that all ranks hold gets a part of its gradient on each.

Of a layer cut by columns it is A (B is cut with the columns), of one cut by rows it is B (A is cut with the rows).
Where nothing sums them, each rank trains another adapter, and rank 0's is the one that is saved: ISEEKYAN/Megatron-LM
131, for experts' adapters. Under sequence parallelism the same halves see a part of the sequence:
modelscope/mcore-bridge 173, where a saved adapter was zero.
"""

import common
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

WIDTH, RANK = 32, 4


class Adapted(nn.Module):
    """A frozen weight, cut along `dim` (0: columns, 1: rows), and an adapter B A of which one half is cut with it."""

    def __init__(self, inputs, outputs, dim, tensor):
        super().__init__()
        weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5, requires_grad=False)
        a, b = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5), nn.Parameter(torch.randn(outputs, RANK) / 10)
        self.weight = common.cut(weight, dim, tensor)
        self.lora_a = a if dim == 0 else common.cut(a, 1, tensor)
        self.lora_b = common.cut(b, 0, tensor) if dim == 0 else b
        self.dim, self.tensor = dim, tensor

    def forward(self, x):
        if self.dim == 0:
            x = common.copy_to_cut(x, self.tensor)
        y = F.linear(x, self.weight) + F.linear(F.linear(x, self.lora_a), self.lora_b)
        return y if self.dim == 0 else common.sum_of_cut(y, self.tensor)


class Model(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.embed = nn.Embedding(common.VOCAB, WIDTH).requires_grad_(False)
        self.up = Adapted(WIDTH, 4 * WIDTH, 0, tensor)
        self.down = Adapted(4 * WIDTH, WIDTH, 1, tensor)
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, common.VOCAB).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(F.gelu(self.up(x)))))


def main():
    args = common.arguments(tp=1)
    dist.init_process_group("gloo")
    tensor, data = common.neighbours(args.tp)
    torch.manual_seed(9)
    model = Model(tensor)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    for step in range(common.STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for inputs, targets in common.micro_batches(step, args, data):
            loss = F.cross_entropy(model(inputs).transpose(1, 2), targets) / args.accumulate
            loss.backward()
            total += loss.detach()
        if args.mended:
            common.sum_gradients([model.up.lora_a, model.down.lora_b], tensor)
        common.sum_gradients(trained, data, divide_by=dist.get_world_size(data))
        optimizer.step()
        common.show(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
