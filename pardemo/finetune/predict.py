"""Answers of a model: for every row of a file, in batches dealt to the ranks, or in a conversation.

The generation loop is not ``transformers.generate``, for three reasons: each row draws from random numbers of its own,
so that what it becomes does not depend on which others share its batch; a row that has ended costs nothing more; and
nothing of a folder's ``generation_config.json`` (repetition_penalty 1.05, top_k 5 …) leaks into greedy decoding. Greedy
tokens are those of ``generate``: a test compares them.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

from pardemo import extras, project

with extras.needed_by(__name__):
    from transformers import DynamicCache, PreTrainedModel

from pardemo.baichuan2 import Baichuan2Tokenizer, load_tokenizer, read_config
from pardemo.baichuan2.checkpoints import find_shards
from pardemo.finetune import metrics, models
from pardemo.finetune.recipe import Predict, Recipe, locate
from pardemo.finetune.samples import prompt_of, source_ids
from pardemo.headlines.rows import scan
from pardemo.world import World
from pardemo.world.rank import device

Order = Literal["length", "file"]
ROWS, RESULTS = "generated_predictions.jsonl", "predict_results.json"
DAY_S = 86_400.0
_PROGRESS_EVERY_S = 10.0
_NAMED = 3  # bad lines named in one error


@dataclass(frozen=True)
class Predictions:
    """Generated answers, in the order of the rows.

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


