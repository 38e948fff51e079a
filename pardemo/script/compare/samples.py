"""Checks that all ranks together have the reference's samples, none twice, none missing, also after a resume."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import eq
from typing import Any, NamedTuple

import torch

from pardemo.script.compare.differences import Finding
from pardemo.script.compare.runs import ProveError, Run
from pardemo.script.compare.step_pair import StepPair
from pardemo.script.record.rank_record import RankRecord
from pardemo.script.words import count_text
from pardemo.world.errors import ranks_text


@dataclass(frozen=True)
class RowPosition:
    """A row's position in the reference: micro-batch, row, and its tokens' positions (None for all of them).

    ``length``: tokens of the whole row, where a part of it is meant.
    """

    micro_batch: int
    row: int
    tokens: torch.Tensor | None = None
    length: int = 0


@dataclass
class StepSamples:
    """A layout's samples of a step, matched with the reference's.

    ``positions``: of rank, micro-batch and row. None are those of a pipeline's later stages, which get activations.
    """

    positions: dict[tuple[int, int, int], RowPosition] = field(default_factory=dict)
    finding: Finding | None = None
    note: str = ""


def match_samples(step_pair: StepPair) -> StepSamples:
    """Matches a layout's samples of a step with the reference's.

    Raises:
        ProveError: the global batches have different sizes.
    """
    reference, step = step_pair.reference.run, step_pair.step
    samples = _match(_rows_of(reference, step), _rows_of(step_pair.other, step), step_pair)
    if reference.layout.ranks == 1:
        _place_later_modules(step_pair, samples)
    return samples


class _Row(NamedTuple):
    """A row of samples: where it is, its hash, and hashes of its tokens."""

    rank: int
    micro_batch: int
    number: int
    hash: str
    tokens: torch.Tensor

    @property
    def position(self) -> tuple[int, int, int]:
        return self.rank, self.micro_batch, self.number


def _rows_of(run: Run, step: int) -> list[_Row]:
    """Returns all rows of samples of a step, or of the activations that a later pipeline stage gets.

    None of a module's that a rank runs behind others, as a script does that calls a model's layers one by one: what
    goes in there is rounded otherwise in each layout.
    """
    rows = []
    for rank, record in enumerate(run.records):
        micros, tensors = record.steps[step].micro_batches, run.tensors(step, rank, "input")
        begins = any(micro.samples and not micro.activations for micro in micros)
        for number, micro in enumerate(micros):
            if micro.samples and not (begins and micro.activations):
                tokens = tensors[f"{number}/{micro.names[0]}"]
                rows += [
                    _Row(rank, number, row, *pair) for row, pair in enumerate(zip(micro.samples, tokens, strict=True))
                ]
    return rows


def _match(expected: list[_Row], candidate: list[_Row], step_pair: StepPair) -> StepSamples:
    at = {row.hash: RowPosition(row.micro_batch, row.number) for row in reversed(expected)}
    samples = StepSamples({row.position: at[row.hash] for row in candidate if row.hash in at})
    wanted = Counter(row.hash for row in expected)
    if not expected:
        return samples
    if not samples.positions:
        return _match_without_padding(expected, candidate) or _match_parts(expected, candidate, step_pair)
    # others are activations, for a later stage, or a module's that is run by itself; without stages all are samples
    micros = {row.position[:2] for row in candidate if row.hash in at}
    if step_pair.other.layout.size("pp") == 1:
        records = [record.micro_batches for record in step_pair.records]
        micros |= {row.position[:2] for row in candidate if not records[row.rank][row.micro_batch].activations}
    total = Counter(row.hash for row in candidate if row.position[:2] in micros)
    first = step_pair.step == 0
    if total.total() < len(expected) and first and total.keys() == wanted.keys():  # all alike, and fewer of them
        raise _unequal_batches(step_pair, total.total(), len(expected))
    if _is_multiple(total, wanted):
        return samples  # ranks of one tensor-parallel group have the same samples
    if (padded := _match_without_padding(expected, candidate)) is not None:
        return padded
    return _describe_mismatch(wanted, candidate, step_pair, samples)


def _is_multiple(samples: Counter[Any], wanted: Counter[Any]) -> bool:
    """Whether each of the wanted is there, all of them equally often, and nothing else."""
    times = samples.total() / wanted.total()
    return samples == Counter({sample: round(count * times) for sample, count in wanted.items()})


def _place_later_modules(step_pair: StepPair, samples: StepSamples) -> None:
    """Places rows of modules that ranks run after others as those of the module that got as many samples."""
    reference = step_pair.reference_record.micro_batches
    for rank, record in enumerate(step_pair.records):
        begin = -1
        for number, micro in enumerate(record.micro_batches):
            if not micro.activations:
                begin = number
            for row in range(len(micro.samples)) if micro.activations else ():
                first = samples.positions.get((rank, begin, row))
                at = first.micro_batch + number - begin if first else len(reference)
                if (
                    first
                    and at < len(reference)
                    and reference[at].activations
                    and first.row < len(reference[at].samples)
                ):
                    samples.positions.setdefault((rank, number, row), replace(first, micro_batch=at))


def _describe_mismatch(
    wanted: Counter[str], candidate: list[_Row], step_pair: StepPair, samples: StepSamples
) -> StepSamples:
    """Says in a sentence which samples are missing, are others', or are there more than once."""
    _, other, step = step_pair
    layout, total = other.layout, Counter(row.hash for row in candidate)
    model = layout.size("tp") * layout.size("cp")
    count, share = total.total() // model, wanted.total()
    missing, strange = len(wanted.keys() - total.keys()), len(total.keys() - wanted.keys())
    fewer = not strange and missing == share - len(total) and len(total) == total.total()
    if count != share and step == 0 and (fewer or (strange and not missing)):
        raise _unequal_batches(step_pair, count, share)
    least = min((total[sample] for sample in total if sample in wanted), default=1)
    twice = sum(times > max(least, model) for times in total.values())
    by_rank = [_by_rank(candidate, rank) for rank in range(layout.ranks)]
    groups = [[rank for rank, held in enumerate(by_rank) if held == drawn] for drawn in by_rank if drawn]
    alike = next((group for group in groups if len(group) > 1), [])
    parts = []
    if missing:
        parts.append(f"{missing} of {len(wanted)} samples are missing")
    if strange:
        parts.append(f"{strange} are there that the reference has not in this step")
    if twice:
        parts.append(f"{twice} come more than once")
    if alike and model == 1:
        parts.append(f"{ranks_text(alike)} have the same samples")
    for rank, drawn in enumerate(by_rank) if strange else ():
        before = (at for at in range(step) if drawn and _by_rank(_rows_of(other, at), rank) == drawn)
        if (again := next(before, None)) is not None:
            parts.append(f"rank {rank} has its samples of step {again + 1} again: is set_epoch called there?")
    if model > 1 and strange:
        parts.append(f"ranks of a group of {model} that share a model have to have the same samples")
    return replace(samples, finding=_finding(step_pair, "; ".join(parts) or "the samples are others"))


