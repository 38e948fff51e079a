"""A run's claims gathered: by statement of the article, by chapter, by evidence; their ratios, and where each is shown.

*The scorecard* and the report of a run read the same functions.
"""

import csv
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pardemo import claims, project
from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.claims import ClaimRow

OWN = notebook_of("scorecard")
JUDGEMENTS = {"ok": "right", "if": "right under a condition", "no": "wrong or garbled", "doc": "told, not measured"}


@dataclass(frozen=True)
class RecordedRun:
    """The claims of the chapters that a run has, without the scorecard's own, and a sentence about which run it is."""

    folder: Path
    rows: list[ClaimRow]
    told: str

    @property
    def links(self) -> dict[str, str]:
        """The links of :func:`links`; none where the run lies in another folder than what is being written."""
        return links(self.folder, self.rows) if self.folder == project.output_dir() else {}

    @property
    def chapters(self) -> list[str]:
        return sorted({row["notebook"] for row in self.rows})


def find() -> RecordedRun:
    """The run to read: the one going on, else ``outputs/latest``, else the committed ``outputs/reference``.

    Raises:
        FileNotFoundError: no chapter has left a claim in any of them.
    """
    output_dir = project.output_dir()
    outputs = project.root() / "outputs"
    for folder in dict.fromkeys((output_dir, outputs / "latest", outputs / "reference")):
        rows = read_claims(folder)
        if rows:
            return RecordedRun(folder, rows, _which_run(folder, output_dir, rows))
    raise FileNotFoundError("no run has left claims yet: `pardemo run` executes all chapters, `pardemo run 01` one")


def read_claims(folder: Path) -> list[ClaimRow]:
    """The claims that the chapters left in a folder; none where it has none."""
    try:
        return [row for row in claims.read(folder) if row["notebook"] != OWN]
    except FileNotFoundError:
        return []


def statements() -> list[dict[str, str]]:
    """The article's statements: id, section, what it says, judgement (ok, if, no, doc), what is true, chapters."""
    with (Path(__file__).parent / "statements.csv").open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def _which_run(folder: Path, output_dir: Path, rows: list[ClaimRow]) -> str:
    with_claims = {row["notebook"] for row in rows}
    chapters = [name for name in project.notebooks() if name != OWN]
    missing = [name[:2] for name in chapters if name not in with_claims]
    inside = folder.is_relative_to(project.root())
    name = folder.relative_to(project.root()) if inside else folder.name
    which = "This run" if folder == output_dir else f"This run has no other chapter, so what is read is {name}"
    count = f"{len(chapters) - len(missing)} of {len(chapters)} chapters"
    return f"{which}: {count}" + (f"; without {', '.join(missing)}." if missing else ".")


def ratio(row: ClaimRow) -> float | None:
    """Measured over predicted; over the bound, where a bound is claimed. None for texts, truths and nothing measured.

    What is predicted to be 0 and is 0 has the ratio 1; there is none where it is not 0.
    """
    predicted, measured = row["predicted"], row["measured"]
    if any(isinstance(value, (bool, str, type(None))) for value in (predicted, measured)):
        return None
    if predicted == 0:
        return 1.0 if measured == 0 else None
    return measured / predicted


def places(folder: Path, notebook: str) -> dict[str, str]:
    """claim id -> id of the first cell of the executed copy that shows it."""
    return {claim: cell for claim, (cell, _) in _shown(folder, notebook).items()}


def sections(folder: Path, notebook: str) -> dict[str, str]:
    """claim id -> heading of the section of the executed copy that shows it first, without its number."""
    return {claim: heading for claim, (_, heading) in _shown(folder, notebook).items()}


