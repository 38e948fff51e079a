"""What a layout is made of, and how it is drawn."""

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

#: kind -> the axes along which it is parallel
KINDS = {
    "naive": ("dp",),
    "bucketed": ("dp",),
    "zero1": ("dp",),
    "zero2": ("dp",),
    "zero3": ("dp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "dp-tp": ("dp", "tp"),
    "dp-pp": ("dp", "pp"),
    "tp-pp": ("tp", "pp"),
    "zero-tp": ("dp", "tp"),
    "zero-pp": ("dp", "pp"),
    "dp-tp-pp": ("dp", "tp", "pp"),
}
#: how often each is drawn; the last one needs eight ranks
WEIGHTS = {kind: 1 if kind == "dp-tp-pp" else 4 for kind in KINDS}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """A layout. Defaults are the plainest choice, so that a case is told by what differs from them."""

    kind: str
    number: int
    seed: int
    # ranks
    tp: int = 1
    dp: int = 1
    pp: int = 1
    engine: str = ""  # of data parallelism: naive, bucketed, zero1 … zero3
    # model
    layers: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 2
    inner: int = 4
    vocabulary: int = 8
    gated: bool = False
    bias: bool = False
    rms_norm: bool = False
    tied: bool = False
    never: bool = False  # a layer that no forward pass uses
    sometimes: bool = False  # a layer that some ranks use, in some micro-batches
    frozen: tuple[str, ...] = ()
    # precision, batch, steps
    dtype: str = "fp32"
    sequence: int = 4
    samples: tuple[int, ...] = (2,)  # of each data-parallel rank
    ignored: bool = False  # some targets do not count
    steps: int = 2
    accumulation: int = 1
    no_sync: bool = False
    checkpointing: str = ""  # of each block: reentrant or not reentrant
    # optimizer
    optimizer: str = "sgd"
    param_groups: bool = False
    clip: float | None = None
    clip_by_torch: bool = False  # by torch's clip_grad_norm_, in place of a ZeRO engine's max_norm or the room's own
    discard: bool = False  # a backward pass too many before each step, discarded by module.zero_grad()
    set_to_none: bool = True
    # data parallelism and ZeRO
    bucket_bytes: int = 1 << 20
    overlap: bool = True
    parameter_server: bool = False
    prefetch: bool = True
    layers_alone: bool = True  # ZeRO-3 gathers layer by layer
    # tensor parallelism
    sequence_parallel: bool = False
    vocabulary_loss: bool = True
    # pipeline
    schedule: str = "gpipe"
    chunks: int = 1
    micro_batches: int = 1
    recompute_stages: bool = False
    by_parameters: bool = False  # how layers are cut into stages
    # what else a training script does
    in_place: bool = False  # a block begins with an activation in place
    buffers: bool = False  # of types that few exchanges know
    closure: bool = False  # optimizer.step(closure)
    scaler: bool = False  # a GradScaler
    averaged: bool = False  # an average of the weights, in a deepcopy of the wrapper
    compiled: str = ""  # what torch.compile is given: the model inside, or the wrapper around it

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def is_zero(self) -> bool:
        return self.engine.startswith("zero")

    @property
    def zero_for_none(self) -> bool:
        """Whether the engine gives a parameter that took part on no rank a gradient of zero."""
        return self.is_zero or (self.engine == "naive" and self.dp > 1)

    @property
    def eps(self) -> float:
        """Of the precision in which sums are taken; the vocabulary-parallel loss is never in more than fp32."""
        eps = torch.finfo(DTYPES[self.dtype]).eps
        return max(eps, torch.finfo(torch.float32).eps) if self.tp > 1 and self.vocabulary_loss else eps

    def __str__(self) -> str:
        told = (f for f in dataclasses.fields(self)[3:] if getattr(self, f.name) != f.default)
        return " ".join(f"{f.name}={getattr(self, f.name)}" for f in told)


def draw(kind: str, number: int, seed: int) -> Case:
    """Case ``number`` of a kind: the same for the same three, whatever else is run."""
    chance = Random(f"{seed} {kind} {number}")
    ranks = _ranks(kind, chance)
    choices = {**ranks, **_batch(kind, ranks, chance), **_engine(kind, ranks, chance)}
    choices |= _model(choices, chance)
    choices |= _steps(choices, chance)
    choices |= _use(choices, Random(f"{seed} {kind} {number} use"))
    return Case(kind, number, seed, **choices)


def _flip(chance: Random, share: float = 0.5) -> bool:
    return chance.random() < share


def _ranks(kind: str, chance: Random) -> dict:
    axes = KINDS[kind]
    if len(axes) > 1:
        return dict.fromkeys(axes, 2)
    return {axes[0]: chance.choice((2, 4) if axes == ("tp",) else (2, 2, 3, 4))}


def _batch(kind: str, ranks: dict, chance: Random) -> dict:
    dp, pp = ranks.get("dp", 1), ranks.get("pp", 1)
    chosen: dict[str, Any] = {"dtype": chance.choice(("fp64", "fp32", "fp32", "bf16"))}
    if "zero" in kind and chosen["dtype"] == "fp64":
        chosen["dtype"] = "fp32"  # as the engines are documented
    if pp == 1:
        uneven = dp > 1 and _flip(chance, 0.3)
        equal = chance.randint(1, 3)
        chosen["samples"] = tuple(chance.randint(1, 4) if uneven else equal for _ in range(dp))
        return chosen
    chosen["schedule"] = chance.choice(("gpipe", "one_f_one_b", "interleaved"))
    chosen["chunks"] = 2 if chosen["schedule"] == "interleaved" else 1
    chosen["micro_batches"] = pp * chance.randint(1, 2) if chosen["chunks"] > 1 else chance.randint(1, 5)
    chosen["samples"] = (chosen["micro_batches"] * chance.randint(1, 2),) * dp
    chosen["recompute_stages"], chosen["by_parameters"] = _flip(chance, 0.3), _flip(chance, 0.3)
    return chosen


def _engine(kind: str, ranks: dict, chance: Random) -> dict:
    chosen: dict = {}
    if "zero" in kind:
        chosen["engine"] = kind if "-" not in kind else chance.choice(("zero1", "zero2", "zero3"))
    elif ranks.get("dp", 1) > 1:
        chosen["engine"] = kind if "-" not in kind else chance.choice(("naive", "bucketed", "bucketed"))
    if "engine" in chosen:
        chosen["bucket_bytes"] = chance.choice((1, 64, 1000, 10_000, 1 << 20))
        chosen["overlap"], chosen["prefetch"] = _flip(chance, 0.7), _flip(chance, 0.7)
        chosen["layers_alone"] = _flip(chance, 0.8)
        chosen["parameter_server"] = _flip(chance, 0.3)
    if "tp" in ranks:
        chosen["sequence_parallel"] = _flip(chance)
        chosen["vocabulary_loss"] = _flip(chance, 0.7)
    return chosen


def _model(so_far: dict, chance: Random) -> dict:
    tp, pp, chunks = (so_far.get(name, 1) for name in ("tp", "pp", "chunks"))
    groups = chance.choice((1, 1, 2, 3))  # query heads for each key/value head
    kv_heads = tp * chance.choice((1, 1, 2))
    fewest = max(1, pp * chunks - 2) if pp > 1 else 1  # with the embedding and the head, a layer for each stage
    layers = fewest + chance.randint(0, 2)
    alone = ("1.attention", "1.mlp", "1.norm_1", "1.attention.out", f"{layers}.norm_2", "0")
    # A stage whose parameters are all frozen has nothing to run in parallel: with a pipeline, parts of blocks alone.
    # ZeRO-3 gathers layer by layer, so that all ranks have to use the same ones
    may_differ = so_far.get("engine") in ("naive", "bucketed", "zero1", "zero2") and tp == pp == 1
    frozen = chance.sample(alone if pp == 1 else alone[:4], chance.choice((0, 0, 1, 2)))
    return {
        "layers": layers,
        "kv_heads": kv_heads,
        "heads": kv_heads * groups,
        "head_dim": chance.choice((4, 5, 7))
        + 5 * (kv_heads * groups == 1),  # a norm over few values amplifies rounding
        "inner": tp * chance.randint(2, 9),
        "vocabulary": tp * chance.randint(4, 11),
        "sequence": tp * chance.randint(1, 3) if so_far.get("sequence_parallel") else chance.randint(2, 7),
        "gated": _flip(chance),
        "bias": _flip(chance),
        "rms_norm": _flip(chance),
        "tied": _flip(chance, 0.4),
        "never": _flip(chance, 0.3),
        "sometimes": may_differ and _flip(chance),
        "frozen": tuple(frozen),
        "ignored": so_far.get("dp", 1) == pp == 1 and _flip(chance, 0.3),
    }


def _steps(so_far: dict, chance: Random) -> dict:
    chosen = {
        "steps": chance.randint(1, 3),
        "accumulation": chance.choice((1, 1, 2, 3)),
        "no_sync": _flip(chance),
        # Adam's steps have one size whatever the gradient's: in bf16 they would follow what rounding left of zero.
        "optimizer": "sgd" if so_far["dtype"] == "bf16" else chance.choice(("sgd", "adamw")),
        "param_groups": _flip(chance),
        "clip": chance.choice((None, 0.1, 10.0)),
        "set_to_none": _flip(chance, 0.7),
        "checkpointing": chance.choice(("", "", "not reentrant", "reentrant")),
    }
    if so_far.get("engine", "").startswith("zero") and so_far.get("tp", 1) == so_far.get("pp", 1) == 1:
        chosen["clip_by_torch"] = so_far["dtype"] == "fp32" and _flip(chance)
        chosen["discard"] = _flip(chance, 0.3)
    if "0" in so_far["frozen"] and chosen["checkpointing"] == "reentrant":
        chosen["checkpointing"] = ""  # torch gives a reentrant checkpoint without a trained input no gradient at all
    return chosen


def _use(so_far: dict, chance: Random) -> dict:
    """Of the engines that leave gradients to the script: what it may do with them, and with the model."""
    engine, tp, pp = so_far.get("engine", ""), so_far.get("tp", 1), so_far.get("pp", 1)
    if engine.startswith("zero") or tp > 1:
        return {}
    again = so_far["checkpointing"] or so_far.get("recompute_stages")  # a second run would begin with what is changed
    chosen: dict[str, Any] = {
        "in_place": not again and _flip(chance),
        "buffers": _flip(chance, 0.3),
        "closure": _flip(chance, 0.3),
    }
    if pp > 1:
        return chosen
    exact = so_far["dtype"] != "bf16"
    chosen["scaler"] = exact and not chosen["closure"] and _flip(chance, 0.4)
    chosen["clip_by_torch"], chosen["averaged"] = _flip(chance), exact and _flip(chance, 0.4)
    if not (so_far["checkpointing"] or so_far["sometimes"] or chosen["averaged"]) and _flip(chance, 0.1):
        chosen["compiled"] = chance.choice(("inside", "around"))
    return chosen
