"""Summarises a run: the book's findings, each with its picture and claims; what is furthest off; the papers."""

import base64
import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pardemo import claims, project
from pardemo.book.contents import CHAPTERS
from pardemo.book.run import scorecard
from pardemo.claims import ClaimRow
from pardemo.claims.lines import Line
from pardemo.draw import pictures
from pardemo.formulas import published

if TYPE_CHECKING:
    from IPython.display import HTML

WIDTH = 620  # pixels: ten of them on one page


class Finding:
    """Shows in a notebook; the picture leads to its chapter.

    Args:
        run: the run that is read (:func:`pardemo.book.run.scorecard.find`).
        picture: a figure's name without its ending, which begins with its chapter's name.
        about: ids of claims, each shown as its chapter shows it.
    """

    def __init__(self, run: scorecard.RecordedRun, picture: str, *about: str):
        self._run, self._picture, self._about = run, picture, about
        rows_by_claim = claims.by_claim(run.rows)
        self._lines = [Line(rows_by_claim[claim]) for claim in about if claim in rows_by_claim]
        self._missing = [claim for claim in about if claim not in rows_by_claim]

    def __repr__(self) -> str:
        return "\n".join([*map(repr, self._lines), *self._left_out()])

    def _repr_html_(self) -> str:
        lines = "".join(line._repr_html_() for line in self._lines)
        missing = "".join(f"<div>{html.escape(text)}</div>" for text in self._left_out())
        return f"{self._image()}{lines}{missing}"

    def _left_out(self) -> list[str]:
        return [f"Not in this run: {', '.join(self._missing)}."] if self._missing else []

    def _image(self) -> str:
        path = self._run.folder / "figures" / f"{self._picture}.svg"
        if not path.is_file():
            return f"<div>Not in this run: the picture {html.escape(self._picture)}.</div>"
        svg = path.read_text(encoding="utf-8")
        size, data = pictures.read_picture(svg), base64.b64encode(svg.encode()).decode()
        image_tag = (
            f'<img alt="{html.escape(size.alt)}" style="width:{WIDTH}px;min-width:{size.least}px;max-width:100%" '
            f'src="data:image/svg+xml;base64,{data}">'
        )
        chapter = self._chapter(path)
        inside = f'<a href="{chapter}">{image_tag}</a>' if chapter else image_tag
        return f'<div style="overflow-x:auto">{inside}</div>'

    def _chapter(self, path: Path) -> str:
        """The notebook that left the picture: the one whose name the picture's begins with."""
        rows_by_claim = claims.by_claim(self._run.rows)
        notebooks = [rows_by_claim[claim][0]["notebook"] for claim in self._about if claim in rows_by_claim]
        drawn = [
            name for name in [*notebooks, *self._run.chapters] if path.stem.startswith(f"{project.chapter_name(name)}_")
        ]
        return f"{drawn[0]}.ipynb" if drawn else ""


def furthest(rows: Iterable[ClaimRow], most: int = 5) -> "HTML":
    """The claims that are off by the largest factors, one line each: the case that is furthest, and why."""
    from IPython.display import HTML

    furthest_by_claim: dict[str, tuple[float, ClaimRow]] = {}
    for row in rows:
        value = scorecard.ratio(row) if row["verdict"] == "off" else None
        if value and value > 0:
            factor = max(value, 1 / value)
            furthest_by_claim[row["claim"]] = max(
                furthest_by_claim.get(row["claim"], (0.0, row)), (factor, row), key=lambda pair: pair[0]
            )
    ranked = sorted(furthest_by_claim.values(), key=lambda pair: -pair[0])[:most]
    return HTML("".join(_missed(factor, row) for factor, row in ranked) or "<p>None.</p>")


def _missed(factor: float, row: ClaimRow) -> str:
    case = f" ({html.escape(row['case'])})" if row["case"] else ""
    figures = f"{claims.predicted_text(row)}, found {claims.short(row['measured'])} {row['unit']}".strip()
    return (
        f"<p><b>× {factor:.1f}</b> {html.escape(row['statement'])}{case}: {html.escape(figures)}.<br>"
        f"<small>{html.escape(row['reason'].rstrip('.'))}. ({_link(row)})</small></p>"
    )


def _link(row: ClaimRow) -> str:
    """To a claim's chapter, by its title; the claim's id is a hover text."""
    title = CHAPTERS.get(project.chapter_name(row["notebook"]), row["notebook"])
    return f'<a href="{row["notebook"]}.ipynb" title="{html.escape(row["claim"])}">{html.escape(title)}</a>'


def of_papers(rows: Sequence[ClaimRow]) -> list[dict[str, Any]]:
    """For each paper its cases by verdict, and how far measured and printed are apart at most."""
    table = []
    for start, name in scorecard.PAPERS.items():
        chosen = [row for row in rows if row["source"].startswith(start)]
        equal = [row for row in chosen if row["relation"] == "equal" and scorecard.ratio(row)]
        near = [abs(scorecard.ratio(row) - 1) for row in equal if row["verdict"] == "holds"]
        far = [scorecard.ratio(row) for row in equal if row["verdict"] in ("differs", "off")]
        far = [max(value, 1 / value) for value in far if value > 0]
        counted = claims.counts(chosen)
        if chosen:
            table.append(
                {"paper": name, **{kind: str(counted[kind]) for kind in ("holds", "differs", "off")},
                 "holds within": f"{max(near):.1%}" if near else "", "others up to": f"× {max(far):.1f}" if far else ""}
            )  # fmt: skip
    return table


def rows_of_table_2() -> tuple[int, int]:
    """Counts the cells of ZeRO's Table 2 below its first row, and those that are that row times MP, as printed.

    0.5T, 1T and 2T are printed with one digit: 512, 1,024 and 2,048 billion within 2.4 %.
    """
    cells = list(published.zero_table_2())
    first = {cell.column: float(cell.printed) for cell in cells if cell.row.startswith("MP 1,")}
    below = [cell for cell in cells if not cell.row.startswith("MP 1,")]
    follow = 0
    for cell in below:
        expected = first[cell.column] * int(cell.row.split()[1].strip(","))
        within = 0.024 if "p" in cell.column[-2:] else 1e-9
        follow += abs(float(cell.printed) - expected) <= within * expected
    return len(below), follow
