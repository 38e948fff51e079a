"""Formats and pickles what a meter counted."""

from collections.abc import Mapping
from typing import Any


def text(values: Mapping[str, Any]) -> str:
    """``sent_bytes=1,024, evidence='wire'``: figures in the order in which the meter names them."""
    return ", ".join(f"{name}={_short(value)}" for name, value in values.items())


def restored(kind: type, values: Mapping[str, Any]) -> Any:
    """A meter with the figures of another process's, which has nothing else of it: pickle's way back."""
    meter = kind()
    vars(meter).update(values)
    return meter


def _short(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_short(one)}" for key, one in value.items()) + "}"
    return repr(value)
