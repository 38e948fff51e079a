"""How many parameters a rank has: of its stage, its part of each layer, and the experts that lie on it."""

from dataclasses import dataclass

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.model.shape import Shape


def layer_params(shape: Shape, layout: Layout) -> float:
    """Parameters of a rank's share of an average layer; nothing is sharded over data-parallel ranks."""
    return sum(_of_a_layer(shape, layout))


def _of_a_layer(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Parameters of a rank's share of an average layer: outside of experts, and in experts."""
    dense, experts = shape.mean_layer
    return dense / layout.tp, experts / layout.expert_ranks


@dataclass(frozen=True)
class Owned:
    """Parameters of a rank: those that all data- and context-parallel ranks have, and those of its experts.

    Experts that are divided over ``ep`` of a stage's ranks are on each of the others, an ``ep``-th of them.
    """

    dense: float
    experts: float

    @property
    def whole(self) -> float:
        return self.dense + self.experts

    def sharded(self, layout: Layout, ranks: int | None = None) -> float:
        """Parameters that a rank keeps when states are sharded over ``ranks`` (by default the layout's ``shards``)."""
        ranks = layout.shards if ranks is None else ranks
        return self.dense / ranks + self.experts / (layout.expert_copies(ranks) if ranks > 1 else 1)


def owned_params(job: Job, layout: Layout, split: list[int], place: int) -> Owned:
    """Parameters of a rank of stage ``place``: its layers, the embedding on the first stage, the head on the last."""
    shape = job.shape
    dense, experts = (split[place] * each for each in _of_a_layer(shape, layout))
    if place == 0:
        dense += shape.embedding_params / layout.tp
    if place == layout.pp - 1 and not (place == 0 and shape.tied):
        dense += shape.head_params / layout.tp
    if place == layout.pp - 1 and shape.mtp:
        inside = shape.expert_params if shape.mtp_layer.mlp == "experts" else 0
        dense += shape.mtp * (shape.mtp_params - inside) / layout.tp
        experts += shape.mtp * inside / layout.expert_ranks
    return Owned(dense, experts)


def owned_layer(shape: Shape, layout: Layout) -> Owned:
    """Parameters of a rank's share of an average layer."""
    return Owned(*_of_a_layer(shape, layout))