def _shown(folder: Path, notebook: str) -> dict[str, tuple[str, str]]:
    """claim id -> id of the first cell that shows it, and the heading above that."""
    try:
        cells = json.loads((folder / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError, KeyError):
        return {}
    shown: dict[str, tuple[str, str]] = {}
    heading = ""
    for cell in cells:
        if cell["cell_type"] == "markdown":
            headings = re.findall(r"^## (?:\d+ )?(.+)$", "".join(cell["source"]), re.M)
            heading = headings[-1] if headings else heading
        for output in cell.get("outputs", []):
            table = "".join(output.get("data", {}).get("text/html", []))
            for claim in re.findall(r'data-claim="([^"]+)"|>\s*([a-z0-9_]+\.[a-z0-9_.]+)\s*<', table):
                shown.setdefault("".join(claim), (cell.get("id", ""), heading))
    return shown


def links(folder: Path, rows: Iterable[ClaimRow]) -> dict[str, str]:
    """claim id -> address of the cell that shows it, relative to the run's folder, as JupyterLab follows it."""
    addresses: dict[str, str] = {}
    cells: dict[str, dict[str, str]] = {}  # notebook -> claim id -> id of the cell
    for row in rows:
        notebook = row["notebook"]
        if notebook not in cells:
            cells[notebook] = places(folder, notebook)
        cell = cells[notebook].get(row["claim"])
        addresses[row["id"]] = f"{notebook}.ipynb" + (f"#cell-id={cell}" if cell else "")
    return addresses


def by_statement(rows: list[ClaimRow], existing: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """A row for each of the article's statements: what it says, what is true, and what this run found.

    Args:
        rows: a run's claims. existing: the chapters that the run has, by default those with claims.
    """
    existing_chapters = chapters_of(row["notebook"] for row in rows) if existing is None else set(existing)
    statement_rows = []
    for statement in statements():
        booked = [row for row in rows if row["id"].startswith(statement["id"] + ".")]
        chapters = statement["chapters"].split()
        claimed = chapters_of(row["notebook"] for row in booked)
        missing = [chapter for chapter in chapters if chapter not in existing_chapters | claimed]
        statement_rows.append(
            {
                **statement,
                "judgement": JUDGEMENTS[statement["judgement"]],
                "chapters": chapters,
                "claims": booked,
                "verdict": _verdict(statement["judgement"], booked, missing),
            }
        )
    return statement_rows


def chapters_of(notebooks: Iterable[str]) -> set[str]:
    """The chapters of these notebooks, by name."""
    return {project.chapter_name(notebook) for notebook in notebooks}


def title_of(chapter: str) -> str:
    """A chapter's title, as readers know it; its name where the book has no such chapter."""
    return CHAPTERS.get(chapter, chapter)


def _verdict(judgement: str, booked: list[ClaimRow], missing: list[str]) -> str:
    parts = [f"{count} × {verdict}" for verdict, count in claims.counts(booked).items() if count]
    if missing:
        parts.append(f"{' and '.join(map(title_of, missing))} not in this run")
    if not parts:
        return "told in the chapter's text" if judgement == "doc" else "no claim"
    return ", ".join(parts)


def slips(statements: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows of :func:`by_statement` in which the article needs a correction or a condition."""
    return [row for row in statements if row["judgement"] in (JUDGEMENTS["no"], JUDGEMENTS["if"])]


def totals(rows: list[ClaimRow], key: Literal["notebook", "evidence"]) -> list[dict[str, Any]]:
    """Claims by ``notebook`` or ``evidence``: how many, in how many cases, and how many cases of each verdict."""
    table = []
    for name in sorted({row[key] for row in rows if row[key]}):
        booked = [row for row in rows if row[key] == name]
        table.append({key: name, **_sizes(booked), **claims.counts(booked)})
    return [*table, {key: "all", **_sizes(rows), **claims.counts(rows)}]


def _sizes(rows: list[ClaimRow]) -> dict[str, int]:
    return {"claims": len(claims.by_claim(rows)), "cases": len(rows)}


#: What a source's number or name stands for.
PAPERS = {
    "1910.02054": "Rajbhandari et al. 2020, ZeRO",
    "1909.08053": "Shoeybi et al. 2019, Megatron-LM",
    "2104.04473": "Narayanan et al. 2021, Megatron-LM on clusters",
    "2205.05198": "Korthikanti et al. 2022, activation recomputation",
    "Patarasuk & Yuan": "Patarasuk & Yuan 2009, ring all-reduce",
    "Li et al. 2014": "Li et al. 2014, parameter server",
    "Li et al. 2020": "Li et al. 2020, PyTorch DDP",
}


def by_paper(rows: list[ClaimRow]) -> list[dict[str, Any]]:
    """For each section or table of a paper: its claims in this run, by verdict, and how far off the equalities are."""
    table = []
    for source in sorted({row["source"] for row in rows if row["source"].startswith(tuple(PAPERS))}):
        booked = [row for row in rows if row["source"] == source]
        equal = [row for row in booked if row["relation"] == "equal" and row["verdict"] == "holds"]
        off = [abs(value - 1) for row in equal if (value := ratio(row)) is not None]
        paper = next(name for start, name in PAPERS.items() if source.startswith(start))
        verdicts_text = ", ".join(f"{n} {verdict}" for verdict, n in claims.counts(booked).items() if n)
        table.append(
            {
                "paper": paper,
                "source": source,
                **_sizes(booked),
                "verdicts": verdicts_text,
                "evidence": ", ".join(sorted({row["evidence"] for row in booked if row["evidence"]})),
                "largest deviation of those that hold": f"{max(off):.2%}" if off else "",
            }
        )
    return table


def points(rows: Iterable[ClaimRow]) -> list[tuple[float, str]]:
    """For the picture of all ratios: each claim's ratio, and its verdict, or its bound where one is claimed."""
    ratios = []
    for row in rows:
        value = ratio(row)
        if value is not None:
            bound = row["verdict"] == "holds" and row["relation"] != "equal"
            ratios.append((value, row["relation"] if bound else row["verdict"]))
    return ratios
