"""Causes of models that differ before their first step."""

from collections.abc import Mapping

import torch

from pardemo.prove.facts import Finding
from pardemo.prove.runner import Run
from pardemo.prove.whole import Atlas, Part
from pardemo.world.errors import ranks_text


def begin(
    other: Run,
    maps: Atlas,
    replicas: dict[str, list[tuple[Part, dict[int, torch.Tensor]]]],
    uncovered: set[str],
    order: Mapping[str, int],
    reference: Mapping[str, torch.Tensor],
) -> list[Finding]:
    """What is wrong with the parameters with which the layout begins.

    Args:
        uncovered: parameters of which no rank has some elements.
        order: the reference's modules by when they run. reference: its parameters.
    """

    def first(names: list[str]) -> str:
        """The module that runs first of those whose pieces have other values than the reference's."""
        modules = set()
        for rank, parts in maps.parts.items():
            for own_name, part in parts.items():
                if part.name in names and own_name in own[rank]:
                    value = own[rank][own_name]
                    if not torch.equal(part.of(reference[part.name], tuple(value.shape)), value):
                        modules.add(own_name.rpartition(".")[0])
        modules = modules or {name.rpartition(".")[0] for name in names}
        return min(modules, key=lambda module: order.get(module, len(order)), default="")

    layout = other.layout.name
    own = [other.tensors(0, rank, "before") for rank in range(other.layout.ranks)]
    suspects = {name for of_rank in maps.unknown.values() for name in of_rank} | maps.different
    doubtful = _unknown(maps) | uncovered
    alike = [name for name in sorted(suspects | uncovered) if _alike(name, own) and name in doubtful]
    if alike and all(name in reference and name not in maps.different for name in alike) and not _unknown(maps):
        return [
            Finding(
                layout, 1, "parameters", "initial-parameters",
                "ranks hold one and the same part of them, and the other parts nobody: ranks that hold different parts "
                "have been given one rank's values, as a wrapper does that broadcasts them from its first rank",
                parameters=tuple(alike), module=first(alike),
            )
        ]  # fmt: skip
    if alike:
        return [
            Finding(
                layout, 1, "parameters", "same-random-numbers",
                "their parts on different ranks are the same numbers: ranks that hold different parts of a parameter "
                "have drawn from one seed", parameters=tuple(alike), module=first(alike),
            )
        ]  # fmt: skip
    if replicas:
        names = sorted(replicas)
        ranks = sorted({rank for apart in replicas.values() for _, versions in apart for rank in versions})
        return [
            Finding(
                layout, 1, "parameters", "initial-parameters",
                f"{ranks_text(ranks)} begin with different values of the same parameters: nobody broadcasts them, and "
                "the ranks' seeds differ", parameters=tuple(names), module=first(names),
            )
        ]  # fmt: skip
    if maps.different:
        names = sorted(maps.different)
        return [
            Finding(
                layout, 1, "parameters", "initial-parameters",
                "they begin with other values than the reference's: build the whole model from one seed and cut it, or "
                "load the same weights", parameters=tuple(names), module=first(names),
            )
        ]  # fmt: skip
    return []


def overwritten(other: Run, names: list[str], order: Mapping[str, int]) -> Finding:
    """Parameters that no rank has, since ranks with other parts of the model were given the same values."""
    modules = {name.rpartition(".")[0] for name in names}
    return Finding(
        other.layout.name, 1, "parameters", "initial-parameters",
        "no rank has them, and other ranks have the same ones twice: ranks that hold different parts of the model have "
        "been given one rank's values, as a wrapper does that broadcasts them from its first rank",
        parameters=tuple(names), module=min(modules, key=lambda module: order.get(module, len(order)), default=""),
    )  # fmt: skip


def _unknown(maps: Atlas) -> set[str]:
    return {name for of_rank in maps.unknown.values() for name in of_rank}


def _alike(name: str, own: list[dict[str, torch.Tensor]]) -> bool:
    some = [tensors[name] for tensors in own if name in tensors]
    return len(some) > 1 and any(torch.equal(a, b) for n, a in enumerate(some) for b in some[n + 1 :])
