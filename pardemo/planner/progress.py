"""Tells on the error stream what ``pardemo plan`` is doing."""

import sys


def progress(text: str) -> None:
    """Prints on the error stream what takes a while."""
    print(f"plan: {text} …", file=sys.stderr, flush=True)