def _by_rank(rows: list[_Row], rank: int) -> Counter[str]:
    return Counter(row.hash for row in rows if row.rank == rank)


def _finding(step_pair: StepPair, why: str) -> Finding:
    return step_pair.finding("data", "data", why)


def _unequal_batches(step_pair: StepPair, count: int, share: int) -> ProveError:
    reference, other = step_pair.reference.run, step_pair.other
    return ProveError(
        f"a step of {other.layout.name} has {count} samples, and one of {reference.layout.name} has {share}: choose "
        "layouts whose ranks × batch × accumulate are the same"
    )


def _match_parts(expected: list[_Row], candidate: list[_Row], step_pair: StepPair) -> StepSamples:
    """Matches rows that are a part of the reference's, as under context parallelism, by their tokens."""
    samples, length = StepSamples(), len(expected[0].tokens)
    unlike = [len({len(row.tokens) for row in rows}) > 1 for rows in (expected, candidate)]
    if unlike[0] or (unlike[1] and len(candidate) != len(expected)):  # padded rows are as many as samples
        return _match_packed(expected, candidate)
    table = torch.stack([row.tokens for row in expected])  # [rows, s]
    covered = torch.zeros_like(table)
    complete = True
    for rank in range(step_pair.other.layout.ranks):
        rows = [row for row in candidate if row.rank == rank]
        positions = _place_rows([row.tokens for row in rows], table, covered)
        complete &= positions is not None
        for row, (at, tokens) in zip(rows, positions or (), strict=False):
            samples.positions[row.position] = RowPosition(expected[at].micro_batch, expected[at].number, tokens, length)
            covered[at, tokens] += 1
    if samples.positions and (not complete or len(covered.unique()) != 1):
        why = "the ranks' parts of the samples do not make the reference's samples: tokens are missing or come twice"
        samples.finding = _finding(step_pair, why)
    elif not samples.positions and candidate:
        samples.finding = _finding(step_pair, "no sample is one of the reference's in this step")
    return samples


