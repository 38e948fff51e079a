"""Rows of data in the forms that people have, and the files that hold them: every bad row named by line and reason.

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

A file is a JSON array of objects, one per line or spread over lines, or JSON lines. Where a JSON parser refuses the
whole, the rows that are good are still told apart from those that are not.
"""

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pardemo.project import refuse_pointer

FIELDS = ("instruction", "input", "output", "source")
FORMS = ("article", "alpaca", "sharegpt", "messages", "prompt", "text")
#: What a turn is called in ShareGPT's files and in messages -> its role.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
         "system": "system"}  # fmt: skip
_ANSWERS = ("completion", "response", "chosen")  # keys of the answer to a prompt
_NOT_EMPTY = {
    "article": ("input", "output"), "alpaca": ("instruction", "output"), "prompt": ("instruction", "output"),
    "text": ("output",),
}  # fmt: skip


class BadRow(ValueError):
    """Something that is no row; says why."""


@dataclass(frozen=True)
class Problem:
    """A bad row: the line where it begins (from 1), and what is wrong with it."""

    line: int
    reason: str


@dataclass
class Report:
    """Result of :func:`check`: how many rows there are, good and bad, every bad one, and rows by their form."""

    rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    forms: Counter[str] = field(default_factory=Counter)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a file, whatever their form, as instruction, input, output and source.

    Of a conversation the last answer is the output, and what was said before its question is its ``history``; rows of
    plain text are ``plain``.

    Raises:
        ValueError: at least one row is bad (the first is named, with the number of all), or there is none.
        OSError: the file cannot be read.
    """
    report = Report()
    rows = list(_good_rows(Path(path), report))
    if bad := report.problems:
        more = f"{len(bad)} bad rows in all" if len(bad) > 1 else "the only bad row"
        raise ValueError(f"{path} line {bad[0].line}: {bad[0].reason} ({more}; pardemo data check lists them)")
    return rows


def check(path: str | Path) -> Report:
    """Looks through a file; the report names every bad row, and says of which forms the rows are.

    Raises:
        ValueError: a git-lfs pointer instead of data, or a file without a row.
        OSError: the file cannot be read.
    """
    report = Report()
    for _ in _good_rows(Path(path), report):
        pass
    return report


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: JSON's escapes can spell halves of characters, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def key_of(text: str) -> bytes:
    """Hashes an input to 16 bytes, without regard to case, width and white space."""
    plain = "".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(plain.encode(), digest_size=16).digest()


def as_line(row: Mapping[str, str]) -> bytes:
    """A row as one line of JSON, without the line's end."""
    return json.dumps({name: row[name] for name in FIELDS}, ensure_ascii=False).encode()


def form_of(value: Mapping[str, Any]) -> str:
    """Returns the one of :data:`FORMS` that an object has, by its keys; the article's where it has none of them."""
    if "conversations" in value:
        return "sharegpt"
    if "messages" in value:
        return "messages"
    if "prompt" in value and any(name in value for name in _ANSWERS):
        return "prompt"
    if "text" in value and not {"instruction", "output"} & value.keys():
        return "text"
    return "alpaca" if {"instruction", "output"} <= value.keys() and "source" not in value else "article"


def row_of(value: Any) -> tuple[dict[str, Any], str]:
    """A file's object as a row of the article's form, and the form that it has.

    Raises:
        BadRow: it is no row; all reasons.
    """
    if not isinstance(value, dict):
        raise BadRow(f"an object with the fields {', '.join(FIELDS)} is expected, not {_type_name(value)}")
    form, answer = form_of(value), next((name for name in _ANSWERS if name in value), "")
    if form == "sharegpt":
        return _from_turns(value["conversations"], "from", "value"), form
    if form == "messages":
        return _from_turns(value["messages"], "role", "content"), form
    if form == "prompt" and isinstance(value["prompt"], list) and isinstance(value[answer], list):
        return _from_turns([*value["prompt"], *value[answer]], "role", "content"), form
    keys = {  # field of the row -> key of the object
        "article": dict(zip(FIELDS, FIELDS, strict=True)),
        "alpaca": {name: name for name in FIELDS[:3] if name != "input" or value.get(name)},
        "prompt": {"instruction": "prompt", "output": answer},
        "text": {"output": "text"},
    }[form]
    if faults := [*filter(None, (_fault(value, key, name in _NOT_EMPTY[form]) for name, key in keys.items()))]:
        raise BadRow("; ".join(faults))
    if form == "article":
        return value, form
    row: dict[str, Any] = dict.fromkeys(FIELDS, "") | {name: value[key] for name, key in keys.items()}
    if form == "alpaca" and row["input"] and not row["instruction"].endswith("\n"):
        row["instruction"] += "\n"  # the article's instructions end their line
    return (row | {"plain": True} if form == "text" else row), form


def _fault(value: Mapping[str, Any], name: str, needed: bool) -> str | None:
    if name not in value:
        return f"missing field {name}"
    if not isinstance(value[name], str):
        return f"{name} must be text, not {_type_name(value[name])}"
    if needed and not value[name].strip():
        return f"empty {name}"
    return None if is_unicode(value[name]) else f"{name} holds half a surrogate pair, which is no text"


