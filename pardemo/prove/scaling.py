"""Losses that a GradScaler multiplies: the scale of each rank, and steps that are skipped on some and not on others."""

from pardemo.prove.facts import Finding
from pardemo.prove.runner import Run


def findings(reference: Run, other: Run, step: int) -> list[Finding]:
    """What scalers did otherwise than the reference's, or on one rank otherwise than on another."""
    truth = reference.records[0].steps[step]
    own = [record.steps[step] for record in other.records if record.steps[step].scales]
    if not own:
        return []
    skipped, scales = sorted({one.skipped for one in own}), sorted({one.scales[-1] for one in own})
    if len(skipped) > 1:
        why = (
            f"before it some ranks skip {skipped[-1]} steps and others {skipped[0]}: each looks for infinities in what "
            "it holds itself; the answer has to be one for all, as ShardedGradScaler's is"
        )
    elif len(scales) > 1:
        why = f"ranks scale their losses by {scales[0]:g} to {scales[-1]:g}: the number has to be one for all"
    elif skipped[0] != truth.skipped:
        why = (
            f"before it {skipped[0]} steps are skipped, and {truth.skipped} in the reference: gradients of the scaled "
            f"loss are not finite, at last at a scale of {scales[0]:g}"
        )
    else:
        return []
    return [Finding(other.layout.name, step + 1, "loss scale", "loss-scale", why)]