def _match_packed(expected: list[_Row], candidate: list[_Row]) -> StepSamples:
    """Matches rows of unlike lengths, each a block of one of the reference's: samples of a micro-batch in one row."""
    samples, free = StepSamples(), [torch.ones(len(row.tokens), dtype=torch.bool) for row in expected]
    for row, (match, unused) in product(candidate, zip(expected, free, strict=True)):
        size = len(row.tokens)
        begins = (match.tokens == row.tokens[0]).nonzero().reshape(-1).tolist() if size else []
        blocks = (torch.arange(begin, begin + size) for begin in begins if begin + size <= len(unused))
        block = next((at for at in blocks if unused[at].all() and torch.equal(match.tokens[at], row.tokens)), None)
        if block is not None and row.position not in samples.positions:
            unused[block] = False
            samples.positions[row.position] = RowPosition(match.micro_batch, match.number, block, len(unused))
    if len(samples.positions) == len(candidate) and not any(bool(unused.any()) for unused in free):
        return samples
    return StepSamples(note="samples are not compared: rows are as long as what is packed into them")


def _match_without_padding(expected: list[_Row], candidate: list[_Row]) -> StepSamples | None:
    """Matches rows without their padding, which fills them up to the longest row of their micro-batch.

    Padding is one value at the rows' ends, or at their beginnings, without which both runs have the same rows. None
    where there is no such value, or rows are as long in all micro-batches, so that none is needed.
    """
    tokens = [[tuple(row.tokens.tolist()) for row in rows] for rows in (expected, candidate)]
    if len({len(row) for rows in tokens for row in rows}) < 2:
        return None
    for at, side in ((-1, "end"), (0, "beginning")):
        for value in sorted({row[at] for rows in tokens for row in rows if row}):
            bare = [[_stripped(row, value, at) for row in rows] for rows in tokens]
            if not _is_multiple(Counter(bare[1]), Counter(bare[0])):
                continue
            by_tokens = dict(zip(bare[0], expected, strict=True))
            samples = StepSamples(note=f"samples are compared without their padding, {value} at the {side} of rows")
            for row, stripped in zip(candidate, bare[1], strict=True):
                match = by_tokens[stripped]
                least, length = min(len(row.tokens), len(match.tokens)), len(match.tokens)
                seen = torch.arange(least) if side == "end" else torch.arange(length - least, length)
                samples.positions[row.position] = RowPosition(match.micro_batch, match.number, seen, length)
            return samples
    return None


def _stripped(tokens: tuple[int, ...], value: int, at: int) -> tuple[int, ...]:
    """Returns tokens without all of one value at their end (-1), or at their beginning (0)."""
    kept = [index for index, token in enumerate(tokens) if token != value]
    return () if not kept else tokens[kept[0] :] if at == 0 else tokens[: kept[-1] + 1]


def _place_rows(
    rows: list[torch.Tensor], table: torch.Tensor, covered: torch.Tensor
) -> list[tuple[int, torch.Tensor]] | None:
    """Finds for each of a rank's rows the whole row and the positions in it, the same for all; None without any.

    Where several positions would do, those that other ranks have least.
    """
    if not rows or any(len(row) != len(rows[0]) for row in rows) or not 0 < len(rows[0]) <= table.shape[1]:
        return None
    best, least = None, float("inf")
    for positions in _candidate_positions(len(rows[0]), table.shape[1]):
        at: dict[tuple[int, ...], list[int]] = {}
        for number, row in enumerate(table[:, positions].tolist()):
            at.setdefault(tuple(row), []).append(number)
        if not all(tuple(row.tolist()) in at for row in rows):
            continue
        counts = covered[:, positions].sum(1).tolist()
        chosen: list[tuple[int, torch.Tensor]] = []
        load = 0
        for values in rows:
            number = min(at[tuple(values.tolist())], key=lambda n: counts[n])
            load += counts[number]
            counts[number] += len(positions)
            chosen.append((number, positions))
        if load < least:
            best, least = chosen, load
    return best


def _candidate_positions(length: int, total: int) -> Iterator[torch.Tensor]:
    """Yields a part's possible positions: one block, at multiples of its length first, or two halves, as in zigzag."""
    begins = [*range(0, total - length + 1, length), *(b for b in range(total - length + 1) if b % length)]
    for begin in begins:
        yield torch.arange(begin, begin + length)
    if length % 2 == 0:
        half = length // 2
        for first in range(0, total - half + 1, half):
            for second in range(0, total - half + 1, half):
                if second not in (first, first + half):
                    yield torch.cat([torch.arange(first, first + half), torch.arange(second, second + half)])


