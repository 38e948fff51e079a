"""Writes a run's report: ``report.html``, and a page for each notebook beside it.

Every page stands alone: style, pictures and the filters' script are inside, so that it opens from the file system,
without a server and without requests, on a phone as on a desk, light or dark.
"""

import json
from pathlib import Path
from typing import Any

from pardemo import claims, project
from pardemo.book.run import endings, scorecard
from pardemo.book.run.endings import NotebookEnding
from pardemo.book.run.report import pages
from pardemo.claims import ClaimRow, lines
from pardemo.draw import page_style, pictures

TEMPLATES = Path(__file__).resolve().parent


def write_pages(folder: Path, ended: list[NotebookEnding], rows: list[ClaimRow], into: Path | None = None) -> Path:
    """Builds the pages from a run's outcomes and claims, and from the executed copies and pictures in ``folder``.

    They go ``into`` another folder, or beside the copies.
    """
    into = into or folder
    addresses = {claim: pages.to_page(address) for claim, address in scorecard.links(folder, rows).items()}
    there = [outcome.notebook for outcome in ended if pages.executed_copy(folder, outcome.notebook)]
    by_notebook: dict[str, list[ClaimRow]] = {outcome.notebook: [] for outcome in ended}
    for row in rows:
        by_notebook.setdefault(row["notebook"], []).append(row)
    chapters = [_chapter(folder, each, by_notebook[each.notebook], addresses, each.notebook in there) for each in ended]
    for name in there:
        pages.write_page(folder, name, chapters, into)
    measured = [row for row in rows if row["notebook"] != scorecard.OWN]
    statements = scorecard.by_statement(measured, scorecard.chapters_of(there))
    table_rows = [_table_row(row, addresses[row["id"]]) for row in rows]
    page = (
        environment()
        .get_template("report.html.j2")
        .render(
            chapters=chapters,
            claims=len(claims.by_claim(rows)),
            rows=table_rows,
            failing=[row for row in table_rows if row["verdict"] == "fails"],
            counts=claims.counts(rows),
            by_evidence=scorecard.totals(rows, "evidence"),
            evidence=claims.EVIDENCE,
            verdicts=claims.VERDICTS,
            statements=statements,
            slips=len(scorecard.slips(statements)),
            judgements=scorecard.JUDGEMENTS,
            addresses=addresses,
            papers=scorecard.by_paper(measured),
            overview=next((p for c in chapters for p in c["pictures"] if p["name"] == "scorecard_ratios"), None),
            machine=_json(folder / "machine.json"),
            bench=[{**row, "part": row["name"].partition(".")[0]} for row in _json(folder / "bench.json") or []],
        )
    )
    path = into / "report.html"
    project.write_text(path, page)
    return path


def rebuild(folder: Path, into: Path | None = None) -> Path:
    """The pages of a finished run again, from what it left; ``into`` another folder, or beside it.

    Raises:
        FileNotFoundError: the folder holds no run.
    """
    ended = endings.finished(folder)
    if not ended:
        raise FileNotFoundError(f"no run in {folder}: `pardemo run` makes one, or name a run's folder")
    try:
        rows = claims.read(folder)
    except FileNotFoundError:  # it failed before its first claim
        rows = []
    return write_pages(folder, ended, rows, into)


def _chapter(
    folder: Path, outcome: NotebookEnding, booked: list[ClaimRow], addresses: dict[str, str], has_page: bool
) -> dict[str, Any]:
    name = outcome.notebook
    drawn = [_picture(p) for p in pictures.of_notebook(folder, name)]
    own_claims = [_claim(cases, addresses) for cases in claims.by_claim(booked).values()]
    return {
        "outcome": outcome,
        "name": name,
        "number": name[:2],
        "title": pages.notebook_title(folder, name),
        "page": f"{name}.html" if has_page else None,
        "question": pages.notebook_question(folder, name),
        "claims": own_claims,
        "sections": _by_section(own_claims, scorecard.sections(folder, name)),
        "counts": claims.counts(booked),
        "pictures": drawn,
        "drawn": len(drawn),
    }


def _by_section(booked: list[dict[str, Any]], headings: dict[str, str]) -> dict[str, list[dict[str, Any]]]:
    """A chapter's claims by the section that shows them, as it asks; in the order of the page."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for claim in booked:
        grouped.setdefault(headings.get(claim["id"], ""), []).append(claim)
    return grouped


def _claim(cases: list[ClaimRow], addresses: dict[str, str]) -> dict[str, Any]:
    """A claim with its cases; what is said of all of them once."""
    first = cases[0]
    tolerance = f"Tolerance: {first['because'].removesuffix('.')}." if first["because"] else ""
    source = f"Source: {first['source'].removesuffix('.')}." if first["source"] else ""
    return {
        "id": first["claim"],
        "statement": first["statement"],
        "address": addresses[first["id"]],
        "evidence": "|".join(dict.fromkeys(row["evidence"] for row in cases)),
        "verdicts": "|".join(dict.fromkeys(row["verdict"] for row in cases)),
        "rows": [_table_row(row, addresses[row["id"]]) for row in cases],
        "sentences": [
            *lines.sentences(cases),
            *filter(None, (tolerance, source)),
        ],
    }


def _table_row(row: ClaimRow, address: str) -> dict[str, Any]:
    """A case as the report shows it: the unit stands before the tolerance, ``5.64 % ± 10 %``, as in the chapters."""
    predicted, plus_minus, tolerance = claims.predicted_text(row).partition(" ± ")
    return {
        **row,
        "predicted": f"{predicted} {row['unit']}".strip() + plus_minus + tolerance if predicted else "",
        "measured": claims.short(row["measured"]),
        "address": address,
    }


def _picture(path: Path) -> dict[str, Any]:
    """What the report says of a picture, which a browser loads when its part is opened."""
    return {"name": path.stem, **vars(pictures.read_picture(path.read_text(encoding="utf-8")))}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def environment(*folders: Path):
    """Jinja's, for the templates of these folders and of this package, and for the style that all pages have."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader([*folders, TEMPLATES, page_style.FILE.parent])
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
