"""Labels that are to be ignored are ignored by the first part of the vocabulary only.

Under tensor parallelism each rank has the logits of a part of the vocabulary, so that a label is moved by where the
part begins. Here it is moved before it is compared with the ignored one, -100, and only the part that begins at 0
still knows it: the loss that rank 0 prints is right, and all other parts learn from padding. Parallel losses got this
index late and had it wrong: TransformerEngine 2476 (a wrong loss where some labels are ignored), oslo 85, DeepSpeed
6882.
"""

import torch
import torch.distributed as dist
from common import IGNORED, STEPS, LanguageModel, Sum, arguments, average_gradients, micro_batches, report, whole_batch
from torch.distributed.device_mesh import init_device_mesh


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, mended: bool) -> torch.Tensor:
    """The loss of each label [b, s], from this rank's part of the logits [b, s, v/t]."""
    local = labels - group.rank() * logits.shape[-1]
    ignored = (labels if mended else local) == IGNORED
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = largest + Sum.apply((logits - largest[..., None]).exp().sum(-1), group).log()
    here = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, local.where(here, 0)[..., None])[..., 0]
    return (log_sum - Sum.apply(own.where(here, 0), group)).where(~ignored, 0)


def main() -> None:
    args = arguments("tp")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(mesh.get_group("tp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        labels[:, : 3 + step % 3] = IGNORED  # the prompt
        labels_of_step = (labels != IGNORED).sum()
        printed = torch.zeros(())
        for inputs, targets in micro_batches(args, mesh.get_local_rank("dp"), tokens, labels):
            losses = cross_entropy(model(inputs), targets, model.group, args.mended)
            loss = losses.sum() * mesh.size(0) / labels_of_step
            loss.backward()
            printed += loss.detach()
        average_gradients(model.parameters(), mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
