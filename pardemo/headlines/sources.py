"""The real data sets as their owners publish them, turned record by record into the article's form.

=========  ======================  ==========================================================  ==================
source     data set                files                                                       input → output
=========  ======================  ==========================================================  ==================
csl        neuclir/csl             csl.jsonl.gz                                                abstract → title,
                                                                                               keywords, category
lcsts      hugcyp/LCSTS            train.jsonl, valid.jsonl, test_public.jsonl                 text → summary
xlsum-zh   csebuetnlp/xlsum        chinese_simplified_*.jsonl                                  text → title
xlsum-en   csebuetnlp/xlsum        english_*.jsonl                                             text → title
=========  ======================  ==========================================================  ==================

They are read from a folder, or by name through ``datasets``. None of them is part of this project, and each has a
licence of its own (XL-Sum: not for commercial use; LCSTS states none).
"""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pardemo.headlines.rows import BadRow, is_unicode
from pardemo.project import one_line, refuse_pointer

SOURCES = ("csl", "lcsts", "xlsum-zh", "xlsum-en")
TASKS = ("title", "keywords", "category")  # of csl; the others have the title alone

INSTRUCTIONS = {
    ("csl", "title"): "请根据下面的论文摘要拟一个题目：\n",
    ("csl", "keywords"): "请写出下面这篇论文摘要的关键词，用分号隔开：\n",
    ("csl", "category"): "请判断下面的论文摘要属于哪个学科门类：\n",
    ("lcsts", "title"): "请把下面这条新闻缩写成一个标题：\n",
    ("xlsum-zh", "title"): "请给下面这篇报道拟一个标题：\n",
    ("xlsum-en", "title"): "Write a headline for this news story:\n",
}

#: Data set -> {configuration: source}, as ``datasets`` names them.
DATASETS: dict[str, dict[str | None, str]] = {
    "neuclir/csl": {None: "csl"},
    "hugcyp/LCSTS": {None: "lcsts"},
    "csebuetnlp/xlsum": {"chinese_simplified": "xlsum-zh", "english": "xlsum-en"},
}
# The hub's own Parquet copy: data sets that are defined by a script can be read so, and no script is run.
REVISION = "refs/convert/parquet"


class Record(NamedTuple):
    """One row of a source: its line (or number), its value, or why it has none."""

    line: int
    value: Any
    reason: str | None = None


class FileInput(NamedTuple):
    """A ``.jsonl`` or ``.jsonl.gz`` file of one source."""

    name: str
    source: str
    path: Path

    def records(self) -> Iterator[Record]:
        """Raises ValueError where the file ends early or is a git-lfs pointer, OSError where it cannot be read."""
        number, path = 0, self.path
        with path.open("rb") as file:
            refuse_pointer(path, file.read(100), "data")
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _parsed(number, line)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is cut off or damaged after line {number}: download it again") from error

    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class HubInput:
    """A data set by its name, streamed."""

    def __init__(self, dataset: str, configuration: str | None, source: str):
        self.name = dataset if configuration is None else f"{dataset}/{configuration}"
        self.dataset, self.configuration, self.source = dataset, configuration, source
        self._hash = hashlib.sha256()

    def records(self) -> Iterator[Record]:
        """Raises OSError where the data set cannot be reached."""
        import datasets

        try:
            splits = datasets.load_dataset(self.dataset, self.configuration, revision=REVISION, streaming=True)
            rows = (row for split in splits.values() for row in split)
            for number, row in enumerate(rows, start=1):
                self._hash.update(json.dumps(row, sort_keys=True).encode())
                yield Record(number, row)
        except Exception as error:  # of whatever library does the network today
            reason = f"cannot be read by name ({one_line(error)})"
            raise OSError(f"{self.name} {reason}: download it and name its folder") from error

    def sha256(self) -> str:
        """Returns the checksum of the rows read so far, as JSON with sorted keys: there is no file to sum."""
        return self._hash.hexdigest()


