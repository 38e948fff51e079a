"""The forms in which people have data for a fine-tune, each read as rows of instruction, input and output.

===================  ==================================================================================
form                 keys
===================  ==================================================================================
``article``          instruction, input, output, source: the article's, as :mod:`pardemo.headlines` builds it
``alpaca``           instruction and output, perhaps an input (tatsu-lab's, LLaMA-Factory's)
``sharegpt``         conversations: a list of ``{"from": "human" | "gpt" | "system", "value": …}``
``messages``         messages: a list of ``{"role": "user" | "assistant" | "system", "content": …}`` (TRL's, OpenAI's)
``prompt``           prompt and completion, or prompt and response (TRL's)
``text``             text alone, all of which is learned
===================  ==================================================================================

Of a conversation the last answer is learned, and what was said before it is its prompt (``history``).
"""

from itertools import pairwise
from typing import Any

#: What a turn is called in ShareGPT's files and in messages -> its role.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
         "system": "system"}  # fmt: skip
ARTICLE, ALPACA, SHAREGPT, MESSAGES, PROMPT, TEXT = "article", "alpaca", "sharegpt", "messages", "prompt", "text"
FORMS = (ARTICLE, ALPACA, SHAREGPT, MESSAGES, PROMPT, TEXT)
_ANSWERS = ("completion", "response", "chosen")


def form_of(value: Any) -> str:
    """Which form an object has, by its keys; the article's where it has none of them."""
    keys = value.keys() if isinstance(value, dict) else set()
    if "conversations" in keys:
        return SHAREGPT
    if "messages" in keys:
        return MESSAGES
    if "prompt" in keys and any(name in keys for name in _ANSWERS):
        return PROMPT
    if "text" in keys and not {"instruction", "output"} & keys:
        return TEXT
    if {"instruction", "output"} <= keys and "source" not in keys:
        return ALPACA
    return ARTICLE


def as_row(value: dict[str, Any], form: str) -> dict[str, Any] | str:
    """A row of another form than the article's as one of the article's, or in a sentence why it is none."""
    if form in (SHAREGPT, MESSAGES):
        return _of_turns(value["conversations" if form == SHAREGPT else "messages"], form)
    names = {ALPACA: ("instruction", "output"), TEXT: ("text",)}.get(form)
    if names is None:
        answer = next(name for name in _ANSWERS if name in value)
        if isinstance(value["prompt"], list) and isinstance(value[answer], list):
            return _of_turns([*value["prompt"], *value[answer]], form)
        names = ("prompt", answer)
    given = value.get("input") or ""
    for name, text in (*((name, value[name]) for name in names), ("input", given)):
        if not isinstance(text, str):
            return f"{name} must be text, not {type(text).__name__}"
        if not text.strip() and name != "input":
            return f"empty {name}"
    if form == TEXT:
        return _row("", "", value["text"], plain=True)
    if form == PROMPT:
        return _row(value["prompt"], "", value[names[1]])
    instruction = value["instruction"]
    line_end = "\n" if given and not instruction.endswith("\n") else ""  # the article's instructions end their line
    return _row(instruction + line_end, given, value["output"])


def _row(instruction: str, given: str, output: str, **more: Any) -> dict[str, Any]:
    return {"instruction": instruction, "input": given, "output": output, "source": "", **more}


def _of_turns(turns: Any, form: str) -> dict[str, Any] | str:
    role, content = ("from", "value") if form == SHAREGPT else ("role", "content")
    if not isinstance(turns, list) or not turns:
        return "a conversation is a list of turns, and has some"
    said: list[dict[str, str]] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get(content), str):
            return f"turn {number} needs {role} and {content}, and {content} has to be text"
        if turn.get(role) not in ROLES:
            return f"turn {number} is {turn.get(role)!r}'s, who is none of {', '.join(ROLES)}"
        said.append({"role": ROLES[turn[role]], "content": turn[content]})
    while said and said[-1]["role"] != "assistant":  # what nobody answers is not learned
        said.pop()
    if len(said) < 2 or said[-2]["role"] != "user":
        return "a conversation needs a question and the answer to it"
    for number, (one, after) in enumerate(pairwise(said), 2):
        if after["role"] == one["role"] or (after["role"] == "system"):
            return f"turn {number} is the {after['role']}'s, behind the {one['role']}'s"
    if not said[-1]["content"].strip():
        return "empty answer"
    return _row(said[-2]["content"], "", said[-1]["content"], history=said[:-2])
