"""Reads a JSON file of events, item by item, in memory that does not grow with the file.

A trace of a real job has gigabytes. ``json.load`` would take ten times as much memory; this takes a buffer.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

#: Characters that are read at once; the most that an item may have; the most fields beside the lists.
CHUNK, LARGEST, MOST_FIELDS = 1 << 20, 64 << 20, 10_000
GZIP = b"\x1f\x8b"
_SPACE = re.compile(r"[ \t\n\r]*")


class EventStream:
    """Yields the items of the long lists of a JSON object, and keeps its other fields.

    Args:
        path: of a file, compressed by gzip or not. lists: the fields whose items are yielded.

    Attributes: ``list`` (the field that the last item came from; empty before the first), ``fields`` (all others, as
    far as they were read: after the iteration they are complete).
    """

    def __init__(self, path: Path | str, lists: Sequence[str] = ("traceEvents",)):
        self.list = ""
        self.fields: dict[str, Any] = {}
        self._path, self._lists = Path(path), lists

    def __iter__(self) -> Iterator[Any]:
        """Yields one item after the other.

        Raises:
            ValueError: the file ends too early, is no JSON object, or has an item of more than :data:`LARGEST`.
        """
        with self._path.open("rb") as file:
            opened = gzip.open if file.read(2) == GZIP else open
        with opened(self._path, "rt", encoding="utf-8") as text:
            try:
                yield from self._items(_Buffer(text))
            except (ValueError, EOFError, OSError, zlib.error, RecursionError) as error:
                raise ValueError(f"{self._path.name} is no whole trace: {error}") from None

    def _items(self, buffer: "_Buffer") -> Iterator[Any]:
        if buffer.next() == "[":  # JSON, and nothing with fields
            return
        buffer.take("{")
        while buffer.next() != "}":
            name = str(buffer.value())
            buffer.take(":")
            if name in self._lists and buffer.next() == "[":
                self.list = name
                buffer.take("[")
                while buffer.next() != "]":
                    yield buffer.value()
                    buffer.take_comma("]")
                buffer.take("]")
            else:
                buffer.next()
                self.fields[name] = buffer.value()
                if len(self.fields) > MOST_FIELDS:
                    raise ValueError(f"it has more than {MOST_FIELDS:,} fields")
            buffer.take_comma("}")
        buffer.take("}")


class _Buffer:
    """The part of a text that is being read."""

    def __init__(self, file: TextIO):
        self._file, self._text, self._at, self._ended = file, "", 0, False
        self._decode = json.JSONDecoder().raw_decode

    def next(self) -> str:
        """Returns the next character that is no space, without taking it; empty at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._at = space.end() if space else self._at
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more(CHUNK)

    def take(self, character: str) -> None:
        """Takes this character."""
        if (there := self.next()) != character:
            raise ValueError(f"{there!r} stands where {character!r} has to be" if there else "it ends too early")
        self._at += 1

    def take_comma(self, end: str) -> None:
        """Takes the comma between two items; behind the last one stands ``end``, which is left."""
        if self.next() != end:
            self.take(",")
            if self.next() == end:
                raise ValueError(f"a comma stands before {end!r}")

    def value(self) -> Any:
        """Takes a value that begins here."""
        while True:
            try:
                value, end = self._decode(self._text, self._at)
                if end < len(self._text) or self._ended:  # a number may go on in what is not read yet
                    self._at = end
                    return value
            except json.JSONDecodeError:
                if self._ended:
                    raise
            if len(self._text) - self._at > LARGEST:
                raise ValueError(f"an item has more than {LARGEST >> 20} MiB, or is no JSON")
            self._more(max(CHUNK, len(self._text) - self._at))

    def _more(self, characters: int) -> None:
        read = self._file.read(characters)
        self._text, self._at, self._ended = self._text[self._at :] + read, 0, not read