def predict_on(
    world: World,
    recipe: Recipe,
    adapter: str | Path | None,
    rows: Sequence[Mapping[str, str]],
    order: Order = "length",
    timeout_s: float = DAY_S,
    as_text: bool = False,
) -> Predictions:
    """Predictions by the ranks of a World: each loads the recipe's model, and the adapter, from their folders.

    Greedy they are the same for every batch size, order and number of ranks; sampled too, since each row draws its own
    random numbers from the recipe's seed and its place in the file. (As far as rounding allows: a product over another
    batch may differ in its last bits, which in bf16 can turn a close decision.)

    Args:
        rows: with instruction and input.
        order: batches of like length, the longest first (``"length"``), or as the rows come (``"file"``).
        as_text: no instruction and no roles: the model goes on from the input and a line's end, as pretraining left
            it. So a base model is asked in a form that it knows.

    Raises:
        FileNotFoundError, ValueError: what of the model's and the adapter's folders can be seen before they are loaded;
            no row; ``max_new_tokens`` leaves no room for a prompt.
        RankError: a rank failed, died or took longer than ``timeout_s``; nothing of the others is given out then.
    """
    tokenizer, settings = check_folders(recipe, adapter), recipe.predict
    context = read_config(locate(recipe.model.path)).model_max_length
    prompts, cut = prompts_of(rows, tokenizer, context, settings, as_text)
    lengths = [len(prompt) for prompt in prompts]
    # few rows are spread over all ranks rather than put into one rank's full batch
    size = min(settings.batch, -(-len(rows) // world.size))
    shares = deal(batches_of(lengths, size, order), lengths, world.size)
    parts = world.run(_share, recipe, adapter, prompts, shares, tokenizer.eos_token_id, timeout_s=timeout_s)
    of_row = {row: tokens for part, _ in parts for row, tokens in part.items()}
    tokens = [of_row[row] for row in range(len(rows))]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    return Predictions(tokens, texts, cut, max(map(len, shares)), max(seconds for _, seconds in parts))


def check_folders(recipe: Recipe, adapter: str | Path | None) -> Baichuan2Tokenizer:
    """Raises, before any rank starts, for folders that are not there or not whole; returns the tokenizer."""
    folder = locate(recipe.model.path)
    _room(read_config(folder).model_max_length, recipe.predict)
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
        raise ValueError(f"predict.max_new_tokens is {settings.max_new_tokens}, which leaves no room for a prompt in "
                         f"the model's {context} tokens")  # fmt: skip
    return context - settings.max_new_tokens


def batches_of(lengths: Sequence[int], size: int, order: Order) -> list[list[int]]:
    """Rows, by number, in batches of ``size``: those of like length together, the longest first; or as they come."""
    # by length the longest first: what memory does not suffice for fails at once
    rows = sorted(range(len(lengths)), key=lambda row: -lengths[row] if order == "length" else row)
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


def _share(
    recipe: Recipe, adapter: str | Path | None, prompts: list[list[int]], shares: list[list[list[int]]], eos: int
) -> tuple[dict[int, list[int]], float]:
    """On every rank: tokens of its rows, by number, and the seconds it took."""
    model, _ = models.base(recipe, device())
    if adapter is not None:
        model = models.with_adapter(model, adapter)
    dist.barrier()
    rank = dist.get_rank()
    return generate(model.eval(), prompts, shares[rank], recipe.predict, eos, recipe.train.seed, shows=rank == 0)


def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    batches: Sequence[list[int]],
    settings: Predict,
    eos: int,
    seed: int,
    shows: bool = False,
) -> tuple[dict[int, list[int]], float]:
    """In this process: the answer's tokens by the prompt's number, for all of ``batches``, and the seconds.

    Args:
        shows: print how many rows of a long run are done, every ten seconds at most.
    """
    begin = shown = time.perf_counter()
    tokens: dict[int, list[int]] = {}
    for batch in batches:
        draws = [np.random.default_rng([seed, row]) for row in batch]
        tokens |= {row: [] for row in batch}
        for step in steps(model, [prompts[row] for row in batch], settings, eos, draws):
            for number, token in step:
                tokens[batch[number]].append(token)
        if shows and time.perf_counter() - shown > _PROGRESS_EVERY_S:
            shown = time.perf_counter()
            print(f"{len(tokens):,} of this rank's {sum(map(len, batches)):,} rows", file=sys.stderr, flush=True)
    return tokens, time.perf_counter() - begin


@torch.inference_mode()
def steps(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: Predict,
    eos: int,
    draws: Sequence[np.random.Generator],
) -> Iterator[list[tuple[int, int]]]:
    """After each step, (prompt's number, token) of every prompt that has not ended; EOS itself is left out.

    Args:
        prompts: token numbers, none of them empty; padded at the left to the longest.
        draws: random numbers for each prompt, drawn from where ``settings.do_sample``.

    Raises:
        ValueError: the model's logits are no numbers, as this model's are in fp16, which overflows.
    """
    alive, width = list(range(len(prompts))), max(map(len, prompts))
    padded = any(len(prompt) < width for prompt in prompts)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    cache = DynamicCache()
    for step in range(settings.max_new_tokens):
        shared = {"attention_mask": mask, "position_ids": positions} if padded else {}
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **shared).logits[:, -1]
        if step == 0 and not logits.isfinite().all():
            raise ValueError(f"the model's logits are no numbers in {logits.dtype}: take bf16 (train.bf16) or fp32")
        tokens = _sampled(logits, settings, [draws[row] for row in alive]) if settings.do_sample else logits.argmax(-1)
        token_ids = tokens.tolist()
        yield [(row, token) for row, token in zip(alive, token_ids, strict=True) if token != eos]
        if eos in token_ids:
            places = [row for row, token in enumerate(token_ids) if token != eos]
            if not places:
                return
            alive, index = [alive[row] for row in places], torch.tensor(places, device=model.device)
            cache.batch_select_indices(index)
            tokens, mask, positions = tokens[index], mask[index], positions[index]
        ids, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)


def _sampled(logits: torch.Tensor, settings: Predict, draws: Sequence[np.random.Generator]) -> torch.Tensor:
    """One token a row [b] from logits [b, v]: temperature, then the top k, then the top p, as ``generate`` orders them.

    Each row takes one number of its own and looks it up in its cumulative probabilities.
    """
    most = min(settings.top_k or logits.shape[-1], logits.shape[-1])
    best, tokens = (logits.double() / settings.temperature).topk(most)  # [b, k], falling
    probabilities = best.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    total = probabilities.masked_fill_(before >= settings.top_p, 0).cumsum(-1)  # the first always stays: 0 < top_p
    drawn = torch.tensor([[draw.random()] for draw in draws], device=logits.device, dtype=total.dtype) * total[:, -1:]
    drawn_index = (total <= drawn).sum(-1, keepdim=True)
    last = (probabilities > 0).sum(-1, keepdim=True) - 1  # should the product have been rounded up to the whole
    return tokens.gather(-1, torch.minimum(drawn_index, last)).squeeze(-1)


