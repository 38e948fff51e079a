"""The extra heads' loss misses the factor that undoes the mean over context-parallel ranks.

Gradients are averaged over all ranks, also over those that share a sequence, and the main loss is multiplied by their
number to make up for it. The loss of multi-token prediction reaches the graph by another way, and nobody multiplies
it: with context parallelism it counts less by the size of the group (Megatron-LM 3943 and 3959; the balancing loss
had been mended before in 2217).
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import IGNORED, LENGTH, VOCABULARY, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class LanguageModel(nn.Module):
    """Predicts each token's next one and the one after it; of each sequence a rank has its part."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.part = part
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.extra = nn.Linear(WIDTH, VOCABULARY), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [b, s/c] -> twice [b, s/c, v]
        hidden = self.embedding(tokens) + self.position(self.part)
        hidden = hidden + self.fc2(F.gelu(self.fc1(hidden)))
        return self.head(hidden), self.extra(hidden)


def main() -> None:
    args = common.arguments("cp")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.cp, args.cp), mesh_dim_names=("dp", "cp"))
    part = torch.arange(LENGTH).chunk(args.cp)[mesh.get_local_rank("cp")]
    torch.manual_seed(0)
    model = LanguageModel(part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(common.STEPS):
        tokens, labels = common.whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        after_next = labels.roll(-1, 1)
        after_next[:, -1] = IGNORED
        whole = (tokens[:, part], labels[:, part], after_next[:, part])
        printed = torch.zeros(())
        for inputs, *targets in common.micro_batches(args, mesh.get_local_rank("dp"), *whole):
            sums = [
                F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
                for logits, wanted in zip(model(inputs), targets, strict=True)
            ]
            each = args.batch * args.accumulate  # sequences whose loss this rank shares with its group
            loss, extra = sums[0] / (each * LENGTH), 0.3 * sums[1] / (each * (LENGTH - 1))
            (args.cp * (loss + extra) if args.mended else args.cp * loss + extra).backward()
            printed += args.cp * (loss + extra).detach()
        common.average_gradients(model.parameters(), dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        common.report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
