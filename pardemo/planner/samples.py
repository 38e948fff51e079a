"""A dry run with any number of samples: what is of each sample, and what is there whatever their number."""

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
    """A job's events: the change in bytes of storage ``who`` is ``kept`` + samples × ``of_each``.

    The rest is as in :class:`~pardemo.planner.footprint.Footprint`.
    """

    job: RankJob
    sizes: dict[str, tuple[int, bool]]
    counts: Counts
    marks: list[tuple[str, int]]
    lives: list[Life] = field(repr=False)
    line_of: Any = field(repr=False)
    who: np.ndarray = field(repr=False)
    kept: np.ndarray = field(repr=False)
    of_each: np.ndarray = field(repr=False)
    built: int
    first: int

    @classmethod
    def of(cls, found: Footprint) -> "AnyBatch":
        """From a dry run with so many samples, a prime, that their multiples are sizes of samples."""
        who, nbytes = found.changes.T
        kept, of_each = split(of_samples(int(one), found.job.batch) for one in nbytes)
        marks = [(name, place + found.first_event) for name, place in found.phases]
        return cls(found.job, found.sizes, counts_of(found), marks, found.lives, found.line_of, who, kept, of_each,
                   found.built, found.first_event)  # fmt: skip

    def footprint(self, samples: int) -> Footprint:
        """With so many samples."""
        changes = np.stack([self.who, self.kept + samples * self.of_each], 1)
        most = np.bincount(self.who, np.maximum(changes[:, 1], 0), len(self.lives)).astype(np.int64)
        lives = [life.again() for life in self.lives]
        for life, nbytes in zip(lives, most.tolist(), strict=True):
            life.nbytes = nbytes
        counts: dict[str, Any] = {
            kind: {name: kept + samples * of_each for name, (kept, of_each) in named.items()}
            for kind, named in self.counts.items()
        }
        counts["traffic_of_samples"] = {name: samples * one for name, (_, one) in self.counts["traffic"].items()}
        counts["step_traffic"] = counts["step_traffic"]["step"]
        return Footprint.from_events(
            self.job.but(batch=samples), self.sizes, counts, self.marks, lives, self.line_of, changes, self.built,
            self.first,
        )  # fmt: skip


def of_samples(nbytes: int, samples: int) -> tuple[int, bool]:
    """(bytes, whether they are of one sample)."""
    return (nbytes // samples, True) if nbytes % samples == 0 else (nbytes, False)


def split(sizes: Iterable[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes whatever the samples, and of each sample."""
    told = np.array(list(sizes), np.int64).reshape(-1, 2)
    return told[:, 0] * (1 - told[:, 1]), told[:, 0] * told[:, 1]


def counts_of(found: Footprint) -> Counts:
    """What was counted with so many samples, a prime."""

    def parted(value: int) -> tuple[int, int]:
        nbytes, scaled = of_samples(value, samples)
        return (0, nbytes) if scaled else (nbytes, 0)

    samples, grows = found.job.batch, found.traffic_of_samples
    return {
        "flops": {name: parted(value) for name, value in found.flops.items()},
        "traffic": {name: (v - grows.get(name, 0), grows.get(name, 0) // samples) for name, v in found.traffic.items()},
        "step_traffic": {"step": (found.step_traffic, 0)},
        "kernels": {name: (value, 0) for name, value in found.kernels.items()},
        "sent": {name: (value, 0) for name, value in found.sent.items()},
    }