def chat(
    model: Any,
    tokenizer: Baichuan2Tokenizer,
    settings: Predict,
    lines: Iterable[str],
    write: Callable[[str], object],
    seed: int = 0,
) -> None:
    """A conversation: answers each of ``lines``, piece by piece through ``write``, with a line end after each answer.

    Args:
        settings: of the generation; ``seed`` is of sampling.
        lines: what the user says, one message each; empty ones are none. /new forgets, /quit ends.

    Raises:
        ValueError: ``settings.max_new_tokens`` leaves no room for a message in the model's context.
    """
    room = model.config.model_max_length - settings.max_new_tokens
    if room < 3:  # the pieces of user and assistant, and something between them
        raise ValueError(f"predict.max_new_tokens is {settings.max_new_tokens}, which leaves no room for a message")
    draw = np.random.default_rng(seed)
    messages: list[dict[str, str]] = []
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/new":
            messages = []
        elif text:
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.prompt_ids(messages, most=room)
            generated = steps(model, [prompt], settings, tokenizer.eos_token_id, [draw])
            answer = ""
            for piece in tokenizer.stream(token for step in generated for _, token in step):
                write(piece)
                answer += piece
            write("\n")
            messages.append({"role": "assistant", "content": answer})


def save_predictions(
    folder: str | Path, rows: Sequence[Mapping[str, Any]], generated: Predictions, as_text: bool = False
) -> dict[str, Any]:
    """Writes ``generated_predictions.jsonl`` and ``predict_results.json`` into ``folder``; returns the latter.

    That is the article's: scores as ``predict_bleu-4`` …, and run-time figures; beside them intervals and counts. The
    rows are as the article's tool wrote them: prompt, label and predict on every line.
    """
    folder = Path(folder)
    scores = metrics.score(generated.texts, [row["output"] for row in rows])
    results = {f"predict_{name}": scores[name] for name in metrics.NAMES}
    results |= metrics.runtime_figures(len(rows), generated.steps, generated.seconds)
    results |= {"samples": len(rows), "cut_prompts": generated.cut, "intervals": scores["intervals"]}
    prompt = _text_of if as_text else prompt_of
    lines = [
        {"prompt": prompt(row), "label": row["output"], "predict": text, "source": row.get("source", "")}
        for row, text in zip(rows, generated.texts, strict=True)
    ]
    (folder / RESULTS).unlink(missing_ok=True)  # results of other predictions must not stand beside these
    content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    project.write_text(folder / ROWS, content)
    project.write_json(folder / RESULTS, results)
    return results


def read_predictions(path: str | Path, *needed: str) -> list[dict[str, Any]]:
    """The rows of such a file, or of an array; keys beyond ``label`` and ``predict`` are kept.

    Args:
        needed: further keys that every row must have.

    Raises:
        ValueError: rows that are none, by line and reason; or no row at all.
    """
    pieces = list(scan(Path(path)))
    reasons = ((piece.line, piece.reason or _fault(piece.value, needed)) for piece in pieces)
    if bad := [f"line {line}: {reason}" for line, reason in reasons if reason]:
        more = [f"and {len(bad) - _NAMED} more"] if len(bad) > _NAMED else []
        raise ValueError(f"{path}: " + "; ".join(bad[:_NAMED] + more))
    if not pieces:
        raise ValueError(f"{path} holds no row")
    return [piece.value for piece in pieces]


def _fault(row: Any, needed: Sequence[str]) -> str | None:
    if not isinstance(row, dict):
        return "not an object in braces"
    for key in ("label", "predict", *needed):
        if key not in row:
            return f'no "{key}"'
    return next((f'"{key}" is not text' for key in ("label", "predict") if not isinstance(row[key], str)), None)
