"""Rows of instruction, input and output as token numbers with labels: encoded, cut, packed, ordered, in batches."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from pardemo import headlines
from pardemo.baichuan2 import Baichuan2Tokenizer

IGNORED = -100  # cross-entropy's own mark of a position without a label


def prompt_of(row: Mapping[str, Any]) -> str:
    """Returns the user's turn: the instruction, which ends its own line, and the input.

    (The article's tool put one more line end between the two.)
    """
    return row["instruction"] + row["input"]


def source_ids(row: Mapping[str, Any], tokenizer: Baichuan2Tokenizer) -> list[int]:
    """Token numbers of a row's prompt in the official layout: the user's piece, the text, the assistant's piece.

    Behind what was said before, where the row is of a conversation; none for a row of plain text.
    """
    if row.get("plain"):
        return []
    return tokenizer.prompt_ids([*row.get("history", ()), {"role": "user", "content": prompt_of(row)}])


def encode(row: Mapping[str, Any], tokenizer: Baichuan2Tokenizer, cutoff_len: int) -> dict[str, list[int]]:
    """``input_ids`` and ``labels`` of a row: the prompt without labels, then the output and EOS with them.

    What is longer than ``cutoff_len`` is cut as the article's tool cut it: prompt and target both keep their heads, in
    proportion to their lengths. So a cut sample has lost its EOS and the assistant's piece.
    """
    source = source_ids(row, tokenizer)
    target = [*tokenizer.text_ids(row["output"]), tokenizer.eos_token_id]
    total = len(source) + len(target)
    if total > cutoff_len:
        source, target = (part[: cutoff_len * len(part) // total] for part in (source, target))
    # nothing predicts a first token; in a packed row the sample before would have to
    return _item(source + target, max(len(source), 1))


def _item(ids: list[int], first_label: int) -> dict[str, list[int]]:
    return {"input_ids": ids, "labels": [IGNORED] * min(first_label, len(ids)) + ids[first_label:]}


class Samples(Dataset):
    """Encoded samples, or rows of several packed ones; an item holds ``input_ids`` and ``labels``, as lists.

    Items of packed rows have ``position_ids`` too, which begin again at 0 with each sample: the model keeps samples
    apart by that. Token numbers lie in arrays, so that 80,000 samples take 4 bytes a token on each rank.

    Args:
        ids: of each sample, [tokens].
        first_labels: the tokens at the beginning of each that have no label.
        cut: how many were longer than ``cutoff_len``.
        rows: the samples of each packed row, by number; None where every sample is a row of its own.
    """

    def __init__(
        self,
        ids: Sequence[np.ndarray],
        first_labels: Sequence[int],
        cut: int,
        cutoff_len: int,
        rows: list[list[int]] | None = None,
    ):
        self._ids, self._first_labels, self._rows = ids, first_labels, rows
        self.cut, self.cutoff_len = cut, cutoff_len

    @classmethod
    def read(
        cls, path: str | Path, tokenizer: Baichuan2Tokenizer, cutoff_len: int, limit: int | None = None
    ) -> "Samples":
        """The rows of a file, or the first ``limit``. Raises what :func:`pardemo.headlines.read` and :meth:`of` do."""
        return cls.of(headlines.read(path)[:limit], tokenizer, cutoff_len)

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, str]], tokenizer: Baichuan2Tokenizer, cutoff_len: int) -> "Samples":
        """Rows in memory.

        Raises:
            ValueError: ``cutoff_len`` is so small that no label is left.
        """
        ids, first_labels, cut = [], [], 0
        for row in rows:
            sample = encode(row, tokenizer, cutoff_len)
            ids.append(np.array(sample["input_ids"], np.int32))
            first_labels.append(sample["labels"].count(IGNORED))
            cut += sample["input_ids"][-1:] != [tokenizer.eos_token_id]
        samples = cls(ids, first_labels, cut, cutoff_len)
        if not samples.labelled_tokens:
            raise ValueError(f"cutoff_len {cutoff_len} leaves no sample a label")
        return samples

    def __len__(self) -> int:
        return len(self._ids if self._rows is None else self._rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        if self._rows is None:
            return _item(self._ids[index].tolist(), self._first_labels[index])
        parts = [_item(self._ids[number].tolist(), self._first_labels[number]) for number in self._rows[index]]
        item = {key: [value for part in parts for value in part[key]] for key in ("input_ids", "labels")}
        return item | {"position_ids": [position for part in parts for position in range(len(part["input_ids"]))]}

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item."""
        sizes = [len(ids) for ids in self._ids]
        return sizes if self._rows is None else [sum(sizes[number] for number in row) for row in self._rows]

    @property
    def tokens(self) -> int:
        """Tokens of all samples, padding not counted."""
        return sum(self.lengths)

    @property
    def labelled_tokens(self) -> int:
        """Tokens that are trained on: outputs and their EOS."""
        return self.tokens - sum(self._first_labels)

    @property
    def report(self) -> str:
        """Summarizes the samples in a line."""
        unlabelled = sum(len(ids) == first for ids, first in zip(self._ids, self._first_labels, strict=True))
        text = f"{len(self._ids):,} samples, {self.tokens:,} tokens, {self.labelled_tokens:,} of them labels"
        if self.cut:
            text += f"; {self.cut:,} were longer than {self.cutoff_len:,} tokens and cut"
        return text + (f", {unlabelled:,} of them to no label at all" if unlabelled else "")


def pack(samples: Samples, length: int) -> Samples:
    """Several samples in each row of at most ``length`` tokens: the longest first, each where it leaves least room.

    Best fit decreasing needs at most 11/9 of the fewest rows and one more (Johnson 1974). The same samples always give
    the same rows.

    Raises:
        ValueError: a sample is longer than ``length``.
    """
    sizes = samples.lengths
    if max(sizes) > length:
        raise ValueError(f"a sample of {max(sizes)} tokens does not fit into rows of {length}")
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # room left and row, in order
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        fitting = bisect_left(open_rows, (sizes[number], 0))
        room, row = open_rows.pop(fitting) if fitting < len(open_rows) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(number)
        if room > sizes[number]:
            insort(open_rows, (room - sizes[number], row))
    return Samples(samples._ids, samples._first_labels, samples.cut, samples.cutoff_len, rows)


class Order(Sampler[int]):
    """A permutation of the samples per epoch that depends on the seed and the epoch alone.

    So it is the same on every number of ranks, and after a resume. With ``lengths``, what is computed at the same time
    has like length, so that little is padding and ranks wait little for one another: samples are shuffled, each
    ``WINDOW`` steps of them sorted by length and cut into steps, and the steps shuffled. Within a step the longest come
    first: batches are dealt to the ranks in turn.

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
        if (lengths := self._lengths) is None:
            return iter(shuffled)
        steps, size = [], self._step * self.WINDOW
        for begin in range(0, self._count, size):
            window = sorted(shuffled[begin : begin + size], key=lambda i: -lengths[i])
            steps += [window[i : i + self._step] for i in range(0, len(window), self._step)]
        # a last step that is not full stays last: steps of whole batches would begin in the middle of another
        last = [steps.pop()] if steps and len(steps[-1]) < self._step else []
        mixed = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
        return iter([i for step in mixed + last for i in step])


class Collator:
    """Items to a batch of tensors [b, s], padded at the right to the longest item, rounded up to ``multiple``.

    There is no attention mask: causal attention hides what lies to the right, and one pattern serves the whole batch.
    ``position_ids`` are there for packed rows only; each padding position begins anew at 0, a sample of its own.
    """

    def __init__(self, pad_id: int, multiple: int = 1):
        self.fills = {"input_ids": pad_id, "labels": IGNORED, "position_ids": 0}
        self.multiple = multiple

    def __call__(self, items: Sequence[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
        longest = max(len(item["input_ids"]) for item in items)
        width = -(-longest // self.multiple) * self.multiple
        return {
            key: torch.tensor([item[key] + [fill] * (width - len(item[key])) for item in items])
            for key, fill in self.fills.items()
            if key in items[0]
        }
