"""Finds a layout's wrong initial parameters: not the reference's, or different on ranks."""

import re
from collections import Counter
from collections.abc import Mapping
from itertools import combinations

import torch

from pardemo.script.compare.differences import Finding
from pardemo.script.compare.parameter_map import Assembled, ParameterMap
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.runs import Run
from pardemo.world.errors import ranks_text


def initial_findings(
    reference: Reference, other: Run, maps: ParameterMap, before: Mapping[str, Assembled]
) -> list[Finding]:
    """Finds what is wrong with a layout's initial parameters: not the reference's, or different on ranks.

    ``before``: the layout's parameters before the first step.
    """
    initial, order = reference.whole[0].before, reference.order[0]
    by_rank = [other.tensors(0, rank, "before") for rank in range(other.layout.ranks)]
    unknown = maps.unknown.keys() | {name for name, parameter in before.items() if not parameter.covered.all()}
    alike = [name for name in sorted(unknown) if _same_on_ranks(name, by_rank)]
    replicas = {name: parameter.apart for name, parameter in before.items() if parameter.apart}
    cause = "initial-parameters"
    if names := _overwritten_names(initial, before):
        why = (
            "no rank has them, and other ranks have the same ones twice: ranks that hold different parts of the model "
            "have been given one rank's values, as a wrapper does that broadcasts them from its first rank"
        )
    elif alike and not maps.unknown and not maps.different.intersection(alike):
        names = alike
        why = (
            "ranks hold one and the same part of them, and the other parts nobody: ranks that hold different parts "
            "have been given one rank's values, as a wrapper does that broadcasts them from its first rank"
        )
    elif alike:
        cause, names = "same-random-numbers", alike
        why = (
            "their parts on different ranks are the same numbers: ranks that hold different parts of a parameter have "
            "drawn from one seed"
        )
    elif replicas:
        names = sorted(replicas)
        ranks = ranks_text(sorted({rank for apart in replicas.values() for _, versions in apart for rank in versions}))
        why = (
            f"{ranks} begin with different values of the same parameters: nobody broadcasts them, and the ranks' seeds "
            "differ"
        )
    elif names := sorted(maps.different):
        why = (
            "they begin with other values than the reference's: build the whole model from one seed and cut it, or "
            "load the same weights"
        )
    else:
        return []
    modules = {
        piece.rpartition(".")[0] for rank, parts in maps.parts.items() for piece, part in parts.items()
        if part.name in names and piece in by_rank[rank]
        and not torch.equal(part.cut_from(initial[part.name], tuple(by_rank[rank][piece].shape)), by_rank[rank][piece])
    } or {name.rpartition(".")[0] for name in names}  # fmt: skip
    module = min(modules, key=lambda module: order.get(module, len(order)))  # which runs first
    return [Finding(other.layout.name, 1, "parameters", cause, why, parameters=tuple(names), module=module)]


def _overwritten_names(reference: Mapping[str, torch.Tensor], before: Mapping[str, Assembled]) -> list[str]:
    """Returns parameters that no rank holds though there are enough pieces: some have another's values.

    Of parameters of one kind and shape, as experts, there are as many pieces as the reference has, or more.
    """
    kind = {name: (re.sub(r"\d+", "#", name), tuple(tensor.shape)) for name, tensor in reference.items()}
    wanted = Counter(kind.values())
    pieces = Counter(kind[name] for name, parameter in before.items() for _ in parameter.holders)
    missing = [name for name in reference if name not in before]
    return sorted(name for name in missing if 1 < wanted[kind[name]] <= pieces[kind[name]])


def _same_on_ranks(name: str, by_rank: list[dict[str, torch.Tensor]]) -> bool:
    held = [tensors[name] for tensors in by_rank if name in tensors]
    return any(torch.equal(a, b) for a, b in combinations(held, 2))
