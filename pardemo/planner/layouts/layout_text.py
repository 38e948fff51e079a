"""Reads a layout from the words of a command's option, or as a search prints it."""

import re
from dataclasses import Field, fields
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import WRITTEN, Layout, check_layout, recomputation
from pardemo.planner.layouts.step import refusal_of_layout

#: What a printed layout says, and the fields that it means.
_PRINTED = (
    (r"\bTP(?!1\b)\d+", r"\g<0> sequence_parallel=yes"),
    (r"\b(TP|CP|PP|DP|EP|ETP)(\d+)\b", lambda word: f"{word[1].lower()}={word[2]}"),
    (r"\b(zero[123])/(\d+)", r"sharding=\1 shard_group=\2"),
    (r"(?<![=\S])(zero[123])\b", r"sharding=\1"),
    (r"\b(\d+)[×x](\d+)\b", r"micro_batch=\1 accumulation=\2"),
    (r"\bv(\d+)\b", r"chunks=\1"),
    (r"\b(recompute|context|schedule|offload) (\S+)", r"\1=\2"),
)
_TRUTH = {"yes": True, "true": True, "1": True, "no": False, "false": False, "0": False}


def parse_layout(text: str, job: Job, batch: int | None = None) -> Layout:
    """Reads ``tp=8,pp=4,micro_batch=2,…`` as a :class:`Layout`; what is left out follows from GPUs and batch.

    Or the layout as a search prints it.

    Raises:
        ValueError: a word that is no field of a layout, or a layout that cannot be run.
    """
    if "=" not in text:
        for printed, meaning in _PRINTED:
            text = re.sub(printed, meaning, text)
        text = ",".join(text.split())
    values: dict[str, Any] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = word.partition("=")
        field = _field(name)
        if field.name in values:
            raise ValueError(f"{name} is said twice in {text!r}")
        names_modules = name == "recompute" and "recomputed_modules" not in values
        values |= recomputation(value) if names_modules else {field.name: _value(field, name, value)}
    layout = Layout(**values)
    if "dp" not in values:
        layout = layout.but(dp=max(1, job.machine.gpus // (layout.tp * layout.cp * layout.pp)))
    at_once = layout.dp * layout.micro_batch  # samples
    divides = batch is None or batch % at_once == 0
    if batch and "accumulation" not in values:  # one that every schedule takes, where the batch is told of below
        layout = layout.but(accumulation=batch // at_once if divides else layout.pp)
    # first: it may be a wrong degree that does not divide
    check_layout(layout, job.shape, job.machine.gpus, job.sequence, job.program.embedding_and_loss_as_layers)
    if not divides:
        raise ValueError(f"{batch} samples a step do not divide by DP {layout.dp} × {layout.micro_batch} samples")
    if batch and layout.batch != batch:
        raise ValueError(
            f"{layout} has {layout.batch} samples a step, and --per-step says {batch}; leave one of them out"
        )
    if lacking := job.program.missing_features(layout):
        raise ValueError(
            f"{job.program.name} has no {', no '.join(lacking)}; it has {', '.join(sorted(job.program.supports))} "
            "(--program)"
        )
    if why := refusal_of_layout(job, layout):
        raise ValueError(why)
    return layout


def _field(name: str) -> Field:
    """Returns the field of a layout that has this name on the command line."""
    by_name = {WRITTEN.get(field.name, field.name): field for field in fields(Layout)}
    if name not in by_name:
        raise ValueError(f"no {name!r} in a layout; there are {', '.join(by_name)}, as tp=8,pp=4")
    return by_name[name]


def _value(field: Field, name: str, text: str) -> Any:
    """Returns the value of a field, of the kind that its default is; ``name``: on the command line."""
    kind: Any = type(field.default)
    try:
        if kind is tuple:
            return tuple(filter(None, text.split("+")))
        return _TRUTH[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        needed = "yes or no" if kind is bool else "a number"
        raise ValueError(f"'{name}={text}': {name} must be {needed}") from None
