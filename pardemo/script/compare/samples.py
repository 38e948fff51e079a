"""Samples: over all ranks the reference's, none twice, none missing, also where a run was stopped and went on."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch

from pardemo.script.compare.runs import Finding, Run
from pardemo.script.record.records import RankRecord
from pardemo.world.errors import ranks_text


@dataclass(frozen=True)
class RowPosition:
    """Where a row is in the reference: micro-batch and row there, and its tokens' places, None for all of them.

    ``length``: tokens of the whole row, where a part of it is meant.
    """

    micro_batch: int
    row: int
    tokens: torch.Tensor | None = None
    length: int = 0


@dataclass
class StepSamples:
    """A step's samples in a layout beside the reference's.

    ``places``: of rank, micro-batch and row. None are those of a pipeline's later stages, which get activations.
    """

    places: dict[tuple[int, int, int], RowPosition] = field(default_factory=dict)
    finding: Finding | None = None
    error: str = ""
    note: str = ""


def sample_hashes(run: Run, step: int, rank: int) -> list[list[str]]:
    """Hashes of the samples of each micro-batch, or of the activations that a later stage of a pipeline gets.

    None of a module's that a rank runs behind others, as a script does that calls a model's layers one by one: what
    goes in there is rounded otherwise in each layout.
    """
    micros = run.records[rank].steps[step].micro_batches
    begins = any(micro.samples and not micro.activations for micro in micros)
    return [[] if begins and micro.activations else micro.samples for micro in micros]


def _place_later_modules(reference: Run, other: Run, step: int, samples: "StepSamples") -> None:
    """Rows of modules that ranks run behind others: those of the module that got the samples, where it had as many."""
    truth = reference.records[0].steps[step].micro_batches
    for rank, record in enumerate(other.records):
        begin = -1
        for number, micro in enumerate(record.steps[step].micro_batches):
            if not micro.activations:
                begin = number
            elif begin >= 0:
                for row in range(len(micro.samples)):
                    first = samples.places.get((rank, begin, row))
                    at = first.micro_batch + number - begin if first else len(truth)
                    if first and at < len(truth) and truth[at].activations and first.row < len(truth[at].samples):
                        samples.places.setdefault((rank, number, row), replace(first, micro_batch=at))


def match_samples(reference: Run, other: Run, step: int) -> StepSamples:
    """Matches a layout's samples of a step with the reference's."""
    made = _match(reference, other, step)
    if reference.layout.ranks == 1:
        _place_later_modules(reference, other, step, made)
    return made


def _match(reference: Run, other: Run, step: int) -> StepSamples:
    at: dict[str, RowPosition] = {}
    wanted: Counter[str] = Counter()
    for rank in range(reference.layout.ranks):
        for number, micro in enumerate(sample_hashes(reference, step, rank)):
            wanted.update(micro)
            for row, sample in enumerate(micro):
                at.setdefault(sample, RowPosition(number, row))
    found: dict[int, Counter[str]] = {}
    total: Counter[str] = Counter()
    samples = StepSamples()
    for rank in range(other.layout.ranks):
        own = sample_hashes(other, step, rank)
        found[rank] = Counter(sample for micro in own for sample in micro)
        for micro in own:  # others are activations, for a later stage of this rank, or a module's that is run by itself
            total.update(micro if any(sample in wanted for sample in micro) else ())
        for number, micro in enumerate(own):
            for row, sample in enumerate(micro):
                if sample in at:
                    samples.places[rank, number, row] = at[sample]
    if not wanted:
        return samples
    if not any(sample in wanted for own in found.values() for sample in own):
        return _match_without_padding(reference, other, step) or _match_parts(reference, other, step, samples)
    times = sum(total.values()) / sum(wanted.values())
    if times < 1 and step == 0 and total.keys() == wanted.keys():  # all alike, and fewer of them
        samples.error = _unequal_batches(reference, other, sum(total.values()), sum(wanted.values()))
        return samples
    if total == Counter({sample: round(count * times) for sample, count in wanted.items()}):
        return samples  # ranks of one tensor-parallel group have the same samples
    if (padded := _match_without_padding(reference, other, step)) is not None:
        return padded
    _describe_mismatch(reference, other, step, wanted, sum(found.values(), Counter()), found, samples)
    return samples


def _describe_mismatch(
    reference: Run,
    other: Run,
    step: int,
    wanted: Counter[str],
    total: Counter[str],
    found: dict[int, Counter[str]],
    samples: StepSamples,
) -> None:
    layout = other.layout
    share = sum(wanted.values())
    model = layout.size("tp") * layout.size("cp")
    own = sum(total.values()) // model
    missing = sum(1 for sample in wanted if sample not in total)
    strange = sum(1 for sample in total if sample not in wanted)
    fewer = not strange and missing == share - len(total) and len(total) == sum(total.values())
    if own != share and step == 0 and (fewer or (strange and not missing)):
        samples.error = _unequal_batches(reference, other, own, share)
        return
    least = min((total[sample] for sample in total if sample in wanted), default=1)
    twice = sum(1 for sample, count in total.items() if count > max(least, model))
    alike = _ranks_with_equal_samples(found)
    parts = []
    if missing:
        parts.append(f"{missing} of {len(wanted)} samples are missing")
    if strange:
        parts.append(f"{strange} are there that the reference has not in this step")
    if twice:
        parts.append(f"{twice} come more than once")
    if alike and model == 1:
        parts.append(f"{ranks_text(alike)} have the same samples")
    for rank, seen in found.items():
        again = [
            earlier
            for earlier in range(step)
            if Counter(chain.from_iterable(sample_hashes(other, earlier, rank))) == seen
        ]
        if strange and seen and again:
            parts.append(f"rank {rank} has its samples of step {again[0] + 1} again: is set_epoch called there?")
    if model > 1 and strange:
        parts.append(f"ranks of a group of {model} that share a model have to have the same samples")
    samples.finding = Finding(layout.name, step + 1, "data", "data", "; ".join(parts) or "the samples are others")


def _unequal_batches(reference: Run, other: Run, own: int, share: int) -> str:
    return (
        f"a step of {other.layout.name} has {own} samples, and one of {reference.layout.name} has {share}: choose "
        "layouts whose ranks × batch × accumulate are the same"
    )


def _ranks_with_equal_samples(found: dict[int, Counter[str]]) -> list[int]:
    """The first ranks that have the same samples."""
    for rank, own in found.items():
        same = [other for other, its in found.items() if its == own]
        if len(same) > 1 and own:
            return [r for r in same if r >= rank]
    return []


def _match_parts(reference: Run, other: Run, step: int, samples: StepSamples) -> StepSamples:
    """Rows that are a part of the reference's rows, as under context parallelism: found by their tokens."""
    layout = other.layout.name
    wholes: list[tuple[RowPosition, torch.Tensor]] = []
    for rank in range(reference.layout.ranks):
        for number, tokens in _token_hashes(reference, step, rank).items():
            wholes += [(RowPosition(number, row), own) for row, own in enumerate(tokens)]
    length = len(wholes[0][1]) if wholes else 0
    if any(len(own) != length for _, own in wholes):
        return samples
    table = torch.stack([own for _, own in wholes])  # [rows, s]
    covered = torch.zeros_like(table)
    complete = True
    for rank in range(other.layout.ranks):
        own_tokens = _token_hashes(other, step, rank)
        own = [(number, row, one) for number, tokens in own_tokens.items() for row, one in enumerate(tokens)]
        places = _place_rows([one for _, _, one in own], table, covered)
        if places is None:
            complete = False
            continue
        for (number, row, _), (whole, tokens) in zip(own, places, strict=True):
            at = wholes[whole][0]
            samples.places[rank, number, row] = RowPosition(at.micro_batch, at.row, tokens, length)
            covered[whole, tokens] += 1
    if samples.places and (not complete or len(covered.unique()) != 1):
        samples.finding = Finding(
            layout, step + 1, "data", "data",
            "the ranks' parts of the samples do not make the reference's samples: tokens are missing or come twice",
        )  # fmt: skip
    elif not samples.places and any(any(sample_hashes(other, step, rank)) for rank in range(other.layout.ranks)):
        samples.finding = Finding(layout, step + 1, "data", "data", "no sample is one of the reference's in this step")
    return samples


