"""The order in which samples are seen: the same on every number of ranks, and after a resume."""

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class Order(Sampler[int]):
    """A permutation of the samples per epoch that depends on the seed and the epoch alone.

    With ``lengths``, what is computed at the same time has like length, so that little is padding and ranks wait little
    for one another: samples are shuffled, each ``WINDOW`` steps of them sorted by length and cut into steps, and the
    steps shuffled. Within a step the longest come first: batches are dealt to the ranks in turn.

    Args:
        count: samples.
        step: samples of an optimizer step, over all ranks and micro-batches.
        lengths: tokens of each sample; None for a plain shuffle.
    """

    WINDOW = 50

    def __init__(self, count: int, step: int, seed: int, lengths: Sequence[int] | None = None):
        self._count, self._step, self._seed, self._lengths = count, step, seed, lengths
        self._epoch = 0

    def __len__(self) -> int:
        return self._count

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        shuffled = torch.randperm(self._count, generator=generator).tolist()
        if self._lengths is None:
            return iter(shuffled)
        steps, size = [], self._step * self.WINDOW
        for at in range(0, self._count, size):
            window = sorted(shuffled[at : at + size], key=lambda i: -self._lengths[i])
            steps += [window[i : i + self._step] for i in range(0, len(window), self._step)]
        # a last step that is not full stays last: steps of whole batches would begin in the middle of another
        last = [steps.pop()] if steps and len(steps[-1]) < self._step else []
        mixed = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        return iter([i for step in mixed + last for i in step])
