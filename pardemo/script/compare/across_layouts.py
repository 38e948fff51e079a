"""Explains wrong gradients by two layouts of different sizes, where one layout alone does not explain them."""

import math
from collections.abc import Sequence

import torch

from pardemo.script.compare.differences import Finding, StepComparison, UnexplainedGradients
from pardemo.script.compare.results import LayoutResult
from pardemo.script.compare.run_layouts import SIZES, RunLayout, size_text

#: Causes that a layout by itself has no better name for than these.
_OPEN = ("", "loss")
#: Numbers that the differences have to have in common before anything is said of them.
_LEAST = 8


def unexplained_gradients(findings: Sequence[Finding], comparison: StepComparison) -> UnexplainedGradients | None:
    """Returns the finding that other layouts may explain; None where there is none, or more than one."""
    wrong = [finding for finding in findings if finding.what == "gradients" and finding.cause in _OPEN]
    pairs = tuple(
        comparison.gradients[name] for finding in wrong for name in finding.parameters if name in comparison.gradients
    )
    if len(wrong) != 1 or any(pair.apart for pair in pairs):
        return None
    losses = comparison.losses or [math.nan]
    wanted = sum(comparison.reference_step.losses)
    return UnexplainedGradients(wrong[0], pairs, comparison.tolerance, (wanted, sum(losses) / len(losses), sum(losses)))


def explain_across(results: Sequence[LayoutResult]) -> None:
    """Gives reasons to the findings of layouts that two layouts of different sizes explain together.

    With a part a of the gradient counted n times, the wrong gradient is g + (n - 1) a: the differences from the
    reference of two layouts are parallel, and their ratio is that of their n - 1; of 1/n - 1 where a part is divided.

    Args:
        results: of all layouts that were compared, with what each leaves open; their findings are changed.
    """
    by_layout = [(result.layout, result.left_open) for result in results if result.left_open is not None]
    if len(by_layout) < 2 or len({(case.finding.step, case.finding.parameters) for _, case in by_layout}) != 1:
        return
    for times in (True, False):
        keys = [key for key in ("ranks", *SIZES) if _grows_with(key, times, by_layout, results)]
        if keys:
            explained = [case.finding for _, case in by_layout]
            cause, why = _cause_across(keys, times, by_layout)
            for result in results:
                result.findings = [
                    finding.explained(cause, why) if finding in explained else finding for finding in result.findings
                ]
            return


def _grows_with(
    key: str,
    times: bool,
    by_layout: Sequence[tuple[RunLayout, UnexplainedGradients]],
    results: Sequence[LayoutResult],
) -> bool:
    """Whether differences grow with this number of the layouts; and layouts in which it is 1 are right."""
    numbers = [layout.sizes.get(key, 1) for layout, _ in by_layout]
    alone = any(result.findings for result in results if result.layout.sizes.get(key, 1) == 1)
    if min(numbers) < 2 or len(set(numbers)) < 2 or alone:
        return False
    shares = [number - 1 if times else 1 / number - 1 for number in numbers]
    ratios, cases = [share / shares[0] for share in shares], [case for _, case in by_layout]
    return all(
        _are_parallel(cases[0], other, ratio) for other, ratio in zip(cases[1:], ratios[1:], strict=True)
    ) and _losses_agree(cases, ratios)  # fmt: skip


def _are_parallel(first: UnexplainedGradients, second: UnexplainedGradients, ratio: float) -> bool:
    """Whether all differences of the second are ``ratio`` times the first's, and more than rounding."""
    elements = 0
    for a, b in zip(first.pairs, second.pairs, strict=True):
        both = a.covered & b.covered
        first_error, second_error = ((pair.candidate - pair.reference)[both].double() for pair in (a, b))
        size = float(second_error.norm())
        rounding = 100 * first.tolerance * float(a.reference.double().norm()) * (1 + abs(ratio))
        off = float((second_error - ratio * first_error).norm())
        if not math.isfinite(size) or off > rounding or rounding > 0.01 * size:
            return False
        elements += int(torch.count_nonzero(second_error))
    return elements >= _LEAST


def _losses_agree(cases: Sequence[UnexplainedGradients], ratios: Sequence[float]) -> bool:
    """Whether the losses are right in all layouts, or off as the gradients are."""
    off = [case.losses[1] - case.losses[0] for case in cases]
    allowed = [
        case.tolerance * 100 * abs(case.losses[0]) * (1 + abs(ratio)) for case, ratio in zip(cases, ratios, strict=True)
    ]
    return all(case.loss_is_right for case in cases) or all(
        abs(value - off[0] * ratio) <= limit < 0.1 * abs(value)
        for value, ratio, limit in zip(off, ratios, allowed, strict=True)
    )


def _cause_across(
    keys: Sequence[str], times: bool, by_layout: Sequence[tuple[RunLayout, UnexplainedGradients]]
) -> tuple[str, str]:
    named = " or ".join(f"the {size_text(key)}" for key in keys)
    numbers = " and ".join(str(layout.sizes[keys[0]]) for layout, _ in by_layout)
    loss = all(case.loss_is_right for _, case in by_layout)
    same = "the reference's" if loss else "off in the same way"
    how = f"is {'multiplied' if times else 'divided'} by {named}"
    cause = ("counted-per-rank" if loss else "sum-for-mean") if times else "mean-for-sum"
    return cause, (
        f"a part of the gradient, as of an auxiliary loss, {how}: what is wrong in layouts of {numbers} is the same "
        f"tensor, and changes as that number does; the loss that is differentiated is {same}"
    )
