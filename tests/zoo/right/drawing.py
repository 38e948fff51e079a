"""Random models, and random right layouts of each: which engine, how used, on how many ranks."""

import random
from collections.abc import Mapping
from typing import Any

#: Of each engine the script that has it, how often it is drawn, and words of which any may be added.
ENGINES = {
    "plain": ("data_parallel", 1, ("checkpoint",)),
    "by_hand": ("data_parallel", 2, ("checkpoint",)),
    "ddp": ("data_parallel", 4, ("no_sync", "view", "static", "unused", "checkpoint")),
    "ddp_zero": ("data_parallel", 2, ("no_sync",)),
    "fsdp1": ("data_parallel", 4, ("no_sync", "grad_op", "blocks", "original")),
    "fsdp2": ("data_parallel", 4, ("no_sync", "keep", "blocks")),
    "hsdp": ("data_parallel", 2, ("no_sync", "keep", "blocks")),
    "naive": ("data_parallel", 2, ("no_sync", "server", "unused", "checkpoint")),
    "bucketed": ("data_parallel", 3, ("no_sync", "late", "small", "unused", "checkpoint")),
    "zero1": ("data_parallel", 3, ("checkpoint",)),
    "zero2": ("data_parallel", 3, ("small", "checkpoint")),
    "zero3": ("data_parallel", 3, ("clip", "whole", "checkpoint")),
    "dtensor": ("tensor_parallel", 6, ("sequence", "vocabulary", "fsdp")),
    "tensor_parallel": ("tensor_parallel", 4, ("sequence", "vocabulary")),
    "tensor_zero": ("tensor_parallel", 2, ("sequence", "vocabulary")),
    "pipelining": ("pipeline", 5, ()),
    "pipeline": ("pipeline", 4, ("late", "checkpoint", "tensor")),
    "pipeline_zero": ("pipeline", 2, ("checkpoint",)),
    "ring": ("context_parallel", 2, ("zigzag",)),
    "ulysses": ("context_parallel", 2, ()),
    "experts": ("expert_parallel", 2, ()),
    "deepspeed0": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed1": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed2": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed3": ("with_deepspeed", 1, ("view", "late")),
    "accelerate": ("with_accelerate", 2, ()),
}
#: Engines that refuse fp64.
FP32_ONLY = ("deepspeed", "zero", "tensor_zero", "pipeline_zero")
#: Engines for models with a layer that some samples pass, and for those that change activations in place.
OPTIONAL = ("plain", "by_hand", "ddp", "naive", "bucketed", "zero1", "zero2")
DDP = ("ddp", "naive", "bucketed")
IN_PLACE = ("plain", "by_hand", "ddp", "naive", "bucketed", "pipeline")
Values = dict[str, Any]


def model(rng: random.Random) -> Values:
    """What all layouts of a proof have in common."""
    kind = rng.choice(["tokens", "tokens", "tokens", "features", "rows"])
    heads = rng.choice([2, 4, 4, 6])
    made: Values = {
        "seed": rng.randrange(1000), "kind": kind, "heads": heads, "width": heads * rng.choice([2, 3, 5]),
        "layers": rng.choice([1, 2, 3, 4]), "inner": rng.choice([12, 17, 24, 30]), "outputs": rng.choice([11, 16, 29]),
        "sequence": rng.choice([4, 6, 7, 8]), "norm": rng.choice(["LayerNorm", "RMSNorm"]), "bias": rng.choice([0, 1]),
        "tied": int(kind == "tokens" and rng.random() < 0.3), "dropout": rng.choice([0.0, 0.0, 0.2]),
        "samples": rng.choice([12, 24]), "loss": rng.choice(["mean", "tokens"]),
        "optimizer": rng.choice(["SGD", "momentum", "AdamW"]), "clip": rng.choice([0.0, 0.05, 3.0]),
        "schedule": rng.choice([0, 1]), "gqa": rng.choice([1, 1, 2]), "gated": rng.choice([0, 1]),
        "experts": rng.choice([0, 0, 0, 4]), "optional": int(rng.random() < 0.2), "in_place": int(rng.random() < 0.2),
    }  # fmt: skip
    frozen = ["", "", "layers.0.norm_2", "layers.0.mlp", "norm"] + ([] if made["tied"] else ["embed"])
    made["frozen"] = rng.choice(frozen)
    return made


