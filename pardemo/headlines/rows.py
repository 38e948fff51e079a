"""Rows of the article's format, and the files that hold them: every bad row named by line and reason.

A file is a JSON array of objects, one per line or spread over lines, or JSON lines. It is read line by line, so that a
file that a JSON parser refuses as a whole is still told apart into the rows that are good and those that are not.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pardemo.headlines.scan import scan

FIELDS = ("instruction", "input", "output", "source")


@dataclass(frozen=True)
class Problem:
    """A bad row: the line where it begins (from 1), and what is wrong with it."""

    line: int
    reason: str


@dataclass
class Report:
    """What :func:`check` found: how many rows there are, good and bad, and every bad one."""

    rows: int = 0
    problems: list[Problem] = field(default_factory=list)


def read(path: str | Path) -> list[dict[str, str]]:
    """The rows of a file in the article's format.

    Raises:
        ValueError: at least one row is bad (the first is named, with the number of all), or there is none.
        OSError: the file cannot be read.
    """
    report = Report()
    rows = list(_good(Path(path), report))
    if report.problems:
        first = report.problems[0]
        more = f"{len(report.problems)} bad rows in all" if len(report.problems) > 1 else "the only bad row"
        raise ValueError(f"{path} line {first.line}: {first.reason} ({more}; pardemo data check lists them)")
    return rows


def check(path: str | Path) -> Report:
    """Looks through a file of the article's format; the report names every bad row.

    Raises:
        ValueError: a git-lfs pointer instead of data, or a file without a row.
        OSError: the file cannot be read.
    """
    report = Report()
    for _ in _good(Path(path), report):
        pass
    return report


def problem_of(row: Any) -> str | None:
    """Why this is no row of the format (all reasons), or None."""
    if not isinstance(row, dict):
        return f"an object with the fields {', '.join(FIELDS)} is expected, not {_type_name(row)}"
    reasons = []
    for name in FIELDS:
        if name not in row:
            reasons.append(f"missing field {name}")
        elif not isinstance(row[name], str):
            reasons.append(f"{name} must be text, not {_type_name(row[name])}")
        elif name in ("input", "output") and not row[name].strip():
            reasons.append(f"empty {name}")
        elif not is_unicode(row[name]):
            reasons.append(f"{name} holds half a surrogate pair, which is no text")
    return "; ".join(reasons) or None


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: JSON's escapes can spell halves of characters, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def key_of(text: str) -> bytes:
    """What two inputs have in common when they are the same but for case, width and white space: 16 bytes."""
    plain = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()


def as_line(row: Mapping[str, str]) -> bytes:
    """A row as one line of JSON, without the line's end."""
    return json.dumps({name: row[name] for name in FIELDS}, ensure_ascii=False).encode()


def _good(path: Path, report: Report) -> Iterator[dict[str, str]]:
    """Yields the good rows; books the others, and the number of all, in ``report``."""
    lines: dict[bytes, int] = {}
    for piece in scan(path):
        report.rows += piece.is_row
        reason = piece.reason or problem_of(piece.value)
        if reason is None:
            key = key_of(piece.value["input"])
            if key in lines:
                reason = f"duplicate input, as in line {lines[key]}"
            lines.setdefault(key, piece.line)
        if reason is None:
            yield piece.value
        else:
            report.problems.append(Problem(piece.line, reason))
    if not report.rows:
        raise ValueError(f"{path} holds no row: a JSON array of objects, or one object per line, is expected")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
