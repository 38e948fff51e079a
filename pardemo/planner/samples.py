"""A dry run with any number of samples: the bytes of each sample, and the bytes that do not depend on their number."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pardemo.planner.footprint import Footprint
from pardemo.planner.job import RankJob
from pardemo.planner.records import Life

#: Counted things by kind and name: (whatever the samples, of each sample).
Counts = dict[str, dict[str, tuple[int, int]]]


@dataclass
class AnyBatch:
    """A job's events: the change in bytes of storage ``who`` is ``constant`` + samples × ``of_each``.

    The rest is as in :class:`~pardemo.planner.footprint.Footprint`.
    """

    job: RankJob
    sizes: dict[str, tuple[int, bool]]
    counts: Counts
    marks: list[tuple[str, int]]
    lives: list[Life] = field(repr=False)
    line_of: Any = field(repr=False)
    who: np.ndarray = field(repr=False)
    constant: np.ndarray = field(repr=False)
    of_each: np.ndarray = field(repr=False)
    built: int
    first: int

    @classmethod
    def of(cls, footprint: Footprint) -> "AnyBatch":
        """From a dry run whose number of samples is a large prime: sizes that are its multiples are of samples."""
        who, nbytes = footprint.changes.T
        constant, of_each = split(of_samples(int(change), footprint.job.batch) for change in nbytes)
        marks = [(name, place + footprint.first_event) for name, place in footprint.phases]
        return cls(footprint.job, footprint.sizes, counts_of(footprint), marks, footprint.lives, footprint.line_of, who,
                   constant, of_each, footprint.built, footprint.first_event)  # fmt: skip

    def footprint(self, samples: int) -> Footprint:
        """The footprint with so many samples."""
        changes = np.stack([self.who, self.constant + samples * self.of_each], 1)
        most = np.bincount(self.who, np.maximum(changes[:, 1], 0), len(self.lives)).astype(np.int64)
        lives = [life.again() for life in self.lives]
        for life, nbytes in zip(lives, most.tolist(), strict=True):
            life.nbytes = nbytes
        counts: dict[str, Any] = {
            kind: {name: constant + samples * of_each for name, (constant, of_each) in named.items()}
            for kind, named in self.counts.items()
        }
        counts["traffic_of_samples"] = {name: samples * each for name, (_, each) in self.counts["traffic"].items()}
        counts["step_traffic"] = counts["step_traffic"]["step"]
        return Footprint.from_events(
            self.job.but(batch=samples), self.sizes, counts, self.marks, lives, self.line_of, changes, self.built,
            self.first,
        )  # fmt: skip


def of_samples(nbytes: int, samples: int) -> tuple[int, bool]:
    """(bytes, whether they are of one sample)."""
    return (nbytes // samples, True) if nbytes % samples == 0 else (nbytes, False)


def split(sizes: Iterable[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that do not depend on the samples, and bytes of each sample."""
    pairs = np.array(list(sizes), np.int64).reshape(-1, 2)
    return pairs[:, 0] * (1 - pairs[:, 1]), pairs[:, 0] * pairs[:, 1]


def counts_of(footprint: Footprint) -> Counts:
    """The counts of such a dry run: (what does not depend on the samples, what each sample adds)."""

    def parted(value: int) -> tuple[int, int]:
        nbytes, scaled = of_samples(value, samples)
        return (0, nbytes) if scaled else (nbytes, 0)

    samples, grows = footprint.job.batch, footprint.traffic_of_samples
    return {
        "flops": {name: parted(value) for name, value in footprint.flops.items()},
        "traffic": {
            name: (v - grows.get(name, 0), grows.get(name, 0) // samples) for name, v in footprint.traffic.items()
        },
        "step_traffic": {"step": (footprint.step_traffic, 0)},
        "kernels": {name: (value, 0) for name, value in footprint.kernels.items()},
        "sent": {name: (value, 0) for name, value in footprint.sent.items()},
    }