def layout(rng: random.Random, model: Values, double: bool, engines: Mapping[str, tuple] = ENGINES) -> Values | None:
    """A layout in which that model can be trained, in fp64 or fp32; None where few engines are given, and none can."""
    for _ in range(1000):
        engine = rng.choices(list(engines), [often for _, often, _ in engines.values()])[0]
        words = [word for word in engines[engine][2] if rng.random() < 0.4]
        made = {"ranks": rng.choice([2, 2, 2, 3, 4, 4, 8]), "engine": engine, "tp": 1, "pp": 1, "cp": 1,
                "accumulate": rng.choice([1, 1, 2, 3])}  # fmt: skip
        if engine == "plain":
            made |= {"ranks": 1, "accumulate": rng.choice([2, 3])}
        if engine in ("dtensor", "tensor_parallel", "tensor_zero"):
            made["tp"] = rng.choice([2, 2, 3, 4])
        if engine in ("pipelining", "pipeline", "pipeline_zero"):
            made |= {"pp": rng.choice([2, 2, 3, 4]), "accumulate": rng.choice([1, 2, 3, 4])}
            words.append(rng.choice(["gpipe", "1f1b", "interleaved"]))
        if "tensor" in words:
            made |= {"tp": 2, "ranks": rng.choice([4, 4, 8])}
        if engine in ("ring", "ulysses"):
            made["cp"] = rng.choice([2, 2, 3, 4])
        if engine == "tensor_zero":
            words.append(rng.choice(["zero1", "zero2", "zero3"]))
        if engine == "pipeline_zero":  # prove cannot read ZeRO-3's parts of a stage whose neighbour has ended
            words.append(rng.choice(["zero1", "zero2"]))
        made["way"] = ",".join(words)
        if not (double and engine.startswith(FP32_ONLY)) and _fits(model, made, set(words)):
            return made
    return None


def _fits(model: Values, made: Values, words: set[str]) -> bool:
    """Whether the engine takes this model, and every micro-batch has as many samples as its loss needs."""
    engine, ranks, tp, pp, cp = (made[name] for name in ("engine", "ranks", "tp", "pp", "cp"))
    if ranks % (tp * pp * cp):
        return False
    parts = ranks // (tp * pp * cp) * made["accumulate"]
    equal = model["loss"] == "mean" or pp > 1
    if parts > model["samples"] or (equal and model["samples"] % parts):
        return False
    if model["optional"] and (engine not in OPTIONAL or (engine in DDP and "unused" not in words)):
        return False
    if model["in_place"] and (engine not in IN_PLACE or {"checkpoint", "tensor"} & words):
        return False  # what is computed a second time would begin with what was changed
    if engine == "deepspeed3" and model["experts"]:
        return False  # the router gives an object, in which DeepSpeed sees no tensors to gather its weight again for
    if engine == "hsdp" and ranks % 2:
        return False
    if engine == "ddp" and "static" in words and {"no_sync", "unused"} & words:
        return False  # with no_sync torch fails, at an assertion of its own
    if engine == "fsdp1" and model["frozen"] and "original" not in words:
        return False
    if engine == "experts":
        return model["experts"] > 0 and model["experts"] % ranks == 0
    if cp > 1:
        heads = model["heads"] if engine == "ulysses" else cp
        pieces = cp * (2 if "zigzag" in words else 1)
        return model["kind"] != "rows" and model["sequence"] % pieces == 0 and heads % cp == 0
    if tp > 1 and not _fits_tensor_parallel(model, made, words):
        return False
    if pp > 1:
        stages = pp * (2 if "interleaved" in words else 1)
        if "interleaved" in words and made["accumulate"] % pp:
            return False
        if "1f1b" in words and made["accumulate"] < pp:
            return False
        if engine == "pipeline_zero" and "zero1" not in words and model["tied"]:
            return False  # the engine refuses to cut a weight that two stages have
        if engine == "pipeline_zero" and "interleaved" in words and model["clip"]:
            return False  # two engines on a rank, each of which knows the norm of its own chunk
        return model["layers"] >= stages and not (model["tied"] and model["frozen"] == "embed")
    return True


def _fits_tensor_parallel(model: Values, made: Values, words: set[str]) -> bool:
    """Whether heads, inner width and vocabulary divide, and nothing stands in the blocks that is not cut."""
    engine, tp = made["engine"], made["tp"]
    if model["kind"] == "rows" or model["experts"] or model["heads"] // model["gqa"] % tp or model["inner"] % tp:
        return False  # RowwiseParallel takes parts for equal ones, and fails
    if engine == "dtensor":
        return not model["tied"] or "vocabulary" in words
    if model["dropout"] or model["kind"] != "tokens" or (model["sequence"] % tp and "sequence" in words):
        return False
    return model["outputs"] % tp == 0 if "vocabulary" in words else engine == "pipeline" or not model["tied"]
