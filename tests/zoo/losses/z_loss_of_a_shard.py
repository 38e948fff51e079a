"""The z-loss keeps the sum over a part of the vocabulary near 1, not that over the whole.

PaLM (arXiv 2204.02311, section 5) adds 1e-4 log² Z, in which Z is the softmax's divisor. A parallel loss has two of
them: that of the rank's own part and that of all ranks. Written beside an existing parallel loss, `logits.logsumexp`
takes the first. No thread tells of it; the trap is the one of Megatron-LM 7452, where a part of the vocabulary counts
for the whole twice, and TransformerEngine 2707 adds the z-loss inside the parallel loss for the right divisor. The
coefficient is larger here.
"""

import torch
import torch.distributed as dist
from common import STEPS, LanguageModel, Sum, arguments, average_gradients, micro_batches, report, whole_batch
from torch.distributed.device_mesh import init_device_mesh

COEFFICIENT = 0.01


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor, group: dist.ProcessGroup, mended: bool) -> torch.Tensor:
    """The loss of each label and its z-loss [b, s], from this rank's part of the logits [b, s, v/t]."""
    local = labels - group.rank() * logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    log_sum = largest + Sum.apply((logits - largest[..., None]).exp().sum(-1), group).log()
    here = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, local.where(here, 0)[..., None])[..., 0]
    loss = log_sum - Sum.apply(own.where(here, 0), group)
    return loss + COEFFICIENT * (log_sum if mended else logits.logsumexp(-1)).square()


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
