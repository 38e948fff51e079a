"""Rows of the article's format, and the files that hold them: every bad row named by line and reason.

Rows of other forms (:mod:`pardemo.headlines.forms`) are read as rows of that one.

A file is a JSON array of objects, one per line or spread over lines, or JSON lines. It is read line by line, so that a
file that a JSON parser refuses as a whole is still told apart into the rows that are good and those that are not.
"""

import hashlib
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pardemo.headlines import forms
from pardemo.headlines.scan import scan

FIELDS = ("instruction", "input", "output", "source")


@dataclass(frozen=True)
class Problem:
    """A bad row: the line where it begins (from 1), and what is wrong with it."""

    line: int
    reason: str


@dataclass
class Report:
    """What :func:`check` found: how many rows there are, good and bad, every bad one, and rows by their form."""

    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file, whatever their form, as instruction, input, output and source.

    Rows of a conversation also have a ``history``, those of plain text ``plain``.

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
    """Looks through a file; the report names every bad row, and says of which forms the rows are.

    Raises:
        ValueError: a git-lfs pointer instead of data, or a file without a row.
        OSError: the file cannot be read.
    """
    report = Report()
    for _ in _good(Path(path), report):
        pass
    return report


def problem_of(row: Any, form: str = forms.ARTICLE) -> str | None:
    """Why this is no row of the format (all reasons), or None. Of other forms an input may be empty."""
    if not isinstance(row, dict):
        return f"an object with the fields {', '.join(FIELDS)} is expected, not {_type_name(row)}"
    reasons = []
    for name in FIELDS:
        if name not in row:
            reasons.append(f"missing field {name}")
        elif not isinstance(row[name], str):
            reasons.append(f"{name} must be text, not {_type_name(row[name])}")
        elif name == "output" and not row[name].strip():
            reasons.append("empty output")
        elif name == "input" and form == forms.ARTICLE and not row[name].strip():
            reasons.append("empty input")
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


def understood(value: Any) -> tuple[Any, str, str | None]:
    """A file's object as a row of the article's format, its form, and why it is none, if it is not."""
    form = forms.form_of(value)
    row = value if form == forms.ARTICLE else forms.as_row(value, form)
    if isinstance(row, str) and form != forms.ARTICLE:
        return value, form, row
    return row, form, problem_of(row, form)


def _whole(row: Mapping[str, Any]) -> str:
    """All that a row of another form asks, or the text that it is."""
    asked = [turn["content"] for turn in row.get("history", ())] + [row["instruction"], row["input"]]
    return "\n".join(asked) if not row.get("plain") else row["output"]


def _good(path: Path, report: Report) -> Iterator[dict[str, Any]]:
    """Yields the good rows; books the others, and the number of all, in ``report``."""
    lines: dict[bytes, int] = {}
    for piece in scan(path):
        report.rows += piece.is_row
        row, form, reason = understood(piece.value)
        reason = piece.reason or reason
        if reason is None:
            report.forms[form] += 1
            key = key_of(row["input"] if form == forms.ARTICLE else _whole(row))
            if key in lines:
                reason = f"duplicate input, as in line {lines[key]}"
            lines.setdefault(key, piece.line)
        if reason is None:
            yield row
        else:
            report.problems.append(Problem(piece.line, reason))
    if not report.rows:
        raise ValueError(f"{path} holds no row: a JSON array of objects, or one object per line, is expected")


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
