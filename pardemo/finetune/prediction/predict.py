"""Predictions for every row of a file: batches of like length, dealt to the ranks, put in the file's order."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from pardemo import project
from pardemo.baichuan2 import Baichuan2Tokenizer, load_tokenizer, read_config
from pardemo.baichuan2.checkpoints import find_shards
from pardemo.finetune import metrics, models
from pardemo.finetune.prediction import decoding, predictions
from pardemo.finetune.recipes.recipe import locate
from pardemo.finetune.recipes.recipe_schema import Predict, Recipe
from pardemo.finetune.samples import prompt_of, source_ids
from pardemo.world import World
from pardemo.world.rank import device

Order = Literal["length", "file"]
RESULTS = "predict_results.json"
DAY_S = 86_400.0
_PROGRESS_EVERY_S = 10.0


@dataclass(frozen=True)
class Predictions:
    """What was generated, in the order of the rows.

    Attributes:
        tokens: of each row, without EOS. texts: the same, decoded.
        cut: prompts that were too long.
        steps: batches, those that ranks ran side by side counted once.
        seconds: of the generation alone, on the slowest rank.
    """

    tokens: list[list[int]]
    texts: list[str]
    cut: int
    steps: int
    seconds: float


def predict(
    rows: Sequence[Mapping[str, str]],
    model: Any,
    tokenizer: Baichuan2Tokenizer,
    settings: Predict,
    seed: int = 0,
    order: Order = "length",
    as_text: bool = False,
) -> Predictions:
    """Predictions in this process.

    Greedy they are the same for every batch size, order and number of ranks; sampled too, since each row draws its own
    random numbers from ``seed`` and its place in the file. (As far as rounding allows: a product over another batch may
    differ in its last bits, which in bf16 can turn a close decision.)

    Args:
        rows: with instruction and input.
        model: Baichuan2, with or without an adapter, in evaluation mode.
        order: batches of like length, the longest first (``"length"``), or as the rows come (``"file"``).
        as_text: no instruction and no roles: the model goes on from the input and a line's end, as pretraining left
            it. So a base model is asked in a form that it knows.

    Raises:
        ValueError: no row; ``max_new_tokens`` leaves no room for a prompt; see :func:`~.decoding.steps`.
    """
    prompts, cut = prompts_of(rows, tokenizer, model.config.model_max_length, settings, as_text)
    batches = batches_of([len(prompt) for prompt in prompts], settings.batch, order)
    tokens_of_row, seconds = _generate(prompts, batches, model, tokenizer.eos_token_id, settings, seed)
    return _in_order(tokens_of_row, tokenizer, cut, len(batches), seconds)


def predict_on(
    world: World,
    recipe: Recipe,
    adapter: str | Path | None,
    rows: Sequence[Mapping[str, str]],
    order: Order = "length",
    timeout_s: float = DAY_S,
    as_text: bool = False,
) -> Predictions:
    """:func:`predict` on the ranks of a World: each loads the recipe's model, and the adapter, from their folders.

    Raises:
        FileNotFoundError, ValueError: what of the model's and the adapter's folders can be seen before they are loaded.
        RankError: a rank failed, died or took longer than ``timeout_s``; nothing of the others is given out then.
    """
    tokenizer = check(recipe, adapter)
    context = read_config(locate(recipe.model.path)).model_max_length
    prompts, cut = prompts_of(rows, tokenizer, context, recipe.predict, as_text)
    lengths = [len(prompt) for prompt in prompts]
    # few rows are spread over all ranks rather than put into one rank's full batch
    size = min(recipe.predict.batch, -(-len(rows) // world.size))
    shares = deal(batches_of(lengths, size, order), lengths, world.size)
    parts = world.run(_share, recipe, adapter, prompts, shares, tokenizer.eos_token_id, timeout_s=timeout_s)
    tokens_of_row = {row: tokens for part, _ in parts for row, tokens in part.items()}
    return _in_order(tokens_of_row, tokenizer, cut, max(map(len, shares)), max(seconds for _, seconds in parts))


def check(recipe: Recipe, adapter: str | Path | None) -> Baichuan2Tokenizer:
    """Raises, before any rank starts, for folders that are not there or not whole; returns the tokenizer."""
    folder = locate(recipe.model.path)
    _room(read_config(folder).model_max_length, recipe.predict)
    if recipe.model.init == "pretrained":
        find_shards(folder)
    if adapter is not None:
        models.check_adapter(adapter)
    return load_tokenizer(folder)


def prompts_of(
    rows: Sequence[Mapping[str, str]],
    tokenizer: Baichuan2Tokenizer,
    context: int,
    settings: Predict,
    as_text: bool = False,
) -> tuple[list[list[int]], int]:
    """Each row's prompt, cut to its head where ``context`` has no room for it and the answer, and how many were cut."""
    if not rows:
        raise ValueError("there is no row to predict")
    room = _room(context, settings)
    prompts = [tokenizer.text_ids(_text_of(row)) if as_text else source_ids(row, tokenizer) for row in rows]
    return [prompt[:room] for prompt in prompts], sum(len(prompt) > room for prompt in prompts)


