"""The text that this page's model reads, and the published trainings of models with experts."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from pardemo import headlines, project
from pardemo.planner.layouts.published import loaders
from pardemo.planner.layouts.published.runs import PublishedRun


class Text(NamedTuple):
    """A text whose tokens are its characters.

    Attributes:
        numbers: [characters], each one's place in ``letters``. letters: the most frequent first.
    """

    numbers: torch.Tensor
    letters: list[str]

    def batches(self, steps: int, samples: int, length: int, seed: int = 0) -> Iterator[torch.Tensor]:
        """``steps`` batches [samples, length + 1] from places that the seed chooses."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            begins = torch.randint(len(self.numbers) - length - 1, (samples,), generator=generator)
            yield torch.stack([self.numbers[begin : begin + length + 1] for begin in begins.tolist()])


def news(rows: int = 2000) -> Text:
    """Short news in Chinese, as the chapters on Baichuan2 train on: some 80 characters each."""
    train, _ = headlines.corpus(train=rows, test=10)
    text = "\n".join(row["input"] for row in train)
    counts: dict[str, int] = {}
    for letter in text:
        counts[letter] = counts.get(letter, 0) + 1
    letters = sorted(counts, key=lambda letter: (-counts[letter], letter))
    places = {letter: index for index, letter in enumerate(letters)}
    return Text(torch.tensor([places[letter] for letter in text]), letters)


def published_experts(release: str, gpus: tuple[str, ...]) -> dict[str, PublishedRun]:
    """NVIDIA's trainings of DeepSeek-V3 and GPT-OSS with Megatron-core, by a name of two lines.

    Args:
        release: of NeMo, as the table heads it. gpus: those whose rows are taken.
    """
    names = {"deepseek-v3": "DeepSeek-V3", "gpt-oss-120b": "GPT-OSS 120B"}
    rows = loaders.read(project.root() / "data" / "published_runs" / "megatron_bridge.csv")
    return {
        f"{names[run.job.shape.name]},\n{run.job.machine.gpus} {run.job.machine.gpu.name}": run
        for run in rows
        if run.source.endswith(f", {release}") and run.job.shape.name in names and run.job.machine.gpu.name in gpus
    }
