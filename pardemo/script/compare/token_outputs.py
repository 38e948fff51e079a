"""Compares another engine's log-probabilities of recorded samples with the reference's, token by token."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from pardemo.script.compare import results, run_layouts, runs
from pardemo.script.compare.closeness import within_rounding
from pardemo.script.compare.parameter_map import ParameterMap, map_parameters, renamed_modules
from pardemo.script.compare.reference import TIMES
from pardemo.script.compare.runs import ProveError, RunOptions
from pardemo.script.record.model_outputs import (
    LOG_PROBABILITIES,
    OUTPUT,
    PARAMETER,
    REFERENCE,
    ROUNDED,
    SAMPLES,
    VOCABULARY,
    EngineFollower,
    read_model_call,
    samples_name,
)
from pardemo.script.record.rank_record import ParameterShard, Tensors
from pardemo.script.record.recorded_inputs import RecordedInputs
from pardemo.script.words import count_text, first_of

#: The word in an engine's command line that is replaced by the file of the recorded samples.
FIELD = "{samples}"
#: Relative difference of log-probabilities and outputs that always counts as rounding.
LEAST_TOLERANCE = 1e-9


@dataclass
class EngineComparison:
    """The result of comparing an engine's log-probabilities of recorded samples with the reference's.

    Args:
        line: the engine's command line. reference: the reference's layout.
        tokens: how many were compared, without padding by the samples' attention_mask. different: how many differ.
        largest, mean: the differences of log-probabilities. allowed: the difference that rounding may make.
        first: the sample and the token, from 0, of the first difference in the order of the tokens.
        module: the first module whose output differs. reference_module: its counterpart in the reference.
        unmatched: the engine's parameters that equal none of the reference's, and why.
        missing: the reference's parameters that the engine does not have.
    """

    line: str
    reference: str
    tokens: int
    different: int
    largest: float
    mean: float
    allowed: float
    first: tuple[int, int] | None
    module: str
    reference_module: str
    unmatched: dict[str, str]
    missing: list[str]

    @property
    def equal(self) -> bool:
        """Whether all log-probabilities equal the reference's, to rounding."""
        return not self.different

    def as_json(self) -> dict[str, Any]:
        """Returns the comparison for JSON, as ``pardemo prove --replay DIR --outputs --json`` prints it."""
        return {"equal": self.equal} | asdict(self)

    def __str__(self) -> str:
        head = f"reference  {self.reference}: log-probabilities of {count_text(self.tokens, 'token')}"
        alike = f"to {self.allowed:.1e}, as rounding moves the reference's"
        if self.equal:
            parts = [f"✓  {self.line}: the same log-probabilities, {alike}"]
        else:
            row, token = self.first or (0, 0)
            numbers = f"by up to {self.largest:.3g}, on average {self.mean:.3g}; not the same {alike}"
            parts = [
                f"✗  {self.line}: log-probabilities of {count_text(self.different, 'token')} differ, {numbers}",
                f"   first at token {token} of sample {row}",
            ]
            if self.module:
                parts.append(
                    f"   first module whose output differs: {self.module}, {self.reference_module} in the reference"
                )
        for names, fault in ((list(self.unmatched), "match nowhere in the reference"), (self.missing, "are not there")):
            if names:
                parts.append(f"   {count_text(len(names), 'parameter')} {fault}: {first_of(names, 4)}")
        verdict = f"equal, {alike}" if self.equal else "different"
        return results.runs_screen(head, [(part, []) for part in parts], ["the samples are recorded ones"], verdict)


