"""Tells a JSON array or JSON lines apart into values with their lines, where a JSON parser would refuse the whole."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pardemo.project import refuse_pointer

_decode = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\r\n]*")
_BRACE = re.compile(r"(\}?)\s*([,:\[]?)\s*\{")  # with what stands before it
_NO_UTF_8 = re.compile(r"[\udc80-\udcff]")  # what Python makes of such bytes


@dataclass(frozen=True)
class Piece:
    """A value of the file, or what is wrong there (``reason``); ``is_row`` is False for faults between the rows."""

    line: int
    value: Any = None
    reason: str | None = None
    is_row: bool = True


def scan(path: Path) -> Iterator[Piece]:
    """Yields every value of a JSON array or of JSON lines, and every fault, in the order of the file.

    A file without any fault is one that ``json.load`` reads (an array), or reads line by line.
    """
    parser = _Parser()
    last = 1
    for line, chunk in _chunks(path):
        last = line + chunk.count(b"\n", 0, -1)
        yield from parser.parse(line, chunk)
    if parser.is_array and not parser.closed:
        yield Piece(last, reason="the array is not closed: ] is missing", is_row=False)


def _chunks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that belong together, with the number of the first: a new row begins with { no deeper than the first did.

    So a row that is broken takes no other with it, whatever its layout (only a value that is no object).
    """
    depth = None
    begin, pending = 1, []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                refuse_pointer(path, line, "data")
                line = line.removeprefix(b"\xef\xbb\xbf")
            bare = line.lstrip(b" \t")
            indent = len(line) - len(bare)
            if bare[:1] == b"{" and depth is None:
                depth = indent
            if pending and bare[:1] in (b"{", b"]") and indent <= (depth or 0):
                yield begin, b"".join(pending)
                begin, pending = number, []
            pending.append(line)
    if pending:
        yield begin, b"".join(pending)


class _Parser:
    """What may come next, from chunk to chunk: ``after`` is what came last, None where a broken row hides it."""

    def __init__(self) -> None:
        self.is_array = False
        self.closed = False
        self.after: str | None = "start"

    def parse(self, line: int, chunk: bytes) -> Iterator[Piece]:
        text = chunk.decode(errors="surrogateescape")
        end = counted = 0  # where the last token ended, and how far newlines have been counted
        while (position := _SPACE.match(text, end).end()) < len(text):
            line += text.count("\n", counted, position)
            same_line = end > 0 and "\n" not in text[end:position]
            counted = position
            mark = text[position]
            if mark == "[" and self.after == "start":
                self.is_array, self.after = True, "["
                end = position + 1
            elif mark in ",]":
                yield from self._separator(line, mark)
                end = position + 1
            else:
                yield from self._between(line, same_line)
                value, reason = None, None
                try:
                    value, end = _decode(text, position)
                    self.after = "row"
                except (ValueError, RecursionError) as error:
                    reason = f"broken JSON: {getattr(error, 'msg', error)}"
                    end, self.after = _behind_broken(text, position)
                if wrong := _NO_UTF_8.search(text, position, end):
                    at, byte = line + text.count("\n", position, wrong.start()), ord(wrong[0]) - 0xDC00
                    value, reason = None, f"not UTF-8: byte 0x{byte:02x} in line {at}"
                yield Piece(line, value, reason)

    def _separator(self, line: int, mark: str) -> Iterator[Piece]:
        if not self.is_array:
            yield Piece(line, reason=f"{mark} outside of an array, which begins with [", is_row=False)
            self.after = mark
            return
        if self.closed:
            yield Piece(line, reason="text after the closing ]", is_row=False)
        elif self.after == "," or (mark == "," and self.after == "["):
            yield Piece(line, reason=f"a comma too many before {mark}", is_row=False)
        self.closed = self.closed or mark == "]"
        self.after = mark

    def _between(self, line: int, same_line: bool) -> Iterator[Piece]:
        if self.closed:
            yield Piece(line, reason="text after the closing ]", is_row=False)
        elif self.after == "row" and self.is_array:
            yield Piece(line, reason="no comma before this row", is_row=False)
        elif self.after == "row" and same_line:
            yield Piece(line, reason="more than one value on a line that is no array", is_row=False)


def _behind_broken(text: str, position: int) -> tuple[int, str | None]:
    """Where to go on behind a broken row that others follow, and what stands before that place.

    At the next object behind ``},``; or, where the broken row has no end of its own, at the next whole one that is no
    value of it.
    """
    for match in _BRACE.finditer(text, position + 1):
        closed, mark = match.groups()
        brace = match.end() - 1
        if mark not in (":", "[") and ((closed and mark) or _is_whole(text, brace)):
            return brace, mark or None
    return len(text), None


def _is_whole(text: str, position: int) -> bool:
    try:
        _decode(text, position)
    except (ValueError, RecursionError):
        return False
    return True
