"""Muon on FSDP2's shards: the ranks gather each matrix on one of them, which orthogonalises it.

Muon replaces the momentum of a matrix by a matrix with the same directions and all singular values near 1 (Jordan 2024,
kellerjordan.github.io/posts/muon), which takes products of the *whole* matrix. ``torch.optim.Muon`` on sharded tensors
leaves every one of its fifteen products to DTensor, which gathers and scatters for each, on all ranks. Here a matrix is
put together once, on the rank that owns it, and its update goes back in shards (Liu et al. 2025, "Muon is scalable for
LLM training", arXiv 2502.16982, 2.3, gathers it on all ranks). On N ranks, of Ψ parameters, in 16 bits::

    to the owners     (N−1)/N · Ψ/N  numbers sent by a rank     its shards of the others' matrices
    and back          (N−1)/N · Ψ/N                             its own matrices' updates

which is 2(N−1)/N² · Ψ, and the work is shared too. The products are made in bf16, as torch makes them, and so the
numbers that travel are the very ones that enter them: the step is that of one process, to the last bit.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from pardemo.formulas.memory import shard_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the odd polynomial that each round applies to the singular values
ROUNDS = 5
ADJUSTMENTS: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """``matrix`` [m, n] with all singular values between about 0.5 and 1.5, in bf16, by a Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class ShardedMuon(torch.optim.Optimizer):
    """``torch.optim.Muon`` for matrices that are cut by rows over the ranks of one group, as FSDP2 cuts them.

    Args:
        params: DTensors of two dimensions, ``Shard(0)`` over one dimension of their mesh and replicated over any other
            (HSDP: the optimizer's messages stay among the ranks that share a copy). Embeddings, heads, norms and biases
            are for another optimizer, as with torch's.
        lr, weight_decay, momentum, nesterov: as torch's. adjust_lr_fn: ``original`` or ``match_rms_adamw``.

    Raises:
        ValueError: a parameter is none of these; names its shape and what would be right.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95, nesterov: bool = True,
        adjust_lr_fn: str = "original",
    ):  # fmt: skip
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum)):
            if not value >= 0:
                raise ValueError(f"{name} is at least 0, not {value!r}")
        if adjust_lr_fn not in ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(ADJUSTMENTS)}, not {adjust_lr_fn!r}")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
                                  "adjust_lr_fn": adjust_lr_fn})  # fmt: skip
        for group in self.param_groups:
            for parameter in group["params"]:
                _group_of(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; collective among the ranks that share the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            by_ranks: dict[dist.ProcessGroup, list[DTensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_ranks.setdefault(_group_of(parameter), []).append(parameter)
            for ranks, parameters in by_ranks.items():
                self._step(group, parameters, ranks)
        return loss

    def _step(self, group: dict[str, Any], parameters: list[DTensor], ranks: dist.ProcessGroup) -> None:
        shards = [self._momentum(group, parameter).bfloat16() for parameter in parameters]  # [rows here, n] each
        updates = _by_owners(shards, [(parameter.shape[0], parameter.shape[1]) for parameter in parameters], ranks)
        for parameter, update in zip(parameters, updates, strict=True):
            rows, columns = parameter.shape
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(update, alpha=-group["lr"] * ADJUSTMENTS[group["adjust_lr_fn"]](rows, columns))

    def _momentum(self, group: dict[str, Any], parameter: DTensor) -> torch.Tensor:
        """This rank's rows of what is to be orthogonalised."""
        state, grad = self.state[parameter], cast(DTensor, parameter.grad)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        gradient, kept = grad.to_local(), state["momentum_buffer"].to_local()
        kept.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(kept, group["momentum"]) if group["nesterov"] else kept


def _group_of(parameter: torch.Tensor) -> dist.ProcessGroup:
    """The ranks that share a parameter's rows."""
    if not isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter {tuple(parameter.shape)} is no DTensor; where all ranks have it whole, torch.optim.Muon is "
            "right"
        )
    if parameter.dim() != 2:
        raise ValueError(
            f"Muon is for matrices; a parameter {tuple(parameter.shape)} is for another optimizer, as AdamW"
        )
    cut = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    if len(cut) != 1 or parameter.placements[cut[0]] != Shard(0):
        raise ValueError(
            f"a parameter {tuple(parameter.shape)} is placed {parameter.placements}: its rows are to be cut over one "
            "dimension of the mesh (fully_shard), and nothing else"
        )
    return parameter.device_mesh.get_group(cut[0])


def owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Assigns each matrix to a rank: the most work first, each to the rank that has least so far."""
    work = [rows * columns * min(rows, columns) for rows, columns in shapes]
    busy, whose = [0] * ranks, [0] * len(shapes)
    for matrix in sorted(range(len(shapes)), key=lambda number: -work[number]):
        whose[matrix] = min(range(ranks), key=busy.__getitem__)
        busy[whose[matrix]] += work[matrix]
    return whose


def _by_owners(
    shards: list[torch.Tensor], shapes: list[tuple[int, int]], ranks: dist.ProcessGroup
) -> list[torch.Tensor]:
    """This rank's rows of each matrix, orthogonalised, in the order of ``shards``."""
    n, rank, whose = ranks.size(), dist.get_rank(ranks), owners(shapes, ranks.size())
    mine = [place for place, owner in enumerate(whose) if owner == rank]
    by_owner = [[place for place, owner in enumerate(whose) if owner == other] for other in range(n)]
    rows = [_rows(shape[0], n) for shape in shapes]  # [matrices][ranks]
    leaving = [sum(shards[place].numel() for place in places) for places in by_owner]
    coming = [sum(rows[place][other] * shapes[place][1] for place in mine) for other in range(n)]
    packed = torch.cat([shards[place].reshape(-1) for places in by_owner for place in places])
    received = packed.new_empty(sum(coming))
    dist.all_to_all_single(received, packed, coming, leaving, group=ranks)
    pieces = received.split([rows[place][other] * shapes[place][1] for other in range(n) for place in mine])
    made = []
    for number, place in enumerate(mine):
        matrix = torch.cat([pieces[other * len(mine) + number] for other in range(n)]).view(shapes[place])
        made.append(orthogonalised(matrix).split(rows[place]))
    back = [made[number][other].reshape(-1) for other in range(n) for number in range(len(mine))]
    dist.all_to_all_single(packed, torch.cat(back) if back else received, leaving, coming, group=ranks)
    updates = list(packed.split([shards[place].numel() for places in by_owner for place in places]))
    order = [place for places in by_owner for place in places]
    by_place = dict(zip(order, updates, strict=True))
    return [by_place[place].view_as(shards[place]) for place in range(len(shards))]


def _rows(rows: int, ranks: int) -> list[int]:
    """Rows on each rank, as ``Shard(0)`` cuts them: ⌈rows/N⌉ until there are none left."""
    return [end - begin for begin, end in (shard_of(rows, ranks, rank) for rank in range(ranks))]
