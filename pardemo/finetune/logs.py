"""Shows the progress of a training run: a line with a bar, a JSON-lines log, a picture of the loss."""

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pardemo import extras, project

with extras.needed_by(__name__):
    from transformers import TrainerCallback


LOG = "train_log.jsonl"
_LOGGED = ("loss", "eval_loss", "learning_rate", "grad_norm")


class Progress(TrainerCallback):
    """Rank 0 prints a line per logging step, and appends it to the log.

    ``tokens``: a function that gives the real tokens, of all ranks, trained on so far in this process.
    """

    def __init__(self, run: Path, tokens: Callable[[], int]):
        self._path, self._tokens = run / LOG, tokens
        self._began = self._last = (0.0, 0, 0)  # time, step, tokens

    def on_train_begin(self, args, state, control, **_):
        self._began = self._last = (time.perf_counter(), state.global_step, 0)
        if state.is_world_process_zero:  # after a resume the steps behind the checkpoint are written again
            rows = read_log(self._path.parent) if self._path.is_file() and state.global_step else []
            text = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= state.global_step)
            project.write_text(self._path, text)

    def on_log(self, args, state, control, logs=None, **_):
        now = (time.perf_counter(), state.global_step, self._tokens())  # every rank counts
        if not state.is_world_process_zero or not ({"loss", "eval_loss"} & set(logs)):
            return
        row = {"step": state.global_step, "epoch": round(state.epoch or 0, 4)}
        row |= {key: float(logs[key]) for key in _LOGGED if key in logs}
        if "loss" in logs:
            row["tokens_per_s"] = round((now[2] - self._last[2]) / max(now[0] - self._last[0], 1e-9), 1)
            self._last = now
            print(self._line(state, row, now), flush=True)
        else:
            print(f"step {state.global_step}: loss on the validation file {row['eval_loss']:.4f}", flush=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _line(self, state, row: dict[str, Any], now: tuple[float, int, int]) -> str:
        each_s = (now[0] - self._began[0]) / max(now[1] - self._began[1], 1)
        minutes, seconds = divmod(round(each_s * (state.max_steps - now[1])), 60)
        filled = round(20 * now[1] / max(state.max_steps, 1))
        bar = "█" * filled + "·" * (20 - filled)
        return (f"{bar} {now[1]}/{state.max_steps}  loss {row['loss']:.4f}  {row['tokens_per_s']:,.0f} tokens/s  "
                f"{minutes}:{seconds:02} left")  # fmt: skip


def read_log(run: Path) -> list[dict[str, Any]]:
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
    weight = 1.8 * (1 / (1 + math.exp(-0.05 * len(values))) - 0.5)
    out = list(values[:1])
    for value in values[1:]:
        out.append(out[-1] * weight + (1 - weight) * value)
    return out


def draw_loss(run: Path) -> None:
    """Draws ``loss.png``: the loss as it was and smoothed, over optimizer steps."""
    from pardemo.draw import style

    columns = {
        key: ([row["step"] for row in rows], [row[key] for row in rows])
        for key, rows in ((key, [row for row in read_log(run) if key in row]) for key in ("loss", "eval_loss"))
    }
    fig, ax = style.new(size=(7, 3.2))
    ax.plot(*columns["loss"], color="0.7", label="loss")
    ax.plot(columns["loss"][0], smoothed(columns["loss"][1]), color="black", label="smoothed")
    if columns["eval_loss"][0]:
        ax.plot(*columns["eval_loss"], "o", color="black", label="validation, mean of batches")
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
        if dist.is_initialized():
            count = count.cuda() if dist.get_backend() == "nccl" else count
            dist.all_reduce(count)
        return int(count)