def _match_without_padding(reference: Run, other: Run, step: int) -> StepSamples | None:
    """Rows matched by what is left of them without padding, which fills them up to the longest of their micro-batch.

    Padding is one value at the rows' ends, or at their beginnings, without which both runs have the same rows. None
    where there is no such value, or rows are as long in all micro-batches, so that none is needed.
    """
    theirs, own = (_rows_of(run, step) for run in (reference, other))
    if len({len(row.tokens) for rows in (theirs, own) for row in rows}) < 2:
        return None
    for at, side in ((-1, "end"), (0, "beginning")):
        for value in sorted({row.tokens[at] for rows in (theirs, own) for row in rows if row.tokens}):
            bare = [[_stripped(row.tokens, value, at) for row in rows] for rows in (theirs, own)]
            wanted, found = (Counter(rows) for rows in bare)
            times = sum(found.values()) / sum(wanted.values())
            if found != Counter({tokens: round(count * times) for tokens, count in wanted.items()}):
                continue
            where = dict(zip(bare[0], theirs, strict=True))
            samples = StepSamples(note=f"samples are compared without their padding, {value} at the {side} of rows")
            for row, tokens in zip(own, bare[1], strict=True):
                its = where[tokens]
                least, length = min(len(row.tokens), len(its.tokens)), len(its.tokens)
                seen = torch.arange(least) if side == "end" else torch.arange(length - least, length)
                samples.places[row.rank, row.micro_batch, row.number] = RowPosition(
                    its.micro_batch, its.number, seen, length
                )
            return samples
    return None


