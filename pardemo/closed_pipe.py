"""Lets a command go on when nobody reads its output any more (``pardemo finetune … | head``)."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def work_goes_on() -> Iterator[None]:
    """Within it, also as a decorator: what is printed to a pipe whose reader has left goes nowhere, and no error comes.

    For commands whose work is more than what they print: training, generation, files. One that only prints has nothing
    left to do; its BrokenPipeError ends it.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (_Lasting(stream) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # here, where it cannot fail
        sys.stdout, sys.stderr = before


class _Lasting:
    """A text stream that points itself at nothing once its pipe is closed."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            to_nothing(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            to_nothing(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def to_nothing(stream: TextIO) -> None:
    """Throws away what the stream still holds, and all that comes."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)
