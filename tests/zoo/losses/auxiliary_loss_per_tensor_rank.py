"""The router's gradient is summed over tensor-parallel ranks, and the auxiliary loss is in it once for each of them.

Experts are cut over the ranks, so that what comes back to the router through them is a part on each rank and has to
be summed. The balancing loss is computed by every rank as a whole from the same probabilities, and the sum counts it
as often as there are ranks. Megatron-LM 1406 (gradients scaled by the number of parts under tensor parallelism), 5047
(other scales of the same loss for other sizes), lm-engine 118.
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import VOCABULARY, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

EXPERTS, COEFFICIENT = 4, 0.1


class Expert(nn.Module):
    """A rank's part of a feed-forward network: rows of the first layer, columns of the second."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.fc1 = common.cut(nn.Linear(WIDTH, 2 * WIDTH, bias=False), 0, group)
        self.fc2 = common.cut(nn.Linear(2 * WIDTH, WIDTH, bias=False), 1, group)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(hidden)))


class Mixture(nn.Module):
    """Experts of which each token takes the likeliest, and the loss that keeps them busy alike."""

    def __init__(self, group: dist.ProcessGroup, mended: bool) -> None:
        super().__init__()
        self.group, self.mended = group, mended
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(group) for _ in range(EXPERTS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, s, w]
        hidden = common.Copy.apply(hidden, self.group)
        probabilities = self.router(hidden).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS)
        # Of each sequence by itself (DeepSeek-V3, arXiv 2412.19437, equation 17): the same however the batch is cut.
        self.balance = EXPERTS * (chosen.to(hidden.dtype).mean(1) * probabilities.mean(1)).sum(-1).mean()
        if self.mended:
            self.balance = common.Sum.apply(self.balance / self.group.size(), self.group)
        gates = probabilities * chosen
        mixed = sum(gates[..., number, None] * expert(hidden) for number, expert in enumerate(self.experts))
        return common.Sum.apply(mixed, self.group)


class LanguageModel(nn.Module):
    def __init__(self, group: dist.ProcessGroup, mended: bool) -> None:
        super().__init__()
        self.embedding, self.moe = nn.Embedding(VOCABULARY, WIDTH), Mixture(group, mended)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, v]
        hidden = self.embedding(tokens)
        return self.head(hidden + self.moe(hidden))


def main() -> None:
    args = common.arguments("tp")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(mesh.get_group("tp"), args.mended)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(common.STEPS):
        tokens, labels = common.whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        printed = torch.zeros(())
        for inputs, targets in common.micro_batches(args, mesh.get_local_rank("dp"), tokens, labels):
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss = (loss + COEFFICIENT * model.moe.balance) / args.accumulate
            loss.backward()
            printed += loss.detach()
        dist.all_reduce(model.moe.router.weight.grad, group=mesh.get_group("tp"))  # each rank's experts gave it a part
        common.average_gradients(model.parameters(), mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        common.report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