class _Row(NamedTuple):
    """A row of samples: hashes of its tokens, and where it is."""

    rank: int
    micro_batch: int
    number: int
    tokens: tuple[int, ...]


def _rows_of(run: Run, step: int) -> list[_Row]:
    """All rows of samples of a step."""
    found = []
    for rank in range(run.layout.ranks):
        kept = [bool(micro) for micro in sample_hashes(run, step, rank)]
        for number, tokens in _token_hashes(run, step, rank).items():
            if kept[number]:
                found += [_Row(rank, number, row, tuple(one)) for row, one in enumerate(tokens.tolist())]
    return found


def _stripped(tokens: tuple[int, ...], value: int, at: int) -> tuple[int, ...]:
    """Tokens without all of one value at their end (-1), or at their beginning (0)."""
    begin, end = 0, len(tokens)
    while begin < end and tokens[begin if at == 0 else end - 1] == value:
        begin, end = (begin + 1, end) if at == 0 else (begin, end - 1)
    return tokens[begin:end]


def _place_rows(
    own: list[torch.Tensor], table: torch.Tensor, covered: torch.Tensor
) -> list[tuple[int, torch.Tensor]] | None:
    """Of each of a rank's rows the whole row and the places in it, the same places for all; None where there are none.

    Where several places would do, those that other ranks have least.
    """
    if not own or any(len(one) != len(own[0]) for one in own) or not 0 < len(own[0]) <= table.shape[1]:
        return None
    best, least = None, float("inf")
    for places in _candidate_positions(len(own[0]), table.shape[1]):
        at: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(table[:, places].tolist()):
            at.setdefault(tuple(row), []).append(number)
        if not all(tuple(one.tolist()) in at for one in own):
            continue
        counts = covered[:, places].sum(1).tolist()
        chosen: list[tuple[int, torch.Tensor]] = []
        load = 0
        for one in own:
            number = min(at[tuple(one.tolist())], key=lambda n: counts[n])
            load += counts[number]
            counts[number] += len(places)
            chosen.append((number, places))
        if load < least:
            best, least = chosen, load
    return best


