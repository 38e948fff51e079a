"""Pretrains the tiny Baichuan2 in ``data/`` on generated news: the 13B's architecture at three million parameters.

    python tests/tiny_model.py --out data/tiny-baichuan2

What it has read: 20,000 bodies of the generated news and their headlines in plain style, as plain text, and nothing
else. A page is a body and its headline, in either order: so it can go on from a body and a line's end with a headline.
What the fine-tune asks for it has not read: a prompt, a section's name before the headline, the figure before the rest;
nor any row of the fine-tune's files, which are of another seed. In most pages characters of the headline are exchanged
for others, in the body alike: so few kinds of event would otherwise be learned by heart, and what a large model has
from its many texts, to copy a word that it never saw, would not. For the same end a token is one character, alike
wherever a word stands, and between the pages are lines of random characters written twice, whose second half nothing
but copying predicts. Of few characters, those of headlines, copying is learned sooner; a second, shorter round takes
all that the corpus has. None of the events and patterns that only test rows have is among the pages. On one machine the
same command gives the same bytes (40 minutes on two cores): the folder in ``data/`` is what it gave, and gave again.
"""

import argparse
import io
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pardemo import extras, headlines
from pardemo.headlines import grammar

if TYPE_CHECKING:  # the command reads its options before it loads torch and Transformers
    import torch

    from pardemo.baichuan2 import Baichuan2ForCausalLM, Baichuan2Tokenizer

VOCABULARY = 1536  # at most: bytes, and the characters of the corpus
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,  # no power of two: ALiBi's slopes in between
    "model_max_length": 512,
}
ROW, BATCH = 256, 16  # tokens of a row of packed pages, rows of a step
PEAK_LR, SECOND_PEAK_LR, WARM_UP = 2e-3, 1e-3, 100
EXCHANGED, BODY_FIRST = 0.7, 0.8  # shares of the pages
LINES = 0.35  # random lines written twice, to a page


def train_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY, longest: int = 16) -> bytes:
    """A SentencePiece model with Baichuan2's rules: BPE, byte fallback, digits split, no dummy prefix.

    ``longest`` is a piece's most characters. The tiny model's have one: with more, a word that never was in training
    falls into other pieces in the body than in the headline, according to what stands beside it, and is not copied.
    """
    with extras.needed_by(__name__):
        import sentencepiece

    from pardemo.baichuan2.tokenization import ASSISTANT, USER

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocabulary,
        byte_fallback=True,
        split_digits=True,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        character_coverage=1.0,
        user_defined_symbols=[USER, ASSISTANT, "\n"],
        max_sentencepiece_length=longest,
        hard_vocab_limit=longest > 1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def pages(rows: Sequence[dict[str, str]], seed: int, fields: Sequence[str] = ("output",)) -> Iterator[str]:
    """Body and headline of each row as one text, in either order, and lines written twice; without end, shuffled.

    Args:
        fields: of the rows, whose characters lines are made of and others are exchanged for.
    """
    chance, order = random.Random(seed), list(rows)
    characters = sorted({c for row in rows for field in fields for c in row[field] if _is_word(c)})
    while True:
        chance.shuffle(order)
        for row in order:
            if chance.random() < LINES:
                line = "".join(chance.choices(characters, k=chance.randint(8, 32)))
                yield f"{line}\n{line}"
            parts = [row["input"], row["output"]]
            if chance.random() < EXCHANGED:
                table = _exchange(row["output"], characters, chance)
                parts = [part.translate(table) for part in parts]
            yield "\n".join(parts if chance.random() < BODY_FIRST else reversed(parts))


def _exchange(headline: str, characters: Sequence[str], chance: random.Random) -> dict[int, str]:
    """Other characters for a random share of the headline's own."""
    share = chance.uniform(0.3, 1.0)
    own = [c for c in dict.fromkeys(headline) if _is_word(c) and chance.random() < share]
    return dict(zip(map(ord, own), chance.sample(characters, len(own)), strict=True))


def _is_word(character: str) -> bool:
    """Chinese characters but for those that go with numbers, which tell where a figure is."""
    return "\u4e00" <= character <= "\u9fff" and character not in "万亿元成千百"


def batches(texts: Iterator[str], tokenizer: "Baichuan2Tokenizer") -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Packed rows of token numbers [BATCH, ROW], and positions, which begin again with each page."""
    import torch

    ids: list[int] = []
    positions: list[int] = []
    for text in texts:
        page = [*tokenizer.text_ids(text), tokenizer.eos_token_id]
        ids += page
        positions += range(len(page))
        if len(ids) >= ROW * BATCH:
            cut = ROW * BATCH
            yield torch.tensor(ids[:cut]).view(BATCH, ROW), torch.tensor(positions[:cut]).view(BATCH, ROW)
            ids, positions = ids[cut:], positions[cut:]


def pretrain(
    model: "Baichuan2ForCausalLM", batches: Iterator[tuple["torch.Tensor", "torch.Tensor"]], steps: int, peak_lr: float
) -> float:
    """Next-token prediction for ``steps`` steps in bf16 autocast; returns the mean loss of the last tenth."""
    import torch

    from pardemo.world import bf16

    bf16.through_fp32_where_slow()
    optimizer = torch.optim.AdamW(model.parameters(), peak_lr, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    model.train()
    losses, began = [], time.perf_counter()
    for step, (ids, positions) in zip(range(steps), batches, strict=False):
        with torch.autocast("cpu", torch.bfloat16):
            labels = ids.masked_fill(positions == 0, -100)  # nothing before it predicts a page's first token
            loss = model(ids, position_ids=positions, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 50 == 0:
            rate = (step + 1) * ROW * BATCH / (time.perf_counter() - began)
            print(f"step {step}/{steps}  loss {losses[-1]:.3f}  {rate:,.0f} tokens/s", flush=True)
    last = losses[-max(1, steps // 10) :]
    return sum(last) / len(last)


def build(folder: str | Path, count: int = 20_000, steps: int = 4000, seed: int = grammar.PRETRAINED) -> float:
    """Tokenizer and model into ``folder``, which is replaced when all is done; returns the last loss.

    Args:
        count: rows of the generated corpus. steps: of the first round; the second has a fifth.
    """
    import torch

    from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer
    from pardemo.baichuan2.checkpoints import save_into, write_folder

    rows, _ = headlines.corpus(train=count, test=1000, seed=seed, style="plain")
    serialized = train_tokenizer([text for row in rows for text in (row["input"], row["output"])], longest=1)
    losses = []

    def fill(part: Path) -> None:
        (part / "tokenizer.model").write_bytes(serialized)
        tokenizer = Baichuan2Tokenizer(str(part / "tokenizer.model"))
        torch.manual_seed(seed)
        model = Baichuan2ForCausalLM(Baichuan2Config(vocab_size=tokenizer.vocab_size, **SIZES))
        pretrain(model, batches(pages(rows, seed), tokenizer), steps, PEAK_LR)
        model.to(torch.bfloat16).float()  # as if the first round had been saved
        second = batches(pages(rows, seed + 1, ("input", "output")), tokenizer)
        losses.append(pretrain(model, second, max(1, steps // 5), SECOND_PEAK_LR))
        save_into(model.to(torch.bfloat16), tokenizer, part)

    write_folder(folder, fill)
    return losses[0]


def _rate(step: int, steps: int) -> float:
    """Warm-up, then a cosine down to a twentieth."""
    return min(1, (step + 1) / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="DIR")
    arguments = parser.parse_args(argv)
    print(f"loss {build(arguments.out):.4f}; written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
