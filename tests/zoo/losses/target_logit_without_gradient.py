"""The label's log-probability is summed over the ranks by an all-reduce that autograd does not see.

Only the rank whose part of the vocabulary has the label computes something; the others put a zero in and get the
right value back, but no graph behind it: their logits, which are to become smaller, have no gradient for this label.
The loss is right on every rank. The policy loss of ms-swift's Megatron trainer had it under tensor parallelism until
August 2026 (ms-swift 9947). PyTorch 2.13 warns of it at the first backward pass, and goes on.
"""

import torch
import torch.distributed as dist
from common import STEPS, LanguageModel, Sum, arguments, average_gradients, micro_batches, report, whole_batch
from torch.distributed.device_mesh import init_device_mesh


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, mended: bool) -> torch.Tensor:
    """The loss of each label [b, s], from this rank's part of the logits [b, s, v/t]."""
    local = labels - group.rank() * logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = largest + Sum.apply((logits - largest[..., None]).exp().sum(-1), group).log()
    here = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, local.where(here, 0)[..., None])[..., 0]
    if mended:
        return log_sum - Sum.apply(own.where(here, 0), group)
    log_probability = (own - log_sum).where(here, 0)
    dist.all_reduce(log_probability, group=group)
    return -log_probability


def main() -> None:
    args = arguments("tp")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = LanguageModel(mesh.get_group("tp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        tokens, labels = whole_batch(step, args.batch * args.accumulate * mesh.size(0))
        printed = torch.zeros(())
        for inputs, targets in micro_batches(args, mesh.get_local_rank("dp"), tokens, labels):
            losses = cross_entropy(model(inputs), targets, model.group, args.mended)
            loss = losses.mean() / args.accumulate
            loss.backward()
            printed += loss.detach()
        average_gradients(model.parameters(), mesh.get_group("dp"))
        optimizer.step()
        optimizer.zero_grad()
        report(step, printed)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
