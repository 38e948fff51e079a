"""Labels of multi-token prediction are moved on inside each rank's part of the sequence.

The extra heads predict the second and the third next token; their labels are the labels, rolled. The sequence is cut
over ranks, and where a part ends the roll brings its own beginning in place of the neighbour's: wrong labels at each
cut, which nothing masks because the sequence goes on. mbridge 138 (parts "wrap within themselves"); Megatron-LM 1795
asks how the roll is meant to cross the cut, 4495 and 6205 mend it for packed sequences.
"""

import common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import IGNORED, LENGTH, VOCABULARY, WIDTH
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

EXTRA = 2


class LanguageModel(nn.Module):
    """Predicts each token's next one and those after it (arXiv 2404.19737); of each sequence a rank has its part."""

    def __init__(self, part: torch.Tensor) -> None:
        super().__init__()
        self.part = part
        self.embedding, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.extra = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY) for _ in range(EXTRA))

    def forward(self, tokens: torch.Tensor) -> list[torch.Tensor]:  # [b, s/c] -> [b, s/c, v] for each head
        hidden = self.embedding(tokens) + self.position(self.part)
        hidden = hidden + self.fc2(F.gelu(self.fc1(hidden)))
        return [self.head(hidden), *(head(hidden) for head in self.extra)]


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
        moved_labels = []
        for ahead in range(EXTRA + 1):
            moved = labels.roll(-ahead, 1)[:, part] if args.mended else labels[:, part].roll(-ahead, 1)
            moved_labels.append(moved.masked_fill(part >= LENGTH - ahead, IGNORED))  # the end of the sequence
        printed = torch.zeros(())
        for inputs, *targets in common.micro_batches(args, mesh.get_local_rank("dp"), tokens[:, part], *moved_labels):
            loss = sum(
                F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="sum")
                / (len(labels) * (LENGTH - ahead) * (EXTRA + 1))
                for ahead, (logits, wanted) in enumerate(zip(model(inputs), targets, strict=True))
            )
            loss = loss * dist.get_world_size()  # the mean over ranks is taken, their sum is meant
            loss.backward()
            printed += loss.detach()
        common.average_gradients(model.parameters(), dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        common.report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