def compare_engine(
    recorded: RecordedInputs, texts: Sequence[str], line: Sequence[str], options: RunOptions
) -> EngineComparison:
    """Runs an engine's script with the recorded samples, and compares its log-probabilities with the reference's.

    Args:
        texts: the layout, as ``"ranks=1"``, which is also the default. line: the script's command line, in which
            ``{samples}`` stands for the file of the samples.

    Raises:
        ProveError: the script could not be run, or called no model with these samples.
        ValueError: the recording has no log-probabilities of tokens, or some that are not finite.
    """
    reference = read_model_call(Path(recorded.folder, REFERENCE))
    if LOG_PROBABILITIES not in reference:
        raise ValueError(f"{recorded.folder} has no log-probabilities: record a model that gives logits of tokens")
    samples = os.path.abspath(Path(recorded.folder, SAMPLES))
    mask = _real_tokens(read_model_call(Path(samples)))
    if not bool(_predicted(mask).any()):
        raise ValueError(f"{recorded.folder}: the attention_mask of the samples leaves no token to compare")
    if not bool(reference[LOG_PROBABILITIES][:, _predicted(mask)].isfinite().all()):
        raise ValueError(f"{recorded.folder}: log-probabilities of the reference are not finite: nothing compares")
    words = [word.replace(FIELD, samples) for word in line]
    (layout,) = run_layouts.from_texts(list(texts) or ["ranks=1"], words, alone=True)
    with runs.scratch_folder() as folder:
        path = os.path.join(folder, "engine.safetensors")
        follow = partial(EngineFollower, samples=samples, path=path)
        run = runs.run_layout(layout, replace(options, follow=follow), Path(folder))
        if run.error:
            raise ProveError(run.error, run.details)
        if not os.path.exists(path):
            raise ProveError(f"{line[0]} calls no model with the recorded samples: let it read them from {FIELD}")
        engine = read_model_call(Path(path))
    if LOG_PROBABILITIES not in engine:
        raise ProveError(f"the model of {line[0]} returns no logits of all tokens: [b, s, v] or [s, b, v]")
    if (there := int(reference[VOCABULARY])) > (here := int(engine[VOCABULARY])):
        raise ProveError(
            f"the model of {line[0]} returns {here} logits of each token, and the reference {there}: have it gather "
            "those of all ranks"
        )
    return compare_calls(" ".join(line), recorded.name, reference, engine, mask)


def _real_tokens(samples: Tensors) -> torch.Tensor:
    """Finds which tokens of the samples are no padding, by their attention_mask: → [b, s]."""
    tokens, mask = samples[samples_name(samples)], samples.get("attention_mask")
    known = mask is not None and mask.shape == tokens.shape
    return mask.bool() if mask is not None and known else torch.ones(tokens.shape[:2], dtype=torch.bool)


def _predicted(mask: torch.Tensor) -> torch.Tensor:
    """Finds which tokens from the second on are predicted: neither they nor those before are padding: → [b, s - 1]."""
    return mask[:, 1:] & mask[:, :-1]


def compare_calls(line: str, name: str, reference: Tensors, engine: Tensors, mask: torch.Tensor) -> EngineComparison:
    """Compares what two models computed from the same samples.

    Args:
        line: the engine's command line. name: the reference's layout. reference, engine: the tensors of a
            :class:`~pardemo.script.record.model_outputs.ModelCall`. mask: which tokens are no padding, [b, s].
    """
    predicted = _predicted(mask)
    exact, rounded = reference[LOG_PROBABILITIES], reference.get(ROUNDED, reference[LOG_PROBABILITIES])
    ways = product(zip(exact, rounded, strict=True), engine[LOG_PROBABILITIES])  # several where b = s
    offs = [
        ((chances - wanted).abs().nan_to_num(nan=float("inf")).where(predicted, 0), wanted, otherwise)
        for (wanted, otherwise), chances in ways
    ]
    off, wanted, otherwise = min(offs, key=lambda way: float(way[0].max()))
    scale = float(wanted[predicted].abs().max())
    moved = float((otherwise - wanted)[predicted].abs().nan_to_num(posinf=0).max())
    allowed = max(TIMES * moved, LEAST_TOLERANCE * scale)
    apart = off > allowed
    token = int(apart.any(0).int().argmax())
    row = int(apart[:, token].int().argmax())
    parts = _map(_of_kind(reference, PARAMETER), _of_kind(engine, PARAMETER))
    missing = _of_kind(reference, PARAMETER)
    for part in parts.parts[0].values():
        missing.pop(part.name, None)
    unmatched = dict(parts.unknown)
    for piece in list(unmatched):  # of a constant, as a norm's weight of ones, no value says which one it is
        value = engine[f"{PARAMETER}|{piece}"]
        alike = (key for key, other in missing.items() if within_rounding(value.double(), other.double(), 1e-6))
        if (same := next(alike, None)) is not None:
            del unmatched[piece], missing[same]
    module = ("", "")
    if bool(apart.any()) and not unmatched:
        module = _first_module(reference, engine, parts, allowed / (scale or 1.0), mask)
    tokens = int(predicted.sum())
    return EngineComparison(
        line, name, tokens, int(apart.sum()), float(off.max()), float(off.sum()) / tokens, allowed,
        (row, token + 1) if bool(apart.any()) else None, *module, unmatched, sorted(missing),
    )  # fmt: skip


