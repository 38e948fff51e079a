"""What a model keeps beside parameters, as a router's bias: where gradients are right, and this is not."""

from typing import TYPE_CHECKING

import torch

from pardemo.prove.facts import Finding
from pardemo.prove.runner import Run
from pardemo.world.errors import ranks_text

if TYPE_CHECKING:  # which imports this
    from pardemo.prove.reference import Reference


def findings(reference: "Reference", other: Run, step: int) -> list[Finding]:
    """Buffers that are saved with the model and are not the reference's on some ranks.

    A batch norm's statistics are left out: they are of a rank's own samples, and its output says whether that matters.
    """
    wanted = reference.run.tensors(step, 0, "buffer")
    own = [other.tensors(step, rank, "buffer") for rank in range(other.layout.ranks)]
    norms = {name for record in other.records for name in record.batch_norms}
    made: dict[str, list[int]] = {}
    for name, value in wanted.items():
        if name.rpartition(".")[0] in norms or not value.is_floating_point():
            continue
        scale = float(value.abs().max()) if value.numel() else 0.0
        for rank, tensors in enumerate(own):
            its = tensors.get(name)
            if its is None or its.shape != value.shape:
                continue
            if not torch.equal(its, value) and float((its - value).abs().max()) > reference.tolerance * 10 * scale:
                made.setdefault(name, []).append(rank)
    if not made:
        return []
    name = next(iter(made))
    return [
        Finding(
            other.layout.name, step + 1, "buffers", "buffers",
            f"the buffer{'s' if len(made) > 1 else ''} {', '.join(made)} on {ranks_text(made[name])} "
            f"{'are' if len(made) > 1 else 'is'} not the reference's: what is kept beside parameters has to be the "
            "same on all ranks, too",
            module=name.rpartition(".")[0],
        )
    ]  # fmt: skip
