"""The stream of samples of a run that was stopped: over both parts none twice, none missing, in the same order."""

from collections import Counter
from collections.abc import Sequence

from pardemo.prove.record.facts import Record
from pardemo.prove.runner import Run

Samples = Counter[str]
#: What is said of samples that are in no step of the undisturbed run, as far as it was seen.
STRANGE = "are there that none of these steps should have"


def of(run: Run) -> list[Samples]:
    """Of each step the samples of all ranks, by their hashes.

    Beside ranks with samples, activations are none. Where all want a gradient (a script may ask for one), all are.
    """
    found = []
    for step in range(min(len(record.steps) for record in run.records)):
        micros = [micro for record in run.records for micro in record.steps[step].micro_batches]
        samples = [micro for micro in micros if not micro.activations] or micros
        found.append(Counter(sample for micro in samples for sample in micro.samples))
    return found


def said(reference: Sequence[Samples], resumed: Sequence[Samples], begin: int) -> tuple[str, int]:
    """What is wrong with the samples of a run that goes on behind ``begin`` steps, empty if nothing; and since when.

    Ranks that share samples, as those of a tensor-parallel group, may be more or fewer than in the reference.
    """
    wanted = list(reference[begin:])
    steps = min(len(wanted), len(resumed))
    own = [_per_copy(resumed[number], wanted[number]) for number in range(steps)]
    first = next((number for number in range(steps) if own[number] != wanted[number]), None)
    if first is None:
        return "", 0
    if moved := _moved(reference, own, begin):
        return moved, begin
    before, due = sum(reference[:begin], Counter()), sum(wanted[:steps], Counter())
    came = sum(own, Counter())
    missing, extra = due - came, came - due
    again = sum((extra & before).values())
    strange = sum(extra.values()) - again
    number, share = sum(missing.values()), sum(due.values())
    span = f"of the {share} samples of steps {begin + 1} to {begin + steps}"
    if not number and not extra:
        return (
            f"the samples are the right ones and come in another order from step {begin + first + 1} on",
            begin + first,
        )
    parts = [f"{number} are missing"] if number else []
    if again:
        parts.append(f"{again} in their place were trained on before the stop")
    if strange:
        parts.append(f"{strange} {STRANGE}")
    return f"{span} {', '.join(parts)}", begin + first


def of_ranks(reference: Run, resumed: Run, begin: int) -> tuple[str, int]:
    """What is wrong with who trains on which sample, where the samples of all ranks together are right; since when.

    For runs in one layout that repeat themselves to the last bit: which rank has a sample changes its dropout mask, the
    order in which gradients are added, and what its batch norm sees.
    """
    steps = min(min(len(record.steps) for record in resumed.records), len(reference.records[0].steps) - begin)
    for step in range(steps):
        for theirs, ours in zip(reference.records, resumed.records, strict=True):
            wanted, own = _in_order(theirs, begin + step), _in_order(ours, step)
            if wanted != own and Counter(wanted) == Counter(own):
                return f"rank {theirs.rank} has its samples of step {begin + step + 1} in another order", begin + step
            if wanted != own:
                return f"from step {begin + step + 1} on ranks train on samples that others had", begin + step
    return "", 0


def _in_order(record: Record, step: int) -> list[str]:
    micros = [micro for micro in record.steps[step].micro_batches if not micro.activations]
    return [sample for micro in micros for sample in micro.samples]


def _per_copy(own: Samples, wanted: Samples) -> Samples:
    """Samples as if each were on as many ranks as in the reference."""
    times = sum(own.values()) / max(1, sum(wanted.values()))
    copies = round(times) if times > 1 else 1
    if copies > 1 and all(count % copies == 0 for count in own.values()):
        return Counter({sample: count // copies for sample, count in own.items()})
    return own


def _moved(reference: Sequence[Samples], own: Sequence[Samples], begin: int) -> str:
    """Whether each step has the samples of another one, always as many steps away; one step alone says nothing."""
    for begins in range(len(reference)):
        pairs = list(zip(own, reference[begins:], strict=False))
        if begins == begin or len(pairs) < 2 or any(a != b for a, b in pairs):
            continue
        away = begins - begin
        number = sum(sum(one.values()) for one in reference[min(begin, begins) : max(begin, begins)])
        if away > 0:
            return (
                f"the samples of {away} step{'s' * (away > 1)}, {number} of them, are left out: no step trains on them"
            )
        if begins == 0:
            return f"the sampler begins anew: {number} samples that were trained on before the stop come again"
        return f"the samples of {-away} step{'s' * (away < -1)} before come again, {number} of them"
    return ""
