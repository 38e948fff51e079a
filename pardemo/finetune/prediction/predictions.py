"""``generated_predictions.jsonl`` as the article's tool wrote it: a row of prompt, label and predict on every line."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pardemo import project

FILE_NAME = "generated_predictions.jsonl"
_NAMED = 3  # bad lines named in one error


def read(path: str | Path, *needed: str) -> list[dict[str, Any]]:
    """The rows of such a file; blank lines are none, keys beyond ``prompt``, ``label`` and ``predict`` are kept.

    Args:
        needed: further keys that every row must have.

    Raises:
        ValueError: lines that are no such rows, by number and reason; or no row at all.
    """
    rows, bad = [], []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    rows.append(_row(line, needed))
            except ValueError as error:
                bad.append(f"line {number} {error}")
    if bad:
        more = f"; and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        raise ValueError(f"{path}: " + "; ".join(bad[:_NAMED]) + more)
    if not rows:
        raise ValueError(f"{path} holds no row")
    return rows


def write(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes rows that :func:`read` reads back; a file of that name is a whole one."""
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def fill(temporary: Path) -> None:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(lines)

    project.write_atomically(Path(path), fill)


def _row(line: bytes, needed: tuple[str, ...]) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("is not an object in braces")
    for key in ("label", "predict", *needed):
        if key not in row:
            raise ValueError(f'has no "{key}"')
    for key in ("label", "predict"):
        if not isinstance(row[key], str):
            raise ValueError(f'has a "{key}" that is not text')
    return row