def _of_kind(tensors: Tensors, kind: str) -> Tensors:
    return {key.partition("|")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{kind}|")}


def _map(reference: Tensors, engine: Tensors) -> ParameterMap:
    """Matches each of the engine's parameters with the reference's that has its values, also transposed."""
    types = {value.dtype for value in (*reference.values(), *engine.values()) if value.is_floating_point()}
    # an engine may hold its parameters in fewer bits
    tolerance = max((torch.finfo(dtype).eps for dtype in types), default=LEAST_TOLERANCE)
    in_fp64 = {name: value.double() for name, value in reference.items()}

    def parts_of(values: Tensors) -> ParameterMap:
        pieces = [(ParameterShard(name, tuple(value.shape)), value.double()) for name, value in values.items()]
        return map_parameters(in_fp64, {0: pieces}, {}, tolerance)

    parts = parts_of(engine)
    flipped = parts_of({name: engine[name].T for name in parts.unknown if engine[name].dim() == 2})
    for known, also in ((parts.parts, flipped.parts), (parts.strips, flipped.strips)):
        known[0].update(also[0])  # type: ignore[arg-type]
    parts.unknown = {
        name: why for name, why in parts.unknown.items() if engine[name].dim() != 2 or name in flipped.unknown
    }
    return parts


def _first_module(
    reference: Tensors, engine: Tensors, parts: ParameterMap, allowed: float, mask: torch.Tensor
) -> tuple[str, str]:
    """Finds the engine's first module whose output differs from its counterpart's, which has the same parameters."""
    in_order = {name: part for name, part in parts.parts[0].items() if not part.is_cut}  # else outputs are, too
    renamed = renamed_modules(in_order) | _layers(parts)
    wanted = {tuple(key.split("|")[1:]): tensor for key, tensor in _of_kind(reference, OUTPUT).items()}
    outputs = {tuple(key.split("|")): tensor for key, tensor in _of_kind(engine, OUTPUT).items()}
    for (_, module, times), output in sorted(outputs.items(), key=lambda item: int(item[0][0])):
        expected = wanted.get((renamed.get(module, module), times))
        if expected is None or expected.numel() != output.numel():
            continue
        real = mask.T if expected.shape[:2] == mask.T.shape != mask.shape else mask
        expected, ways = expected.flatten(0, -2), [output.flatten(0, -2)]
        if len(expected) == mask.numel():  # a row for each token, sample by sample or position by position
            expected = expected[real.flatten()]
            ways += [ways[0].unflatten(0, shape).transpose(0, 1).flatten(0, 1) for shape in (mask.shape, mask.T.shape)]
            ways = [way[real.flatten()] for way in ways]
        differences = [(way.reshape(expected.shape) - expected).abs() for way in ways]
        off = min(float(difference.nan_to_num(nan=float("inf")).max()) for difference in differences)
        if off > max(10 * allowed, LEAST_TOLERANCE) * float(expected.abs().max()):
            return module, renamed.get(module, module)
    return "", ""


def _layers(parts: ParameterMap) -> dict[str, str]:
    """Returns for each of the engine's layers, as ``decoder.layers.0``, the reference's with most of its parameters."""
    votes: dict[str, Counter[str]] = {}
    pieces = {name: {part.name} for name, part in parts.parts[0].items()} | parts.parameters_of_pieces()
    for here, names in pieces.items():
        for there in names:
            pair = [re.match(r"(.*?\.\d+)\.", name) for name in (here, there)]
            if pair[0] and pair[1]:
                votes.setdefault(pair[0][1], Counter())[pair[1][1]] += 1
    return {layer: counts.most_common(1)[0][0] for layer, counts in votes.items()}
