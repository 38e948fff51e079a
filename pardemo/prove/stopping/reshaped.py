"""A run that goes on with other ranks, or cut otherwise, beside the undisturbed one: by prove's own means."""

from dataclasses import replace

import torch

from pardemo.prove import compare
from pardemo.prove.assembled import assembled
from pardemo.prove.facts import Finding
from pardemo.prove.reference import Reference
from pardemo.prove.runner import ProveError, Run
from pardemo.prove.stopping import alike, states, stream


def judge(
    name: str, reference: Run, resumed: Run, expected: int, tolerance: float
) -> tuple[int | None, list[Finding], list[str]]:
    """Behind how many steps the run goes on, by its parameters (None of no step); what is wrong; notes.

    Raises:
        ProveError: the two cannot be compared: other global batches, or other parameters.
    """
    begins, compared, truth = None, None, None
    for step in sorted(range(reference.steps), key=lambda step: (step != expected, step)):
        truth = Reference(reference.since(step), tolerance)
        try:
            compared = compare.layout(truth, replace(resumed, strips={}))
        except ProveError:  # nothing of it is where this step's parameters are
            continue
        if _same_parameters(compared):
            begins = step
            break
    if begins is None:
        truth = Reference(reference.since(expected), tolerance)
        compared = compare.layout(truth, replace(resumed, strips={}))
    assert compared is not None
    assert truth is not None
    behind = expected if begins is None else begins
    found, notes = [], list(compared.notes)
    if compared.unmatched:
        found.append(Finding(name, behind + 1, "parameters", "not-restored", compared.unmatched))
    if begins is not None:
        found += _states(name, truth, resumed, compared, behind, notes)
    told = {one.cause for one in found}
    for one in compared.findings:
        if one.cause == "optimizer-state" and "optimizer-state" in told:
            continue  # which state it is stands there
        if one.cause == "data":
            said, since = stream.said(stream.of(reference), stream.of(resumed), behind)
            one = replace(one, why=said, step=since + 1 - behind) if said else one
        if one.cause == "learning-rate" and (rates := alike.rates_said(reference, resumed, behind)) is not None:
            one = replace(one, why=rates[0], step=rates[1] + 1 - behind, factor=None)
        found.append(replace(one, layout=name, step=one.step + behind))
    return begins, found, notes


def _same_parameters(compared: compare.Compared) -> bool:
    """Whether the run begins with the parameters of the step that it was held against, whatever its samples are."""
    begun = any(one.what == "parameters" and one.step == 1 for one in compared.findings)
    return not compared.unmatched and not compared.maps.different and not begun


def _states(
    name: str, truth: Reference, resumed: Run, compared: compare.Compared, behind: int, notes: list[str]
) -> list[Finding]:
    """Optimizers' states, put together from all ranks' parts as the parameters are."""
    found, matched = [], False
    kinds = sorted(states.kinds(truth.run, 0))
    for kind in kinds:
        wanted = truth.in_whole(0, kind)
        holders = compare.holders_of(resumed, 0, kind, compared.maps)
        theirs, ours = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for parameter, tensor in wanted.items():
            if parameter not in truth.whole[0].before:
                continue
            some = holders.get(parameter, [])
            if tensor.dim() == 0:
                theirs[parameter] = tensor
                if some:
                    ours[parameter] = some[0][2].double()
                continue
            theirs[parameter] = tensor
            if some:
                whole = assembled(tuple(tensor.shape), some)
                ours[parameter] = torch.where(whole.covered, whole.value, tensor)
        matched = matched or bool(ours)
        if not ours and any(key.startswith(f"{kind}/") for key in resumed.keys(0, 0)):
            continue  # they are there, and kept in a form that says not whose they are
        _, told = states.compared(kind, [theirs], [ours], {}, 0, truth.tolerance)
        found += [Finding(name, behind + 1, "optimizer", "optimizer-state", why, None, None, tuple(names))
                  for why, names in told.items()]  # fmt: skip
    if kinds and not matched and not found:
        notes.append(
            f"{name}: the optimizer's states lie in a form that is not compared across layouts; what its step makes of "
            "them is compared"
        )
    return found
