"""What a training run shows: a line with a bar, a JSON-lines log, a picture of the loss."""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from pardemo import extras

with extras.needed_by(__name__):
    from transformers import TrainerCallback


LOG = "train_log.jsonl"


class Progress(TrainerCallback):
    """Rank 0 prints a line per logging step, appends it to the log, and draws the loss at the end.

    ``tokens``: a function that gives the real tokens, of all ranks, trained on so far in this process.
    """

    def __init__(self, run: Path, tokens):
        self._run, self._tokens = run, tokens
        self._began = self._last = (0.0, 0, 0)

    def on_train_begin(self, args, state, control, **_):
        self._began = self._last = (time.perf_counter(), state.global_step, 0)
        if state.is_world_process_zero:
            _cut_log(self._run / LOG, state.global_step)

    def on_log(self, args, state, control, logs=None, **_):
        tokens = self._tokens()  # every rank counts
        if not state.is_world_process_zero or not ({"loss", "eval_loss"} & set(logs)):
            return
        now = time.perf_counter()
        rate = (tokens - self._last[2]) / max(now - self._last[0], 1e-9)
        row = {"step": state.global_step, "epoch": round(state.epoch or 0, 4)}
        row |= {key: float(logs[key]) for key in ("loss", "eval_loss", "learning_rate", "grad_norm") if key in logs}
        if "loss" in logs:
            row["tokens_per_s"] = round(rate, 1)
            self._last = (now, state.global_step, tokens)
            steps = state.global_step - self._began[1]
            left_s = (now - self._began[0]) / max(steps, 1) * (state.max_steps - state.global_step)
            print(_line(state, row, left_s), flush=True)
        else:
            print(f"step {state.global_step}: loss on the validation file {row['eval_loss']:.4f}", flush=True)
        with open(self._run / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_log(run: Path) -> list[dict]:
    """The rows of a run's log, in the order of steps; an unfinished last line is left out."""
    rows = []
    for line in (run / LOG).read_text("utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average of weight 1.8·(sigmoid(0.05·n) − 0.5) for n values: the article's tool's curve."""
    if not values:
        return []
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    last, out = values[0], []
    for value in values:
        last = last * weight + (1 - weight) * value
        out.append(last)
    return out


def draw_loss(run: Path) -> None:
    """Draws ``loss.png``: the loss as it was and smoothed, over optimizer steps."""
    from pardemo.draw import style

    rows = read_log(run)
    train = [row for row in rows if "loss" in row]
    held_out = [row for row in rows if "eval_loss" in row]
    fig, ax = style.new(size=(7, 3.2))
    steps, losses = [row["step"] for row in train], [row["loss"] for row in train]
    ax.plot(steps, losses, color="0.7", label="loss")
    ax.plot(steps, smoothed(losses), color="black", label="smoothed")
    if held_out:
        ax.plot(
            [r["step"] for r in held_out],
            [r["eval_loss"] for r in held_out],
            "o",
            color="black",
            label="validation, mean of batches",
        )
    ax.set(xlabel="optimizer step", ylabel="loss per labelled token", ylim=(0, None))
    ax.legend()
    style.write(fig, run / "loss.png", "The loss of a fine-tune over its optimizer steps, as it was and smoothed.")


class TokenCount:
    """Real tokens (padding left out) that all ranks have trained on."""

    def __init__(self, pad_id: int):
        self._pad, self._mine = pad_id, torch.zeros((), dtype=torch.long)

    def add(self, ids: torch.Tensor) -> None:
        self._mine = self._mine.to(ids.device) + (ids != self._pad).sum()  # a GPU is not waited for

    def total(self) -> int:
        count = self._mine.clone().reshape(1).cpu()
        if torch.distributed.is_initialized():
            if torch.distributed.get_backend() == "nccl":
                count = count.cuda()
            torch.distributed.all_reduce(count)
        return int(count)


def _line(state, row: dict, left_s: float) -> str:
    filled = round(20 * state.global_step / max(state.max_steps, 1))
    bar = "█" * filled + "·" * (20 - filled)
    minutes, seconds = divmod(round(left_s), 60)
    return (f"{bar} {state.global_step}/{state.max_steps}  loss {row['loss']:.4f}  "
            f"{row['tokens_per_s']:,.0f} tokens/s  {minutes}:{seconds:02} left")  # fmt: skip


def _cut_log(path: Path, step: int) -> None:
    """After a resume the steps behind the checkpoint are written again."""
    from pardemo import project

    rows = read_log(path.parent) if path.is_file() and step else []
    text = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    project.write_atomically(path, lambda part: part.write_text(text, encoding="utf-8"))