def _from_turns(turns: Any, role: str, content: str) -> dict[str, Any]:
    if not isinstance(turns, list) or not turns:
        raise BadRow("a conversation is a list of turns, and has some")
    messages: list[dict[str, str]] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get(content), str) or not is_unicode(turn[content]):
            raise BadRow(f"turn {number} needs {role} and {content}, and {content} has to be text")
        if turn.get(role) not in ROLES:
            raise BadRow(f"turn {number} is {turn.get(role)!r}'s, who is none of {', '.join(ROLES)}")
        messages.append({"role": ROLES[turn[role]], "content": turn[content]})
    while messages and messages[-1]["role"] != "assistant":  # what nobody answers is not learned
        messages.pop()
    if len(messages) < 2 or messages[-2]["role"] != "user":
        raise BadRow("a conversation needs a question and the answer to it")
    for number, (before, message) in enumerate(pairwise(messages), 2):
        if message["role"] in (before["role"], "system"):
            raise BadRow(f"turn {number} is the {message['role']}'s, behind the {before['role']}'s")
    *history, question, answer = messages
    if not answer["content"].strip():
        raise BadRow("empty answer")
    row = dict.fromkeys(FIELDS, "") | {"instruction": question["content"], "output": answer["content"]}
    return row | {"history": history}


def _question(row: Mapping[str, Any], form: str) -> str:
    """What has to be asked once in a file: the article's input; all that a row of another form asks, or its text."""
    if form == "article":
        return row["input"]
    if row.get("plain"):
        return row["output"]
    return "\n".join([*(turn["content"] for turn in row.get("history", ())), row["instruction"], row["input"]])


def _good_rows(path: Path, report: Report) -> Iterator[dict[str, Any]]:
    """Yields the good rows; books the others, and the number of all, in ``report``."""
    lines: dict[bytes, int] = {}
    for piece in scan(path):
        report.rows += piece.is_row
        try:
            if piece.reason is not None:
                raise BadRow(piece.reason)
            row, form = row_of(piece.value)
            report.forms[form] += 1
            key = key_of(_question(row, form))
            if key in lines:
                raise BadRow(f"duplicate input, as in line {lines[key]}")
            lines[key] = piece.line
        except BadRow as bad:
            report.problems.append(Problem(piece.line, str(bad)))
        else:
            yield row
    if not report.rows:
        raise ValueError(f"{path} holds no row: a JSON array of objects, or one object per line, is expected")


@dataclass(frozen=True)
class Piece:
    """A value of the file, or what is wrong there (``reason``); ``is_row`` is False for faults between the rows."""

    line: int
    value: Any = None
    reason: str | None = None
    is_row: bool = True


_decode = json.JSONDecoder().raw_decode
_BETWEEN = re.compile(r"[ \t\r\n,\]]*")  # two values
_BRACE = re.compile(r"([^\s,])([\s,]*)\{")  # with what stands before it
_NO_UTF_8 = re.compile(r"[\udc80-\udcff]")  # what Python makes of such bytes


def scan(path: Path) -> Iterator[Piece]:
    """Yields every value of a JSON array or of JSON lines, and every fault, in the order of the file.

    A file without any fault is one that ``json.load`` reads (an array), or reads line by line. A row that is broken
    takes no other with it.
    """
    content = path.read_bytes()
    refuse_pointer(path, content[:100], "data")
    text = content.removeprefix(b"\xef\xbb\xbf").decode(errors="surrogateescape").strip(" \t\r\n")
    line = 1 + content[: len(content) - len(content.lstrip(b" \t\r\n"))].count(b"\n")
    is_array = text.startswith("[")
    end = counted = int(is_array)
    due: str | None = ""  # what stands before the next value; None behind a broken one, whose end is not known
    while True:
        between = _BETWEEN.match(text, end)
        begin = between.end() if between else end
        at_end, marks = begin == len(text), "".join(text[end:begin].split())
        line, counted = line + text.count("\n", counted, begin), begin
        if at_end and due is not None:
            due = "]" * is_array
        if due is not None and marks != due:
            yield Piece(line, reason=_fault_between(marks, due, is_array), is_row=False)
        elif due == "" and not is_array and end and not at_end and "\n" not in text[end:begin]:
            yield Piece(line, reason="more than one value on a line that is no array", is_row=False)
        if at_end:
            return
        value, reason = None, None
        try:
            value, end = _decode(text, begin)
            due = "," * is_array
        except (ValueError, RecursionError) as error:
            reason = f"broken JSON: {getattr(error, 'msg', error)}"
            end, due = _behind_broken(text, begin), None
        if wrong := _NO_UTF_8.search(text, begin, end):
            at, byte = line + text.count("\n", begin, wrong.start()), ord(wrong[0]) - 0xDC00
            value, reason = None, f"not UTF-8: byte 0x{byte:02x} in line {at}"
        yield Piece(line, value, reason)


def _fault_between(marks: str, due: str, is_array: bool) -> str:
    if not is_array:
        return f"{marks[0]} outside of an array, which begins with ["
    if due == "]" and "]" not in marks:
        return "the array is not closed: ] is missing"
    if marks.count("]") > (due == "]"):
        return "text after the closing ]"
    return "a comma too many" if marks else "no comma before this row"


def _behind_broken(text: str, position: int) -> int:
    """Where the next row begins behind a broken one: after ``},`` or on a line of its own; or the next whole object.

    Behind a colon or an opening bracket stands a value of the broken row itself.
    """
    for match in _BRACE.finditer(text, position + 1):
        before, between = match.groups()
        brace = match.end() - 1
        if before not in ":[" and ((before == "}" and "," in between) or "\n" in between or _is_whole(text, brace)):
            return brace
    return len(text)


def _is_whole(text: str, position: int) -> bool:
    try:
        _decode(text, position)
    except (ValueError, RecursionError):
        return False
    return True


def _type_name(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
