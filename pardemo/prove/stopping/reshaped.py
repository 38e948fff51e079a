"""A run that goes on with other ranks, or cut otherwise, beside the undisturbed one: by prove's own means."""

from dataclasses import dataclass, replace

import torch

from pardemo.prove import compare
from pardemo.prove.assembled import assembled
from pardemo.prove.facts import Finding
from pardemo.prove.reference import Reference
from pardemo.prove.runner import ProveError, Run
from pardemo.prove.stopping import plan, states, stream


@dataclass
class Reshaped:
    """A run that goes on in another layout, beside the undisturbed one.

    ``begins``: behind how many steps it goes on, by its parameters; None of no step. ``states``: whether optimizers'
    states were compared themselves; where an engine keeps them flat, only what its step makes of them is.
    """

    begins: int | None
    findings: list[Finding]
    states: bool


def judge(name: str, reference: Run, resumed: Run, expected: int, tolerance: float) -> Reshaped:
    """Holds a resumed run against the undisturbed one.

    Raises:
        ProveError: the two cannot be compared: other global batches, or other parameters.
    """
    begins, compared, truth, own = None, None, None, resumed
    for step in sorted(range(reference.steps), key=lambda step: (step != expected, step)):
        truth, own = Reference(reference.since(step), tolerance), _uncut(resumed)
        try:
            compared = compare.layout(truth, own)
        except ProveError:  # nothing of it is where this step's parameters are
            continue
        if _same_parameters(compared):
            begins = step
            break
    if begins is None:
        truth, own = Reference(reference.since(expected), tolerance), _uncut(resumed)
        compared = compare.layout(truth, own)
    assert compared is not None
    assert truth is not None
    behind = expected if begins is None else begins
    found: list[Finding] = []
    states_seen = False
    if compared.unmatched:
        found.append(Finding(name, behind + 1, "parameters", "not-restored", compared.unmatched))
    if begins is not None:
        of_states, states_seen = _states(name, truth, own, compared, behind)
        found += of_states
    told = {one.cause for one in found}
    for one in compared.findings:
        if one.cause == "optimizer-state" and "optimizer-state" in told:
            continue  # which state it is stands there
        if one.cause == "data":
            said, since = stream.said(stream.of(reference), stream.of(resumed), behind)
            one = replace(one, why=said, step=since + 1 - behind) if said else one
        if one.cause == "learning-rate" and (rates := plan.rates_said(reference, resumed, behind)) is not None:
            one = replace(one, why=rates[0], step=rates[1] + 1 - behind, factor=None)
        found.append(replace(one, layout=name, step=one.step + behind))
    return Reshaped(begins, found, states_seen)


def _uncut(run: Run) -> Run:
    """A run's own copy of what is known of its pieces: a comparison cuts those that are several of the reference's."""
    records = [replace(record, steps=[replace(step) for step in record.steps]) for record in run.records]
    return replace(run, records=records, strips={})


def _same_parameters(compared: compare.Compared) -> bool:
    """Whether the run begins with the parameters of the step that it was held against, whatever its samples are."""
    begun = any(one.what == "parameters" and one.step == 1 for one in compared.findings)
    return not compared.unmatched and not compared.maps.different and not begun


def _states(
    name: str, truth: Reference, resumed: Run, compared: compare.Compared, behind: int
) -> tuple[list[Finding], bool]:
    """Optimizers' states, put together from all ranks' parts as the parameters are; and whether there were any."""
    found, matched = [], False
    kinds = sorted(states.kinds(truth.run, 0))
    for kind in kinds:
        wanted = truth.in_whole(0, kind)
        holders = compare.holders_of(resumed, 0, kind, compared.maps)
        theirs, ours = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for parameter, tensor in wanted.items():
            of = truth.whole[0].before.get(parameter)
            if of is None or (tensor.dim() and tensor.shape != of.shape):
                continue  # as Adafactor's sums of rows and columns: how these are cut nothing says
            some = holders.get(parameter, [])
            theirs[parameter] = tensor
            if some and tensor.dim() == 0:  # a count, which each rank has: one that differs counts
                values = [value.double() for _, _, value in some]
                ours[parameter] = next((value for value in values if not torch.equal(value, tensor)), values[0])
            elif some:  # zero where no rank has a part
                ours[parameter] = assembled(tuple(tensor.shape), some).value
        matched = matched or bool(ours)
        if not ours and any(key.startswith(f"{kind}/") for key in resumed.keys(0, 0)):
            continue  # they are there, and kept in a form that says not whose they are
        _, told = states.compared(kind, [theirs], [ours], tuple, 0, truth.tolerance)
        found += [Finding(name, behind + 1, "optimizer", "optimizer-state", why, None, None, tuple(names))
                  for why, names in told.items()]  # fmt: skip
    return found, matched
