"""Builds parts of sentences: shortened lists and texts, counted nouns, ranks of which the same is true."""

from collections.abc import Iterable


def first_of(names: Iterable[str], most: int, joined: str = ", ", more: str = " and {} more") -> str:
    """Lists so many names, and how many more there are: ``embed, head and 3 more``."""
    names = list(names)
    return joined.join(names[:most]) + (more.format(len(names) - most) if len(names) > most else "")


def count_text(count: int, noun: str) -> str:
    """``1 step``, ``2 steps``, ``2 batches``."""
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def shortened(text: str, longest: int) -> str:
    """Returns a text's beginning and its end, where it is longer."""
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def at_line(line: str) -> str:
    """``, at train.py:7``; empty where no line is known."""
    return f", at {line}" if line else ""


def finding_text(step: int, subject: str, factor: float | None, rest: float | None, module: str) -> str:
    """``step 1, gradients (× 4, rest 0.75), first at head``: step, what differs, factor, module."""
    numbers = []
    if factor is not None:
        numbers.append(f"× {factor:.4g}")
    if rest is not None and rest > 1e-6:
        numbers.append(f"rest {rest:.2g}")
    text = f"step {step}, {subject}" + (f" ({', '.join(numbers)})" if numbers else "")
    return f"{text}, first at {module}" if module else text


def cause_text(cause: str, why: str) -> str:
    """``[sum-for-mean] …``: a cause's name, where there is one, and its sentence."""
    return f"[{cause}] {why}" if cause else why