def find_sources(origins: Sequence[str], sources: Sequence[str] = SOURCES) -> list[FileInput | HubInput]:
    """Finds the sources wanted in the folders and data sets named, in a fixed order.

    Raises:
        ValueError: neither a folder nor a data set known; a folder without data; a file of no known source.
    """
    inputs: list[FileInput | HubInput] = []
    for origin in origins:
        if origin in DATASETS:
            inputs += [HubInput(origin, configuration, source) for configuration, source in DATASETS[origin].items()]
        else:
            inputs += _in_folder(Path(origin))
    if selected := [item for item in inputs if item.source in sources]:
        return selected
    names = ", ".join(sorted({item.source for item in inputs}))
    raise ValueError(f"{', '.join(origins)} holds {names}, nothing of {', '.join(sources)}")


def convert_record(record: Any, source: str, task_of: Callable[[str], str]) -> dict[str, str]:
    """A source's record as a row of the article's form; ``task_of`` says which task a text of csl is for.

    Raises:
        BadRow: what is missing or wrong.
    """
    if not isinstance(record, Mapping):
        raise BadRow("not an object")
    text = _text(record, "abstract" if source == "csl" else "text")
    task = task_of(text) if source == "csl" else "title"
    if task == "keywords":
        words = record.get("keywords")
        if not isinstance(words, list) or not all(isinstance(word, str) and is_unicode(word) for word in words):
            raise BadRow("keywords is not a list of texts" if words is not None else "missing field keywords")
        answer = "；".join(word.strip() for word in words if word.strip())
        if not answer:
            raise BadRow("empty keywords")
    else:
        answer = _text(record, "category" if task == "category" else "summary" if source == "lcsts" else "title")
    instruction = INSTRUCTIONS[source, task]
    return {"instruction": instruction, "input": text, "output": answer, "source": f"{source}/{task}"}


def _text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        raise BadRow(f"missing field {name}")
    if not isinstance(value, str):
        raise BadRow(f"{name} is not text")
    if not value.strip():
        raise BadRow(f"empty {name}")
    if not is_unicode(value):
        raise BadRow(f"{name} holds half a surrogate pair")
    return value.strip()


def _in_folder(origin: Path) -> list[FileInput]:
    if not origin.exists():
        raise ValueError(f"{origin} is neither a folder nor one of generated, {', '.join(DATASETS)}")
    files = [origin]
    if origin.is_dir():
        files = sorted(path for end in ("*.jsonl", "*.jsonl.gz") for path in origin.rglob(end))
    if not files:
        raise ValueError(f"no .jsonl or .jsonl.gz file in {origin} (archives have to be unpacked first)")
    return [FileInput(file.relative_to(origin.parent).as_posix(), _source_of(file), file) for file in files]


def _source_of(path: Path) -> str:
    """Which source a file is of: by the fields of its first good row, XL-Sum's language by its name."""
    records = FileInput(path.name, "", path).records()
    fields = next((set(r.value) for r in islice(records, 100) if isinstance(r.value, dict)), set())
    if {"abstract", "title", "keywords"} <= fields:
        return "csl"
    if {"text", "title", "url"} <= fields:
        for language, source in DATASETS["csebuetnlp/xlsum"].items():
            if any(part.startswith(str(language)) for part in path.parts[-2:]):
                return source
        raise ValueError(f"{path} is XL-Sum's, but neither chinese_simplified nor english by its name: move it away")
    if {"text", "summary"} <= fields:
        return "lcsts"
    fields_text = ", ".join(sorted(fields)) or "no row among the first hundred that is an object"
    raise ValueError(f"{path} is of none of the sources {', '.join(SOURCES)}: it has {fields_text}")


def _parsed(number: int, line: bytes) -> Record:
    try:
        return Record(number, json.loads(line.decode()))
    except UnicodeDecodeError:
        return Record(number, None, "not UTF-8")
    except (ValueError, RecursionError):
        return Record(number, None, "broken JSON")