def _text_of(row: Mapping[str, Any]) -> str:
    return row["input"] + "\n"


def _room(context: int, settings: Predict) -> int:
    """Tokens that a prompt may have."""
    if settings.max_new_tokens >= context:
        raise ValueError(
            f"predict.max_new_tokens is {settings.max_new_tokens}, which leaves no room for a prompt in the model's "
            f"{context} tokens"
        )
    return context - settings.max_new_tokens


def batches_of(lengths: Sequence[int], size: int, order: Order) -> list[list[int]]:
    """Rows, by number, in batches of ``size``: those of like length together, the longest first; or as they come."""
    if order not in ("length", "file"):
        raise ValueError(f"order is 'length' or 'file', not {order!r}")
    rows = list(range(len(lengths)))
    if order == "length":
        rows.sort(key=lambda row: -lengths[row])  # what memory does not suffice for fails at once
    return [rows[begin : begin + size] for begin in range(0, len(rows), size)]


def deal(batches: Sequence[list[int]], lengths: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Each rank's batches: one after the other to the rank that has the fewest padded prompt tokens by then."""
    shares: list[list[list[int]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for batch in batches:
        rank = loads.index(min(loads))
        shares[rank].append(batch)
        loads[rank] += len(batch) * max(lengths[row] for row in batch)
    return shares


def save(
    folder: str | Path, rows: Sequence[Mapping[str, Any]], generated: Predictions, as_text: bool = False
) -> dict[str, Any]:
    """Writes ``generated_predictions.jsonl`` and ``predict_results.json`` into ``folder``; returns the latter.

    That is the article's: scores as ``predict_bleu-4`` …, and run-time figures; beside them intervals and counts.
    """
    folder = Path(folder)
    scores = metrics.score(generated.texts, [row["output"] for row in rows])
    results = {f"predict_{name}": scores[name] for name in metrics.NAMES}
    results |= metrics.runtime_figures(len(rows), generated.steps, generated.seconds)
    results |= {"samples": len(rows), "cut_prompts": generated.cut, "intervals": scores["intervals"]}
    lines = [
        {
            "prompt": _text_of(row) if as_text else prompt_of(row),
            "label": row["output"],
            "predict": text,
            "source": row.get("source", ""),
        }
        for row, text in zip(rows, generated.texts, strict=True)
    ]
    (folder / RESULTS).unlink(missing_ok=True)  # results of other predictions must not stand beside these
    predictions.write(folder / predictions.FILE_NAME, lines)
    project.write_json(folder / RESULTS, results)
    return results


def _share(
    recipe: Recipe, adapter: str | Path | None, prompts: list[list[int]], shares: list[list[list[int]]], eos: int
) -> tuple[dict[int, list[int]], float]:
    """On every rank: tokens of its rows, by number, and the seconds it took."""
    model, _ = models.base(recipe, device())
    if adapter is not None:
        model = models.with_adapter(model, adapter)
    dist.barrier()
    batches, progress = shares[dist.get_rank()], _ProgressLine() if dist.get_rank() == 0 else None
    return _generate(prompts, batches, model.eval(), eos, recipe.predict, recipe.train.seed, progress)


def _generate(
    prompts: Sequence[list[int]],
    batches: Sequence[list[int]],
    model: Any,
    eos: int,
    settings: Predict,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[int, list[int]], float]:
    begin, tokens_of_row = time.perf_counter(), {}
    for batch in batches:
        draws = [np.random.default_rng([seed, row]) for row in batch]
        texts: list[list[int]] = [[] for _ in batch]
        for step in decoding.steps(model, [prompts[row] for row in batch], settings, eos, draws):
            for place, token in step:
                texts[place].append(token)
        tokens_of_row.update(zip(batch, texts, strict=True))
        if progress is not None:
            progress(len(tokens_of_row), sum(map(len, batches)))
    return tokens_of_row, time.perf_counter() - begin


class _ProgressLine:
    """Prints how many rows of a long run are done, every ten seconds at most."""

    def __init__(self):
        self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.last > _PROGRESS_EVERY_S:
            self.last = time.monotonic()
            print(f"{done:,} of this rank's {total:,} rows", file=sys.stderr, flush=True)


def _in_order(
    tokens_of_row: Mapping[int, list[int]], tokenizer: Baichuan2Tokenizer, cut: int, steps: int, seconds: float
) -> Predictions:
    tokens = [tokens_of_row[row] for row in range(len(tokens_of_row))]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    return Predictions(tokens, texts, cut, steps, seconds)
