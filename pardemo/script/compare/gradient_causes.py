"""Recognises causes of wrong gradients: each looks at all parameters that are wrong together."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from pardemo.script.compare.closeness import near_in_norm
from pardemo.script.compare.differences import StepComparison
from pardemo.script.compare.pairs import Pair
from pardemo.script.compare.run_layouts import distinct_digits, layout_factor, size_text
from pardemo.world.errors import ranks_text


class Cause(NamedTuple):
    """A cause of wrong gradients: explains parameters that are wrong together by a sentence, or returns None."""

    name: str
    explains: Callable[[Sequence[Pair], StepComparison], str | None]


def _cause(name: str) -> Callable[[Callable[[Sequence[Pair], StepComparison], str | None]], Cause]:
    return lambda explains: Cause(name, explains)


def plain_limit(comparison: StepComparison) -> float:
    """Returns the rest up to which a gradient counts as a multiple of the reference's."""
    return min(max(comparison.tolerance * 100, 1e-6), 0.1)


def ranks_of(pairs: Iterable[Pair]) -> set[int]:
    """Returns ranks that hold the same part of a parameter and have different values of it."""
    return {rank for pair in pairs for _, versions in pair.apart for rank in versions}


@_cause("mean-of-means")
def mean_of_means(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Parts with different numbers of tokens weigh the same."""
    by_rank: list[tuple[int, float]] = []
    by_micro_batch: list[tuple[int, float]] = []
    with_loss = [step for step in comparison.steps if step.losses]  # a pipeline's other stages have none
    for step in with_loss:
        counts: dict[int, int] = {}
        for call in step.loss_calls:
            counts[call.micro_batch] = counts.get(call.micro_batch, 0) + call.targets - call.ignored
        if len(counts) != len(step.losses):
            return None
        by_micro_batch += zip(counts.values(), step.losses, strict=True)
        by_rank.append((sum(counts.values()), sum(step.losses)))
    return _weighed_text(by_micro_batch, comparison, max(len(with_loss), 1)) or _weighed_text(by_rank, comparison, 1)


def _weighed_text(parts: Sequence[tuple[int, float]], comparison: StepComparison, ranks: int) -> str | None:
    """Says whether parts' losses, each with its number of targets, make the reference's when they are weighed by it."""
    counts, values = [count for count, _ in parts], [value for _, value in parts]
    wanted = sum(comparison.reference_step.losses)
    if not wanted or len(set(counts)) < 2 or not sum(counts) or not all(map(math.isfinite, values)):
        return None
    plain = sum(values) / len(values)
    weighted = sum(n * v for n, v in zip(counts, values, strict=True)) / sum(counts)
    for times in (1, len(values) / ranks, ranks, len(values)):
        if math.isclose(times * weighted, wanted, rel_tol=max(comparison.tolerance * 10, 1e-6)) and not math.isclose(
            times * plain, wanted, rel_tol=max(comparison.tolerance * 10, 1e-6)
        ):
            return (
                f"parts with {min(counts)} to {max(counts)} targets weigh the same: weighed by their targets, the "
                "losses would be the reference's"
            )
    return None


@_cause("loss")
def loss_itself(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Outputs are right, and what is made of them is not: the loss, or its backward pass."""
    text = _losses_within_a_group(comparison) or _loss_text(comparison)
    bare = next((name for name in comparison.gradients if name.startswith("optimizer.")), "")
    if text and bare:
        return f"{text}; the outputs of modules are right, and nothing is seen of what {bare} is used for, in no module"
    if text:
        return f"{text}; the outputs are right"
    last = max(comparison.gradients, key=lambda name: comparison.position(name.rpartition(".")[0]), default="")
    if last in {pair.name for pair in pairs} and math.isfinite(sum(comparison.reference_step.losses)):
        return (
            "the outputs and the loss are right, and gradients are wrong from the last module on: by the loss's "
            "backward pass, or by what is done to all gradients before the step"
        )
    return None


def _losses_within_a_group(comparison: StepComparison) -> str | None:
    for rank, step in enumerate(comparison.steps):
        for other, earlier in enumerate(comparison.steps[:rank]):
            same = [m.samples for m in step.micro_batches] == [m.samples for m in earlier.micro_batches]
            if same and step.micro_batches and len(step.losses) == len(earlier.losses) and step.losses:
                off = max(abs(a - b) for a, b in zip(step.losses, earlier.losses, strict=True))
                if off > comparison.tolerance * 10 * max(map(abs, step.losses)):
                    return (
                        f"{ranks_text([other, rank])} have the same samples, and differentiate different losses: "
                        f"{earlier.losses[0]:.6g} and {step.losses[0]:.6g}"
                    )
    return None


def _loss_text(comparison: StepComparison) -> str | None:
    sums, wanted = comparison.losses, sum(comparison.reference_step.losses)
    if not sums or not wanted:
        return None
    loss = min(sum(sums) / len(sums), sum(sums), key=lambda loss: abs(loss - wanted))  # of ranks, or of their parts
    named = layout_factor(comparison.layout, loss / wanted, 1e-4)
    if math.isclose(loss, wanted, rel_tol=comparison.tolerance * 10) or named:
        return None
    return f"the loss that is differentiated is {loss:.6g} where the reference's is {wanted:.6g}"


#: Types and the bits of their mantissas, those with the fewest first.
_TYPES = (("bf16", 8), ("fp16", 11), ("fp32", 24))


@_cause("precision")
def precision(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """All elements are the reference's, rounded to fewer bits."""
    worst = 0.0
    for pair in pairs:
        if not 0.95 < pair.factor < 1.05:
            return None
        scale = float(pair.reference.abs().max())
        large = pair.covered & (pair.reference.abs() > 0.05 * scale)
        off = ((pair.candidate - pair.reference).abs() / pair.reference.abs().clamp(min=1e-300))[large]
        worst = max(worst, float(off.max()) if off.numel() else 0.0)
    for type_, bits in _TYPES:
        # a sum of rounded numbers is off by some roundings, as much as 16
        if comparison.tolerance < worst < 2.0 ** -(bits - 4) and all(
            _has_bits(pair, bits, comparison) for pair in pairs
        ):
            return f"each element is off by at most {worst:.1e} of itself: rounded to {type_} on the way"
    return None


def _has_bits(pair: Pair, bits: int, comparison: StepComparison) -> bool:
    """Whether each number has no more bits than these, as it is or before it was divided by ranks."""
    values = pair.candidate[pair.covered].double()
    values = values[values != 0]
    for times in (1, *comparison.layout.sizes.values()):
        mantissa, _ = torch.frexp(values * times)
        steps = mantissa * 2.0**bits
        if bool(((steps - steps.round()).abs() <= 1e-3).all()):
            return True
    return False


@_cause("wrong-norm")
def own_norm(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Clipped more often than the reference; or all have one factor, where the reference's norm is always the limit."""
    times = max(len(step.clips) for step in comparison.steps)
    norms = [clip for step in comparison.steps for clip in step.clips]  # one for all: each part of them is clipped once
    if times > max(len(comparison.reference_step.clips), 1) and not math.isclose(min(norms), max(norms), rel_tol=1e-6):
        return f"gradients are clipped {times} times in a step, each time what is there by then"
    wanted = math.sqrt(sum(float(p.reference.double().square().sum()) for p in comparison.gradients.values()))
    whole_norm = math.sqrt(sum(float(p.candidate.double().square().sum()) for p in comparison.gradients.values()))
    if len({round(pair.factor, 6) for pair in pairs}) != 1 or math.isclose(wanted, whole_norm, rel_tol=1e-6):
        return None
    if len(pairs) < len(comparison.gradients) or layout_factor(comparison.layout, pairs[0].factor, 1e-4):
        return None
    often = len(comparison.norms) > 1 and all(math.isclose(norm, wanted, rel_tol=1e-6) for norm in comparison.norms)
    if not often and not _is_limit(wanted, comparison):
        return None  # nothing says that the reference is clipped
    norm_text, wanted_text = distinct_digits(whole_norm, wanted)
    return (
        f"all gradients are {distinct_digits(pairs[0].factor, 1.0)[0]} times the reference's, and their norm is "
        f"{norm_text} where the reference's is {wanted_text}: clipped by another norm"
    )


def _is_limit(norm: float, comparison: StepComparison) -> bool:
    """Whether a norm is a number that people write as a limit, of two digits."""
    return math.isclose(norm, float(f"{norm:.1e}"), rel_tol=min(comparison.tolerance * 100, 1e-5))


def multiple_cause(pairs: Sequence[Pair], comparison: StepComparison) -> tuple[str, str] | None:
    """Names the cause, with a sentence, where gradients are the reference's times a number of the layout."""
    if any(pair.rest > plain_limit(comparison) for pair in pairs):
        return None
    named = layout_factor(comparison.layout, pairs[0].factor, min(max(comparison.tolerance * 100, 1e-5), 0.03))
    if named is None:
        return None
    every = len(pairs) >= 0.9 * len(comparison.gradients)
    key, text = named.keys[0], named.text
    if len(named.keys) > 1 and named.number not in (comparison.layout.sizes[key] for key in named.keys):
        return "sum-for-mean" if named.times else "mean-for-sum", text
    if comparison.layout.sizes.get("pp") and key in ("micro_batches", "accumulate", "pp"):
        return "stage-scale", f"{text}: the last stage's loss weighs micro-batches wrongly"
    if key in ("accumulate", "micro_batches"):
        if named.times and not every:
            return "accumulation-not-divided", f"{text}: the part of each micro-batch has its full weight"
        if named.times:
            return "accumulation-not-divided", f"{text}: a sum over micro-batches where a mean was meant"
        return "accumulation-divided-twice", f"{text}: the loss is divided by it twice"
    if key == "ep" and {pair.name for pair in pairs} <= comparison.cut:
        how = "too few ranks: those that have the same experts, and not all" if named.times else "too many ranks"
        return "sum-for-mean" if named.times else "mean-for-sum", f"{text}: a sum is divided by {how}"
    replicas = {"dp", "ranks"} & set(named.keys)  # ranks that have whole models
    if every or replicas or _held_by_few(pairs, comparison):
        if named.times:
            return "sum-for-mean", f"{text}: a sum over ranks where a mean was meant"
        return "mean-for-sum", f"{text}: a mean over ranks where a sum was meant, or divided by it twice"
    if named.times:
        return "counted-per-rank", f"{text}: counted once for each of the ranks that hold it alike"
    return "mean-for-sum", f"{text}: divided by the {size_text(key)} once too often"


def _held_by_few(pairs: Sequence[Pair], comparison: StepComparison) -> bool:
    """Whether not all ranks have these parameters, as experts."""
    return all(comparison.holders.get(pair.name, comparison.layout.ranks) < comparison.layout.ranks for pair in pairs)


@_cause("not-summed")
def not_summed(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Ranks that hold the same parameter have different gradients, whose mean or sum is the reference's."""
    how = {_summing_way(pair, comparison) for pair in pairs}
    if None in how or len(how) != 1:
        return None
    ranks = sorted(ranks_of(pairs))
    if how == {"sum of groups"}:
        return (
            f"groups among {ranks_text(ranks)} keep their own parts: only the sum over all of them is the "
            "reference's, so these parameters are summed over too few ranks"
        )
    operation = "sum" if how == {"sum"} else "mean"
    return (
        f"each of {ranks_text(ranks)} keeps its own part: the {operation} of their gradients is the reference's, so "
        "these parameters are in no all-reduce"
    )


def _summing_way(pair: Pair, comparison: StepComparison) -> str | None:
    if not pair.apart:
        return None
    size = float(pair.reference.double().norm())
    answers = dict.fromkeys(("mean", "sum", "sum of groups"), True)
    for part, versions in pair.apart:
        stacked = torch.stack([tensor.double() for tensor in versions.values()])
        wanted = part.cut_from(pair.reference, tuple(stacked.shape[1:])).double()
        combined = {"mean": stacked.mean(0), "sum": stacked.sum(0), "sum of groups": _distinct(stacked).sum(0)}
        for how in answers:
            answers[how] &= near_in_norm(combined[how], wanted, comparison.predicate_tolerance, size)
    return next((how for how, fits in answers.items() if fits), None)


def _distinct(versions: torch.Tensor) -> torch.Tensor:
    """Returns the versions that differ among those of all ranks [n, …]: ranks of one group have the same."""
    kept: list[torch.Tensor] = []
    for version in versions:
        if not any(near_in_norm(version, other, 1e-12) for other in kept):
            kept.append(version)
    return torch.stack(kept)


@_cause("part-of-tied")
def part_of_tied(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """A parameter with two uses, as embedding and head, whose gradients from both come together nowhere."""
    if not all(pair.name in comparison.tied and _is_sum_of_uses(pair, comparison) for pair in pairs):
        return None
    other = comparison.tied[pairs[0].name][0]
    return (
        f"{pairs[0].name} is {other}, too: each of the two has the gradient of its own use only, and their sum is "
        "the reference's"
    )


def _is_sum_of_uses(pair: Pair, comparison: StepComparison) -> bool:
    """Whether ranks have it under one of its names each, alike under one, and all names' sum is the reference's."""
    size = float(pair.reference.double().norm())
    for part, versions in pair.apart:
        by_use: dict[str, list[torch.Tensor]] = {}
        for rank, tensor in versions.items():
            names = comparison.names.get(rank, {}).get(pair.name, set())
            if len(names) != 1:
                return False
            by_use.setdefault(next(iter(names)), []).append(tensor.double())
        uses = list(by_use.values())
        if len(uses) < 2 or any(
            not near_in_norm(a, same[0], comparison.predicate_tolerance) for same in uses for a in same
        ):
            return False
        total = torch.stack([same[0] for same in uses]).sum(0)
        if not near_in_norm(
            total, part.cut_from(pair.reference, tuple(total.shape)), comparison.predicate_tolerance, size
        ):
            return False
    return bool(pair.apart)


@_cause("wrong-norm")
def clipped_apart(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Each rank clips its own gradients, and they are averaged after that."""
    if all(pair.apart and pair.name in comparison.together for pair in pairs) and any(
        step.clips for step in comparison.steps
    ):
        norms = [step.clips[-1] for step in comparison.steps if step.clips]
        return (
            f"each rank clips its own gradients, by norms from {min(norms):.4g} to {max(norms):.4g}, and they are "
            "summed after that"
        )
    return None


@_cause("no-gradient")
def no_gradient(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """No gradient arrives at these parameters."""
    if all(not pair.candidate[pair.covered].any() and pair.reference.any() for pair in pairs):
        return "their gradient is zero on every rank"
    return None


@_cause("parts-mixed")
def parts_mixed(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Ranks that hold different parts of a parameter have one gradient, the mean or the sum of all parts' ones."""
    counts = {_mixed_parts(pair, comparison) for pair in pairs}
    count = counts.pop()
    if count is None or counts:
        return None
    return (
        f"they lie in {count} parts on different ranks, and all have one gradient, made of those of all parts: "
        "they are reduced as if they were copies"
    )


def _mixed_parts(pair: Pair, comparison: StepComparison) -> int | None:
    """Returns into how many parts the one gradient is cut."""
    if pair.apart or pair.name not in comparison.cut or not pair.covered.all():
        return None
    size = float(pair.reference.double().norm())
    for count in (n for n in range(2, comparison.layout.ranks + 1) if comparison.layout.ranks % n == 0):
        for axis in (dim for dim in range(pair.candidate.dim()) if pair.candidate.shape[dim] % count == 0):
            chunks = torch.stack(pair.candidate.double().chunk(count, axis))
            total = torch.stack(pair.reference.double().chunk(count, axis)).sum(0)
            alike = near_in_norm(chunks, chunks[:1].expand_as(chunks), comparison.predicate_tolerance, size)
            if alike and any(
                near_in_norm(chunks[0], total / by, comparison.predicate_tolerance, size) for by in (1, count)
            ):
                return count
    return None


@_cause("rows-missing")
def rows_missing(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Rows of a table have no gradient, and all others the reference's."""
    texts = []
    for pair in pairs:
        if pair.reference.dim() != 2 or pair.apart:
            return None
        has = pair.candidate.any(1)
        should = pair.reference.abs().amax(1) > comparison.tolerance * float(pair.reference.abs().max())
        missing = should & ~has
        if not missing.any() or not near_in_norm(
            pair.candidate[has], pair.reference[has], comparison.predicate_tolerance
        ):
            return None
        places = missing.nonzero().reshape(-1)
        texts.append(f"{int(missing.sum())} rows of {pair.name}, {int(places[0])} to {int(places[-1])}, have none")
    return "; ".join(texts)


@_cause("stale")
def stale(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """Gradients of an earlier step: not cleared, or used again."""
    shares = _shares(pairs, comparison.earlier[-1] if comparison.earlier else {}, comparison)
    if shares is None or shares[1] < 0:  # what was left adds up; an update of a bias has the other sign
        return None
    now, then = shares
    if abs(now) < 1e-6:
        return f"they are those of step {comparison.step}"
    return (
        f"they are {now:.4g} times those of step {comparison.step + 1} and {then:.4g} times those of step "
        f"{comparison.step}, which nobody cleared"
    )


def _shares(
    pairs: Sequence[Pair], others: Mapping[str, torch.Tensor], comparison: StepComparison
) -> tuple[float, float] | None:
    """Returns the shares of the reference and of other tensors that sum to all of these gradients; None without any."""
    if any(pair.name not in others for pair in pairs):
        return None
    shares = [
        _coefficients(pair.candidate, [pair.reference, others[pair.name]], comparison.predicate_tolerance)
        for pair in pairs
    ]
    now, then = shares[0] or (0.0, 0.0)
    alike = all(share and abs(share[0] - now) + abs(share[1] - then) <= 1e-3 * abs(then) for share in shares)
    return (now, then) if alike and abs(then) > 1e-3 else None


def _coefficients(gradient: torch.Tensor, parts: Sequence[torch.Tensor], tolerance: float) -> list[float] | None:
    """Returns how much of each part makes the gradient; None where nothing does."""
    columns = torch.stack([part.double().reshape(-1) for part in parts], dim=1)
    wanted = gradient.double().reshape(-1, 1)
    if columns.shape[0] <= columns.shape[1]:
        return None  # a few numbers can be made of anything
    solution = torch.linalg.lstsq(columns, wanted).solution
    return solution.reshape(-1).tolist() if near_in_norm(columns @ solution, wanted, tolerance) else None


@_cause("summed-again")
def summed_again(pairs: Sequence[Pair], comparison: StepComparison) -> str | None:
    """The sum of earlier micro-batches is summed over ranks, or divided, once more with each later one."""
    lines = [_clearing_line(pair.name, comparison) for pair in pairs]
    if all(lines) and not comparison.reference_step.cleared.keys() & {pair.name for pair in pairs}:
        line = lines[0]
        return f"gradients are cleared within the step, at {line}: what earlier micro-batches have made is lost"
    shares = None if any(pair.apart for pair in pairs) else _shares(pairs, comparison.accumulated, comparison)
    if shares is None or abs(shares[0] - 1) > 1e-4:
        return None
    times = shares[1]
    ratio = _repeat_count(times)
    keys = [key for key, size in comparison.layout.sizes.items() if abs(size - ratio) < 1e-3]
    if not keys:
        return None
    done = "summed over ranks" if times > 0 else "divided"
    return (
        f"with each micro-batch, what earlier ones of the step have accumulated is {done} once more: "
        f"{'×' if times > 0 else '÷'} {round(ratio)} = {' or '.join(f'the {size_text(key)}' for key in keys)}"
    )


def _clearing_line(name: str, comparison: StepComparison) -> str:
    """Returns the line that cleared a parameter's gradient within the step on some rank; empty where none did."""
    for rank, step in enumerate(comparison.steps):
        for own_name in comparison.names.get(rank, {}).get(name, {name}):
            if own_name in step.cleared:
                return step.cleared[own_name]
    return ""


def _repeat_count(times: float) -> float:
    """Returns the n by which earlier micro-batches are summed or divided again: gradient = right + times · accumulated.

    s(m) the sum of micro-batch m and a(m) what is there after it: a(m) = n · a(m − 1) + s(m), or the whole of it is
    divided by n; then Σ s(m), which is right, is the last a less (n − 1), or plus (1 − 1/n), times the others. Where
    it is divided once, behind the last, it is (n − 1)/n times. 0: of no n.
    """
    if times > 1 - 1e-4:
        return times + 1
    return 1 / (1 - abs(times)) if 1e-4 < abs(times) < 1 else 0.0


#: In the order in which they are asked, of parameters by themselves.
BY_PARAMETER: tuple[Cause, ...] = (
    no_gradient, clipped_apart, part_of_tied, not_summed, parts_mixed, rows_missing, stale,
)  # fmt: skip
#: Of all that are left, together.
TOGETHER: tuple[Cause, ...] = (summed_again, mean_of_means, own_norm, precision, loss_itself)
