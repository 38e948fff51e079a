"""Causes of a forward pass that parts: positions, masks, batch statistics, something added on every rank."""

import torch

from pardemo.prove.causes.factors import words
from pardemo.prove.facts import Facts, Finding, Parted
from pardemo.world.errors import ranks_text

#: Modules that normalise over the samples that they see.
_BATCH = ("BatchNorm", "SyncBatchNorm")


def finding(facts: Facts, parted: list[Parted]) -> Finding:
    """What is to be said of outputs that are not the reference's; the first module is where they part."""
    first = parted[0]
    if facts.moved:
        return _moved(facts, first)
    ranks = sorted({one.rank for one in parted if one.module == first.module})
    cause, why = _cause(facts, first, [one for one in parted if one.module == first.module])
    where = f"the output of {first.module} ({first.kind}) is not the reference's on {ranks_text(ranks)}"
    size = float(first.reference.norm()) or 1.0
    return Finding(
        facts.layout.name, facts.step + 1, "forward", cause, f"{where}{': ' + why if why else ''}",
        None, float(first.difference.norm()) / size, (), first.module,
    )  # fmt: skip


def _moved(facts: Facts, first: Parted) -> Finding:
    """Weights that were loaded into others: the first of their modules is where the layout parts."""
    names = sorted(facts.moved, key=lambda name: (facts.place(name.rpartition(".")[0]), name))
    return Finding(
        facts.layout.name, facts.step + 1, "forward", "initial-parameters",
        f"what some ranks have as {names[0]} are values of the reference's {facts.moved[names[0]]}: the weights were "
        "loaded or cut in other places", None, float(first.difference.norm()) / (float(first.reference.norm()) or 1.0),
        tuple(names), names[0].rpartition(".")[0],
    )  # fmt: skip


def _cause(facts: Facts, first: Parted, all_ranks: list[Parted]) -> tuple[str, str]:
    if first.kind.startswith(_BATCH):
        return "buffers", "it normalises by the samples of its own rank, which are fewer: choose SyncBatchNorm"
    if first.whole_inputs is False and "Embedding" in first.kind:
        return "positions", "what it looks up is not what the reference looks up for the same tokens"
    constant = _constant(first.difference)
    sizes = {"ranks": facts.layout.ranks} | facts.layout.sizes
    key = next((key for key in ("tp", "ep", "ranks") if sizes.get(key, 1) > 1), "")
    if key and constant and first.difference.abs().max() > 0:
        group = f"{sizes[key]} ranks ({words(key)})"
        return "counted-per-rank", f"the same is added everywhere, as a bias that each of {group} adds before the sum"
    if _turned(first):
        return "positions", "it turns vectors by another angle: their lengths are right, as of rotated positions"
    if {"cp", "sp"} & facts.layout.sizes.keys() and _some_right(facts, all_ranks):
        return "mask", (
            "some tokens are right and others are not: these see others than in the reference, by the mask or by the "
            "positions of a cut sequence"
        )
    return "", ""


def _some_right(facts: Facts, wrong: list[Parted]) -> bool:
    """Whether some tokens' outputs are the reference's: a fault of the layer itself would change all of them.

    They are right on a rank that is not among those where the module is wrong; each stage has it on as many ranks.
    """
    if len({one.rank for one in wrong}) < facts.layout.ranks // facts.layout.size("pp"):
        return True
    return any(
        bool((one.difference.abs().amax(1) <= facts.tolerance * (one.reference.abs().max() or 1.0) * 10).any())
        for one in wrong
    )


def _constant(difference: torch.Tensor) -> bool:
    """Whether both projections are off by one number in every cell."""
    if len(difference) < 2:
        return False
    two = difference[:, :2]
    return bool((two - two.mean(0)).abs().max() <= 1e-6 * two.abs().max())


def _turned(first: Parted) -> bool:
    """Whether all vectors have the reference's norm, and not its directions."""
    norms, scale = first.difference[:, 2].abs().max(), first.reference[:, 2].abs().max()
    own = first.reference[:, 2]
    if bool(own.max() - own.min() <= 1e-3 * scale):
        return False  # what normalises gives vectors of one length, whatever goes in
    return bool(norms <= 1e-6 * scale) and bool(first.difference[:, :2].abs().max() > 1e-3 * scale)
