"""Computes the bytes of training: model states, and activations for the backward pass. Decimal: 1 GB is 10⁹ bytes.

Model states, and activations by a rule of thumb: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054). Activations of a
block part by part, in 16 bits: Korthikanti et al. 2022 (arXiv 2205.05198, 4), who count one byte per element of a
dropout mask and an attention core that stores its scores, and leave out the norms' means and variances.
"""

from fractions import Fraction
from typing import NamedTuple

from pardemo.formulas import check_ranks

RECOMPUTE = ("none", "selective", "full")


def block_activation_bytes(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    ranks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Activation bytes of one block on one of t = ``ranks`` tensor-parallel ranks.

    sbh(10 + 24/t + 5as/ht); with sequence parallelism sbh/t·(34 + 5as/h). Selective recomputation drops the attention
    core's 5as/h; full recomputation keeps the block's input alone, 2sbh (over t with sequence parallelism).
    """
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, not {recompute!r}")
    check_ranks(ranks)
    unit = sequence * batch * hidden
    divisor = ranks if sequence_parallel else 1  # what the share of each rank is divided by outside the layers
    if recompute == "full":
        return 2 * unit / divisor
    core = 5 * heads * sequence / hidden if recompute == "none" else 0
    return unit * (10 / divisor + (24 + core) / ranks)


# --- model states: parameters, gradients, optimizer states ------------------------------------------------------------


class StateBytes(NamedTuple):
    """Bytes per parameter of each kind of model state. ``optimizer`` is the K of ZeRO's formulas."""

    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12

    @property
    def total(self) -> int:
        return sum(self)


#: Ways to train, by name. The first is the paper's (arXiv 1910.02054, 3.1): 16-bit parameters and gradients, and in
#: fp32 a copy of the parameters, momentum and variance: K = 4 + 4 + 4.
STATES = {
    "Adam, mixed precision": StateBytes(2, 2, 12),
    "Adam, fp32": StateBytes(4, 4, 8),
    "Adam, bf16 states": StateBytes(2, 2, 4),
    "Adam, 8-bit states": StateBytes(2, 2, 4 + 1 + 1),  # an fp32 copy of the parameters, two states of a byte
    "SGD with momentum, mixed precision": StateBytes(2, 2, 4 + 4),
    "SGD, mixed precision": StateBytes(2, 2, 4),
    # fp32 gradients beside the 16-bit ones: Megatron-core's 18 bytes, DeepSpeed's estimators' 2 + 16
    "Adam, mixed precision, fp32 gradients": StateBytes(2, 4, 12),
}
ADAM = STATES["Adam, mixed precision"]
STAGES = (0, 1, 2, 3)


def model_states(params: int, world_size: int, stage: int, states: StateBytes = ADAM) -> dict[str, float]:
    """Bytes of parameters, gradients and optimizer states on each of ``world_size`` data-parallel ranks.

    Stage 0 shards nothing (DP), 1 the optimizer states (P_os), 2 the gradients too (P_os+g), 3 the parameters too
    (P_os+g+p): arXiv 1910.02054, 5. Exact integers wherever the shares are whole.

    Raises:
        ValueError: a stage that does not exist, no rank, a negative number of parameters.
    """
    _check_job(params, world_size, stage)
    return {
        "parameters": _share(states.parameters * params, world_size if stage >= 3 else 1),
        "gradients": _share(states.gradients * params, world_size if stage >= 2 else 1),
        "optimizer states": _share(states.optimizer * params, world_size if stage >= 1 else 1),
    }


def model_states_bytes(params: int, world_size: int, stage: int, states: StateBytes = ADAM) -> float:
    """The sum of :func:`model_states`."""
    return sum(model_states(params, world_size, stage, states).values())


def largest_model(
    memory_bytes: float, world_size: int, stage: int, model_parallel: int = 1, states: StateBytes = ADAM
) -> float:
    """Parameters whose model states just fit ``memory_bytes`` per device (1910.02054, Table 2).

    ``world_size`` is the number of data-parallel ranks, of ``model_parallel`` devices each: N_d = GPUs/MP.
    """
    _check_job(0, world_size, stage)
    per_parameter = sum(
        Fraction(kind, world_size if stage >= since else 1) for kind, since in zip(states, (3, 2, 1), strict=True)
    )
    return float(memory_bytes * model_parallel / per_parameter)


def most_in_step(world_size: int, stage: int) -> float:
    """Bytes per parameter that a rank holds at most in the step of Adam in mixed precision, where gradients are fp32.

    A plain step adds 4 bytes to its 16. ZeRO-1 adds a rank's share of them, and of the bf16 sum from which it makes
    them. ZeRO-2 and ZeRO-3 free a bf16 gradient as soon as its fp32 one is there.

    Raises:
        ValueError: a stage that does not exist, or no rank.
    """
    _check_job(0, world_size, stage)
    return {0: 20, 1: 4 + 18 / world_size, 2: 2 + 16 / world_size, 3: 18 / world_size}[stage]


def deepspeed_zero2_estimate(params: int, world_size: int) -> int:
    """GPU bytes by DeepSpeed's ``estimate_zero2_model_states_mem_needs`` without offload: 2Ψ + 18Ψ/N.

    It counts a 32-bit copy of the gradients, sharded. Frozen parameters count as trained.
    """
    _check_job(params, world_size, 2)
    return 2 * params + int(18 * params / world_size)


def deepspeed_zero3_estimate(params: int, world_size: int, largest_layer: int) -> int:
    """GPU bytes by DeepSpeed's ``estimate_zero3_model_states_mem_needs`` without offload: 4·largest layer + 18Ψ/N."""
    _check_job(params, world_size, 3)
    return 4 * largest_layer + int(18 * params / world_size)


def accelerate_estimate(params: int, element_bytes: int) -> int:
    """Bytes by the rule of ``accelerate estimate-memory`` for training with Adam: four times the parameters."""
    return 4 * element_bytes * params


def shard_of(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first row of a rank's shard and the row behind its last, as ``torch.chunk`` cuts; the last ones may be empty.

    Raises:
        ValueError: no ranks, a rank that is none of them, or a negative number of rows.
    """
    if not (ranks >= 1 and 0 <= rank < ranks and rows >= 0):
        raise ValueError(f"no shard of {rows} rows for rank {rank} of {ranks}")
    shard_rows = -(-rows // ranks)
    return min(rank * shard_rows, rows), min((rank + 1) * shard_rows, rows)


# --- activations as the ZeRO paper counts them -----------------------------------------------------------------------


def activation_checkpoints(hidden: int, batch: int, sequence: int, layers: int, ranks: int = 1) -> float:
    """Elements of one checkpoint per layer: h·b·s·l, over the model-parallel ranks when they are partitioned (P_a)."""
    check_ranks(ranks)
    return _share(hidden * batch * sequence * layers, ranks)


def _share(total: int, ranks: int) -> int | float:
    """``total`` over ``ranks``: an integer where it is one."""
    return total // ranks if total % ranks == 0 else total / ranks


def _check_job(params: int, world_size: int, stage: int) -> None:
    if stage not in STAGES:
        raise ValueError(f"a ZeRO stage is 0, 1, 2 or 3, not {stage!r}")
    check_ranks(world_size)
    if params < 0:
        raise ValueError(f"a model cannot have {params} parameters")