def _candidate_positions(length: int, whole: int) -> Iterator[torch.Tensor]:
    """Places that a part may have: one block, at a multiple of its length first, or two halves of one, as in zigzag."""
    begins = [*range(0, whole - length + 1, length), *(b for b in range(whole - length + 1) if b % length)]
    for begin in begins:
        yield torch.arange(begin, begin + length)
    if length % 2 == 0:
        half = length // 2
        for first in range(0, whole - half + 1, half):
            for second in range(0, whole - half + 1, half):
                if second not in (first, first + half):
                    yield torch.cat([torch.arange(first, first + half), torch.arange(second, second + half)])


def _token_hashes(run: Run, step: int, rank: int) -> dict[int, torch.Tensor]:
    """Hashes of tokens of each micro-batch. [b, s]"""
    tensors = run.tensors(step, rank, "input")
    found = {}
    for number, micro in enumerate(run.records[rank].steps[step].micro_batches):
        if micro.names:
            found[number] = tensors[f"{number}/{micro.names[0]}"]
    return found


Samples = Counter[str]
#: What is said of samples that are in no step of the undisturbed run, as far as it was seen.
STRANGE = "are there that none of these steps should have"


def samples_by_step(run: Run) -> list[Samples]:
    """Of each step the samples of all ranks, by their hashes.

    Beside ranks with samples, activations are none. Where all want a gradient (a script may ask for one), all are.
    """
    found = []
    for step in range(min(len(record.steps) for record in run.records)):
        micros = [micro for record in run.records for micro in record.steps[step].micro_batches]
        samples = [micro for micro in micros if not micro.activations] or micros
        found.append(Counter(sample for micro in samples for sample in micro.samples))
    return found


def samples_difference(reference: Sequence[Samples], resumed: Sequence[Samples], begin: int) -> tuple[str, int]:
    """What is wrong with the samples of a run that goes on behind ``begin`` steps, empty if nothing; and since when.

    Ranks that share samples, as those of a tensor-parallel group, may be more or fewer than in the reference.
    """
    wanted = list(reference[begin:])
    steps = min(len(wanted), len(resumed))
    own = [_divide_by_copies(resumed[number], wanted[number]) for number in range(steps)]
    first = next((number for number in range(steps) if own[number] != wanted[number]), None)
    if first is None:
        return "", 0
    if moved := _shift_text(reference, own, begin):
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


def ranks_difference(reference: Run, resumed: Run, begin: int) -> tuple[str, int]:
    """What is wrong with who trains on which sample, where the samples of all ranks together are right; since when.

    For runs in one layout that repeat themselves to the last bit: which rank has a sample changes its dropout mask, the
    order in which gradients are added, and what its batch norm sees.
    """
    steps = min(min(len(record.steps) for record in resumed.records), len(reference.records[0].steps) - begin)
    for step in range(steps):
        for theirs, ours in zip(reference.records, resumed.records, strict=True):
            wanted, own = _samples_in_order(theirs, begin + step), _samples_in_order(ours, step)
            if wanted != own and Counter(wanted) == Counter(own):
                return f"rank {theirs.rank} has its samples of step {begin + step + 1} in another order", begin + step
            if wanted != own:
                return f"from step {begin + step + 1} on ranks train on samples that others had", begin + step
    return "", 0


def _samples_in_order(record: RankRecord, step: int) -> list[str]:
    micros = [micro for micro in record.steps[step].micro_batches if not micro.activations]
    return [sample for micro in micros for sample in micro.samples]


def _divide_by_copies(own: Samples, wanted: Samples) -> Samples:
    """Samples as if each were on as many ranks as in the reference."""
    times = sum(own.values()) / max(1, sum(wanted.values()))
    copies = round(times) if times > 1 else 1
    if copies > 1 and all(count % copies == 0 for count in own.values()):
        return Counter({sample: count // copies for sample, count in own.items()})
    return own


def _shift_text(reference: Sequence[Samples], own: Sequence[Samples], begin: int) -> str:
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
