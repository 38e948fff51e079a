"""The whole loss is multiplied by the number of ranks, the auxiliary one with it.

The language model's loss is divided by the labels of all ranks, so that it has to be multiplied by their number
before DDP takes its mean. The router's balancing loss is a mean already; the product makes it as many times too heavy
as there are ranks, and convergence suffers on many GPUs only: transformers 48690 and 48706 (September 2026, Qwen3-MoE
in the Trainer).
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import STEPS, VOCABULARY, WIDTH, arguments, micro_batches, report, whole_batch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXPERTS, COEFFICIENT = 4, 0.1


class Mixture(nn.Module):
    """Experts of which each token takes the likeliest, and the loss that keeps them busy alike."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:  # [b, s, w]
        probabilities = self.router(hidden).softmax(-1)
        chosen = F.one_hot(probabilities.argmax(-1), EXPERTS)
        # Of each sequence by itself (DeepSeek-V3, arXiv 2412.19437, equation 17): the same however the batch is cut.
        self.balance = EXPERTS * (chosen.to(hidden.dtype).mean(1) * probabilities.mean(1)).sum(-1).mean()
        gates = probabilities * chosen
        return sum(gates[..., number, None] * expert(hidden) for number, expert in enumerate(self.experts))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.moe = nn.Embedding(VOCABULARY, WIDTH), Mixture()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # [b, s] -> [b, s, v]
        hidden = self.embedding(tokens)
        return self.head(hidden + self.moe(hidden))


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * ranks)
        printed = torch.zeros(())
        for number, (inputs, targets) in enumerate(micro_batches(args, dist.get_rank(), tokens, labels)):
            model.require_backward_grad_sync = number == args.accumulate - 1
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / labels.numel()
            balance = COEFFICIENT * model.module.moe.balance / args.accumulate
            (ranks * loss + balance if args.mended else ranks * (loss + balance)).backward()
            printed += ranks * loss.detach() + balance.detach()
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
