"""From what happens with few layers and with one more to what happens with many: the layer that was added, repeated.

A dry run is a list of events, in sections. The lists of two runs are laid side by side; what the deeper one has more is
a block, which has to be the repetition of the block before it. Which storage an event is about is learned from two
neighbouring copies: a block's events point to storages of their own copy, of the copy before it, or, in a backward
pass, of the copy that lies as far from the end.

Whatever does not look like that is refused, by :class:`Irregular`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


class Irregular(Exception):
    """The runs do not show what more layers would do."""


@dataclass
class MemoryEvent:
    """A storage grows, is made, or shrinks. ``look`` is what events of other layers have in common with it.

    ``size`` is (bytes, whether they are of one sample); ``number`` of the layer in the module's name, if it has one.
    """

    look: tuple
    life: int
    size: tuple[int, bool]
    number: int | None
    source: object = None  # whatever the caller wants back
    when: int | None = None


@dataclass(eq=False)
class Region:
    """Copies of a block: ``copies`` of ``length`` events from ``start`` on in a section of the deeper run.

    ``pairs``: for each event of the block, a copy that with the next one shows how it goes on, and whether what it is
    about is one copy further in the next (1) or one less (-1).
    """

    section: int
    start: int
    length: int
    copies: int
    pairs: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Position:
    """A place in a run: an event of a section, or of a copy of a region."""

    section: int
    place: int
    region: Region | None = None
    copy: int = 0

    @property
    def spot(self) -> tuple:
        """The place without the number of the copy."""
        return (self.section, self.place, id(self.region))


def insertions(few: Sequence[int], many: Sequence[int]) -> list[tuple[int, int]]:
    """(first, length) of what ``many`` has more than ``few``."""
    a, b = np.asarray(few), np.asarray(many)
    blocks, i, j = [], 0, 0
    while True:
        same = _alike(a[i:], b[j:])
        i, j = i + same, j + same
        left = (len(b) - j) - (len(a) - i)
        if i == len(a):
            return [*blocks, (j, left)] if left else blocks  # a region without its own repetition is refused later
        if left <= 0:
            raise Irregular("the deeper run lacks something")
        # a repetition of what comes before it, behind which the two go on alike for as long as may be
        again = [n for n in range(1, min(left, j) + 1) if np.array_equal(b[j - n : j], b[j : j + n])]
        length = max(again, key=lambda n: _alike(a[i:], b[j + n :]), default=0)
        if not length or not _alike(a[i:], b[j + length :]):
            raise Irregular("a layer that is like no other")
        blocks.append((j, length))
        j += length


def _numbered(few: list[MemoryEvent], many: list[MemoryEvent], sizes: bool) -> tuple[list[int], list[int]]:
    """Each event as the number of its look; with ``sizes`` those in both runs are told apart by these too."""
    numbers: dict[tuple, int] = {}
    both = {(event.look, event.size) for event in few} & {(event.look, event.size) for event in many} if sizes else ()

    def number(event: MemoryEvent) -> int:
        look = (event.look, event.size)
        return numbers.setdefault(look if look in both else (event.look, None), len(numbers))

    return [number(event) for event in few], [number(event) for event in many]


def _alike(a: np.ndarray, b: np.ndarray) -> int:
    """How many elements are equal from the beginning on."""
    most = min(len(a), len(b))
    differ = np.flatnonzero(a[:most] != b[:most])
    return int(differ[0]) if len(differ) else most


class Stretch:
    """What two runs, of ``layers - 1`` and of ``layers`` layers, say of any larger number."""

    def __init__(self, few: list[list[MemoryEvent]], many: list[list[MemoryEvent]]):
        if len(few) != len(many):
            raise Irregular("different phases")
        self.few, self.many = few, many
        self.regions: list[list[Region]] = []
        for number, (a, b) in enumerate(zip(few, many, strict=True)):
            self.regions.append(self._regions(number, a, b))
        self._of_many = {id(e): w for e, w in self._places(many, None)}
        self._of_few = {id(e): w for e, w in self._places(few, 1)}
        self._births_many = self._births(many, self._of_many)
        self._births_few = self._births(few, self._of_few)
        self._fellows = {(*w.spot, w.copy): e for e, w in self._places(few, 1)}
        for regions in self.regions:
            for region in regions:
                region.pairs = [self._pair(region, offset) for offset in range(region.length)]

    def _regions(self, number: int, a: list[MemoryEvent], b: list[MemoryEvent]) -> list[Region]:
        try:
            return self._spans(number, *_numbered(a, b, sizes=True))
        except Irregular:  # a size that another number of layers has for something else may mislead
            return self._spans(number, *_numbered(a, b, sizes=False))

    @staticmethod
    def _spans(number: int, few: list[int], many: list[int]) -> list[Region]:
        tokens, regions, end = np.asarray(many), [], 0
        for first, length in insertions(few, many):
            block, start, stop = tokens[first : first + length], first, first + length
            while start - length >= end and np.array_equal(tokens[start - length : start], block):
                start -= length
            while stop + length <= len(tokens) and np.array_equal(tokens[stop : stop + length], block):
                stop += length
            region = Region(number, start, length, (stop - start) // length)
            if region.copies < 2:
                raise Irregular("a layer that is like no other")
            regions.append(region)
            end = stop
        return regions

    def _places(self, sections: list[list[MemoryEvent]], fewer: int | None):
        """Each event and where it is, in the coordinates of the deeper run."""
        for number, events in enumerate(sections):
            regions = self.regions[number]
            shift = 0
            spans = []
            for region in regions:
                copies = region.copies - (fewer or 0)
                begin = region.start - shift
                spans.append((begin, begin + copies * region.length, region, shift))
                shift += region.length * (fewer or 0)
            for place, event in enumerate(events):
                moved = 0
                for begin, stop, region, _ in spans:
                    if begin <= place < stop:
                        copy, offset = divmod(place - begin, region.length)
                        yield event, Position(number, offset, region, copy)
                        break
                    if place >= stop:
                        moved += region.length * (fewer or 0)
                else:
                    yield event, Position(number, place + moved)

    @staticmethod
    def _births(sections: list[list[MemoryEvent]], places: dict[int, Position]) -> dict[int, Position]:
        births: dict[int, Position] = {}
        for events in sections:
            for event in events:
                births.setdefault(event.life, places[id(event)])
        return births

    def _pair(self, region: Region, offset: int) -> tuple[int, int]:
        """Two neighbouring copies in which an event is about neighbouring copies of the same; best in the middle."""
        middle = (region.copies - 1) // 2
        for copy in sorted(range(region.copies - 1), key=lambda copy: abs(copy - middle)):
            first, second = (self._at(region, copy + more, offset) for more in (0, 1))
            birth, next_birth = self._births_many[first.life], self._births_many[second.life]
            step, up = next_birth.copy - birth.copy, 1
            if first.number is not None and second.number is not None:
                up = second.number - first.number
            if (
                birth.region
                and birth.spot == next_birth.spot
                and {abs(step), abs(up)} == {1}
                and first.size == second.size
            ):
                return copy, step
        raise Irregular("layers that are not alike")

    def _at(self, region: Region, copy: int, offset: int) -> MemoryEvent:
        return self.many[region.section][region.start + copy * region.length + offset]

    def events(self, more: int):
        """With ``more`` layers than the deeper run: (section, storage, size, the event it is like, layer's number)."""
        self._more, self._lives = more, {}
        for number, events in enumerate(self.many):
            place = 0
            for region in self.regions[number]:
                for event in events[place : region.start]:
                    yield number, *self._static(event)
                yield from ((number, *repeated) for repeated in self._repeated(region))
                place = region.start + region.copies * region.length
            for event in events[place:]:
                yield number, *self._static(event)

    def _static(self, event: MemoryEvent):
        return self._as_in_both(event, self._fellows[(*self._of_many[id(event)].spot, 0)], True)

    def _as_in_both(self, event: MemoryEvent, fellow: MemoryEvent, once: bool):
        """What both runs have: about something that is as far from the beginning in them, or as far from the end."""
        more, birth, fellow_birth = self._more, self._births_many[event.life], self._births_few[fellow.life]
        (now, scaled), (before, other) = event.size, fellow.size
        if scaled != other or event.look != fellow.look or (now != before and (scaled or not once)):
            raise Irregular("a storage whose size depends on layers and samples")
        step = birth.copy - fellow_birth.copy
        if birth.spot != fellow_birth.spot or step not in (0, 1):
            raise Irregular("an event about one thing and another")
        number = event.number
        if number is not None:
            number += (number - fellow.number) * more
        return self._life((*birth.spot, birth.copy + step * more)), (now + (now - before) * more, scaled), event, number

    def _repeated(self, region: Region):
        more = self._more
        for copy in range(region.copies + more):
            for offset, (pair, step) in enumerate(region.pairs):
                shift = copy - pair
                if 0 < shift <= more:
                    yield self._between(region, offset, pair, step, shift)
                    continue
                mine, theirs = (copy, copy) if shift <= 0 else (copy - more, copy - more - 1)
                fellow = self._fellows[region.section, offset, id(region), theirs]
                yield self._as_in_both(self._at(region, mine, offset), fellow, False)

    def _between(self, region: Region, offset: int, pair: int, step: int, shift: int):
        """Of a copy that neither run has, ``shift`` behind one that shows how it goes on."""
        event, next_event = (self._at(region, pair + n, offset) for n in (0, 1))
        birth, number = self._births_many[event.life], event.number
        if number is not None:
            number += shift if next_event.number > number else self._more - shift
        about = birth.copy + (shift if step == 1 else self._more - shift)
        return self._life((*birth.spot, about)), event.size, event, number

    def _life(self, coordinate: tuple) -> int:
        return self._lives.setdefault(coordinate, len(self._lives))
