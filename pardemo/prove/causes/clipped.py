"""One way clips its gradients and the other does not: all updates are the reference's times one number."""

import math
from collections.abc import Sequence

from pardemo.prove.facts import Facts, Pair

#: Relative: what a norm and a limit are rounded by where a step is fp32's, and a thousandth of what is looked for.
_NEAR = 1e-4


def clipped(facts: Facts, pairs: Sequence[Pair]) -> str:
    """Why these updates are off, if it is a clip of whole gradients; else nothing.

    The factor of an update is then the limit over the gradients' norm, where this layout clips; or the norm over the
    limit, where only the reference does. A limit is a number that people write: of two digits.
    """
    factors = [pair.factor for pair in pairs]
    if not pairs or len(pairs) < len(facts.updates) or facts.step >= len(facts.norms):  # a clip leaves no parameter out
        return ""
    factor, norm = factors[0], facts.norms[facts.step]
    alike = all(math.isclose(other, factor, rel_tol=_NEAR) for other in factors)
    if not alike or factor <= 0 or max(pair.rest for pair in pairs) > _NEAR:
        return ""
    limit = factor * norm if factor < 1 else norm / factor
    written = float(f"{limit:.1e}")
    if not math.isclose(limit, written, rel_tol=_NEAR):
        return ""
    if factor > 1:
        return f"the reference clips gradients of norm {norm:.4g} to {written:g}, and this layout does not clip them"
    return (
        f"the step is taken as if gradients of norm {norm:.4g} were clipped to {written:g}, and the reference does not "
        "clip them: DeepSpeed does so unless its configuration says gradient_clipping"
    )