Samples = Counter[str]
#: What is said of samples that are in no step of the undisturbed run, as far as it was seen.
STRANGE = "are there that none of these steps should have"


def samples_by_step(run: Run) -> list[Samples]:
    """Returns each step's samples of all ranks, as hashes.

    Beside ranks with samples, activations are none. Where all want a gradient (a script may ask for one), all are.
    """
    by_step = []
    for step in range(min(len(record.steps) for record in run.records)):
        micros = [micro for record in run.records for micro in record.steps[step].micro_batches]
        samples = [micro for micro in micros if not micro.activations] or micros
        by_step.append(Counter(sample for micro in samples for sample in micro.samples))
    return by_step


def samples_difference(reference: Sequence[Samples], resumed: Sequence[Samples], begin: int) -> tuple[str, int]:
    """Says what is wrong with the samples of a run that goes on after ``begin`` steps, if anything, and since when.

    Ranks that share samples, as those of a tensor-parallel group, may be more or fewer than in the reference.
    """
    wanted = list(reference[begin:])
    steps = min(len(wanted), len(resumed))
    got = [_divide_by_copies(resumed[number], wanted[number]) for number in range(steps)]
    first = next((number for number in range(steps) if got[number] != wanted[number]), None)
    if first is None:
        return "", 0
    if moved := _shift_text(reference, got, begin):
        return moved, begin
    before, due = sum(reference[:begin], Counter()), sum(wanted[:steps], Counter())
    came = sum(got, Counter())
    missing, extra = due - came, came - due
    again = (extra & before).total()
    strange = extra.total() - again
    number, share = missing.total(), due.total()
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
    """Says which rank trains on a wrong sample, where the samples of all ranks together are right; and since when.

    For runs in one layout that repeat themselves to the last bit: which rank has a sample changes its dropout mask, the
    order in which gradients are added, and what its batch norm sees.
    """
    steps = min(min(len(record.steps) for record in resumed.records), len(reference.records[0].steps) - begin)
    for step, (expected, candidate) in product(range(steps), zip(reference.records, resumed.records, strict=True)):
        wanted, got = _samples_in_order(expected, begin + step), _samples_in_order(candidate, step)
        if wanted != got and Counter(wanted) == Counter(got):
            return f"rank {expected.rank} has its samples of step {begin + step + 1} in another order", begin + step
        if wanted != got:
            return f"from step {begin + step + 1} on ranks train on samples that others had", begin + step
    return "", 0


def _samples_in_order(record: RankRecord, step: int) -> list[str]:
    micros = [micro for micro in record.steps[step].micro_batches if not micro.activations]
    return [sample for micro in micros for sample in micro.samples]


def _divide_by_copies(samples: Samples, wanted: Samples) -> Samples:
    """Returns samples as if each were on as many ranks as in the reference."""
    times = samples.total() / max(1, wanted.total())
    copies = round(times) if times > 1 else 1
    if copies > 1 and all(count % copies == 0 for count in samples.values()):
        return Counter({sample: count // copies for sample, count in samples.items()})
    return samples


def steps_away(
    candidate: Sequence[Any], reference: Sequence[Any], begin: int, least: int, same: Callable[[Any, Any], bool] = eq
) -> int:
    """Returns by how many steps a run is away from step ``begin`` of the reference; 0 where it is not, or elsewhere.

    ``least``: steps that have to be the same before anything is said.
    """
    for first in range(len(reference)):
        pairs = list(zip(candidate, reference[first:], strict=False))
        if first != begin and len(pairs) >= least and all(same(a, b) for a, b in pairs):
            return first - begin
    return 0


def _shift_text(reference: Sequence[Samples], candidate: Sequence[Samples], begin: int) -> str:
    """Whether each step has the samples of another one, always as many steps away; one step alone says nothing."""
    away = steps_away(candidate, reference, begin, 2)
    number = sum(step.total() for step in reference[min(begin, begin + away) : max(begin, begin + away)])
    if away > 0:
        return f"the samples of {count_text(away, 'step')}, {number} of them, are left out: no step trains on them"
    if away and begin + away == 0:
        return f"the sampler begins anew: {number} samples that were trained on before the stop come again"
    return f"the samples of {count_text(-away, 'step')} before come again, {number} of them" if away else ""
