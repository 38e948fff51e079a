"""Random models, and random right layouts of each: which engine, how used, on how many ranks."""

import random
from collections.abc import Mapping
from typing import Any

#: Of each engine the script that has it, how often it is drawn, and words of which any may be added.
ENGINES = {
    "plain": ("data_parallel", 1, ()),
    "by_hand": ("data_parallel", 2, ()),
    "ddp": ("data_parallel", 4, ("no_sync", "view", "static", "unused")),
    "ddp_zero": ("data_parallel", 2, ("no_sync",)),
    "fsdp1": ("data_parallel", 4, ("no_sync", "grad_op", "blocks", "original")),
    "fsdp2": ("data_parallel", 4, ("no_sync", "keep", "blocks")),
    "hsdp": ("data_parallel", 2, ("no_sync", "keep", "blocks")),
    "naive": ("data_parallel", 1, ("no_sync",)),
    "bucketed": ("data_parallel", 2, ("no_sync", "late")),
    "zero1": ("data_parallel", 2, ("no_sync",)),
    "zero2": ("data_parallel", 2, ("no_sync",)),
    "zero3": ("data_parallel", 2, ("no_sync",)),
    "dtensor": ("tensor_parallel", 6, ("sequence", "vocabulary", "fsdp")),
    "tensor_parallel": ("tensor_parallel", 4, ("sequence", "vocabulary")),
    "pipelining": ("pipeline", 5, ()),
    "pipeline": ("pipeline", 4, ("late", "checkpoint")),
    "deepspeed0": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed1": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed2": ("with_deepspeed", 1, ("view", "late")),
    "deepspeed3": ("with_deepspeed", 1, ("view", "late")),
    "accelerate": ("with_accelerate", 2, ()),
}
#: Engines that refuse fp64.
FP32_ONLY = ("deepspeed", "zero")
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
        "schedule": rng.choice([0, 1]),
    }  # fmt: skip
    frozen = ["", "", "layers.0.norm_2", "layers.0.mlp", "norm"] + ([] if made["tied"] else ["embed"])
    made["frozen"] = rng.choice(frozen)
    return made


def layout(rng: random.Random, model: Values, double: bool, engines: Mapping[str, tuple] = ENGINES) -> Values:
    """A layout in which that model can be trained, in fp64 or fp32: drawn until one is."""
    while True:
        engine = rng.choices(list(engines), [often for _, often, _ in engines.values()])[0]
        words = [word for word in engines[engine][2] if rng.random() < 0.4]
        made = {"ranks": rng.choice([2, 2, 2, 3, 4, 4, 8]), "engine": engine, "tp": 1, "pp": 1,
                "accumulate": rng.choice([1, 1, 2, 3])}  # fmt: skip
        if engine == "plain":
            made |= {"ranks": 1, "accumulate": rng.choice([2, 3])}
        if engine in ("dtensor", "tensor_parallel"):
            made["tp"] = rng.choice([2, 2, 3, 4])
        if engine in ("pipelining", "pipeline"):
            made |= {"pp": rng.choice([2, 2, 3, 4]), "accumulate": rng.choice([1, 2, 3, 4])}
            words.append(rng.choice(["gpipe", "1f1b", "interleaved"]))
        made["way"] = ",".join(words)
        if not (double and engine.startswith(FP32_ONLY)) and _fits(model, made, set(words)):
            return made


def _fits(model: Values, made: Values, words: set[str]) -> bool:
    """Whether the engine takes this model, and every micro-batch has as many samples as its loss needs."""
    engine, ranks, tp, pp = made["engine"], made["ranks"], made["tp"], made["pp"]
    if ranks % (tp * pp):
        return False
    parts = ranks // (tp * pp) * made["accumulate"]
    equal = model["loss"] == "mean" or pp > 1
    if parts > model["samples"] or (equal and model["samples"] % parts):
        return False
    if engine == "hsdp" and ranks % 2:
        return False
    if engine == "ddp" and "static" in words and {"no_sync", "unused"} & words:
        return False  # with no_sync torch fails, at an assertion of its own
    if engine == "fsdp1" and model["frozen"] and "original" not in words:
        return False
    if tp > 1 and (model["kind"] == "rows" or model["heads"] % tp):
        return False
    if engine == "dtensor":
        if model["inner"] % tp:
            return False  # RowwiseParallel takes parts for equal ones, and fails
        return not model["tied"] or "vocabulary" in words
    if engine == "tensor_parallel":
        if model["dropout"] or model["inner"] % tp or (model["sequence"] % tp and "sequence" in words):
            return False
        if "vocabulary" in words:
            return model["kind"] == "tokens" and model["outputs"] % tp == 0
        return model["kind"] == "tokens" and not model["tied"]
    if pp > 1:
        stages = pp * (2 if "interleaved" in words else 1)
        if "interleaved" in words and made["accumulate"] % pp:
            return False
        if "1f1b" in words and made["accumulate"] < pp:
            return False
        return model["layers"] >= stages and not (model["tied"] and model["frozen"] == "embed")
    return True
