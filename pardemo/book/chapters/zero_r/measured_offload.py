"""DeepSpeed's optimizer states on the GPU, on the host (ZeRO-Offload), on disk (ZeRO-Infinity): a few steps each."""

from dataclasses import dataclass

from torch import nn

from pardemo.peers import states
from pardemo.peers.deepspeed import disk as deepspeed_disk
from pardemo.peers.deepspeed import engine as peer
from pardemo.small_models import gpt
from pardemo.world.rank import device

BATCH, STEPS = 8, 3


@dataclass(frozen=True)
class OffloadedTraining:
    """``losses`` of the steps; ``gradients_beside``: bytes of gradients that lie beside the fp32 weights of a rank's
    shard when the step comes, which is where the optimizer is."""

    losses: tuple[float, ...]
    gradients_beside: int

    def apart(self, other: "OffloadedTraining") -> float:
        """The largest difference of two trainings' losses."""
        return max(abs(loss - other_loss) for loss, other_loss in zip(self.losses, other.losses, strict=True))


def train(width: int, layers: int, where: str | None = None) -> OffloadedTraining:
    """Three steps of ZeRO-3 in fp32; ``where`` is None, "cpu", or the folder of a disk. Collective."""
    settings = peer.zero_settings(3, BATCH) | {"bf16": {"enabled": False}, "aio": {"block_size": 1 << 20}}
    if where == "cpu":
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    elif where is not None:
        deepspeed_disk.use()
        settings["zero_optimization"] |= deepspeed_disk.to_disk(where)
    net = gpt.seeded(lambda: nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]))
    engine, losses, beside = peer.engine(net, settings), [], 0
    for step in range(STEPS):
        loss = (engine(gpt.numbers(BATCH, width, seed=step).to(device())) - 1).square().mean()
        engine.backward(loss)
        if where == "cpu" or where is None:  # on disk they are files
            beside = states.nbytes(master.grad for master in engine.optimizer.fp32_partitioned_groups_flat)
        engine.step()
        losses.append(loss.item())
    peer.close(engine)
    return OffloadedTraining(tuple(losses), beside)
