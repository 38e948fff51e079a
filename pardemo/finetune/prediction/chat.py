"""A conversation in the terminal: answers as they come, a history cut to what the model can see."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pardemo.baichuan2 import Baichuan2Tokenizer
from pardemo.finetune.prediction import decoding
from pardemo.finetune.recipes.recipe_schema import Predict

HELP = "/new begins a new conversation, /quit (or Ctrl-D) ends"


def chat(
    model: Any,
    tokenizer: Baichuan2Tokenizer,
    settings: Predict,
    lines: Iterable[str],
    write: Callable[[str], object],
    seed: int = 0,
) -> None:
    """Answers each of ``lines``, piece by piece through ``write``, with a line end after each answer.

    Args:
        settings: of the generation; ``seed`` is of sampling.
        lines: what the user says, one message each; empty ones are none. /new forgets, /quit ends.

    Raises:
        ValueError: ``settings.max_new_tokens`` leaves no room for a message in the model's context.
    """
    room = model.config.model_max_length - settings.max_new_tokens
    if room < 3:  # the pieces of user and assistant, and something between them
        raise ValueError(f"predict.max_new_tokens is {settings.max_new_tokens}, which leaves no room for a message")
    draw, messages = np.random.default_rng(seed), []
    for line in lines:
        text = line.strip()
        if text == "/quit":
            return
        if text == "/new":
            messages = []
        elif text:
            messages.append({"role": "user", "content": text})
            prompt = tokenizer.prompt_ids(messages, most=room)
            steps = decoding.steps(model, [prompt], settings, tokenizer.eos_token_id, [draw])
            answer = ""
            for piece in tokenizer.stream(token for step in steps for _, token in step):
                write(piece)
                answer += piece
            write("\n")
            messages.append({"role": "assistant", "content": answer})
