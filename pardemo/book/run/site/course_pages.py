"""Two pages of the site for those who learn or teach: what each chapter says to remember, and all problems."""

import html
import re
from collections.abc import Sequence
from pathlib import Path

from pardemo import project
from pardemo.book.contents import CHAPTERS
from pardemo.book.page.problems import problems
from pardemo.book.run.report import pages

CARDS, PROBLEMS = "cards.html", "problems.html"
TITLES = {CARDS: "Cards", PROBLEMS: "Problems"}


def bodies(run: Path, names: Sequence[str]) -> dict[str, str]:
    """File -> HTML of the pages, over the chapters of a run that are among ``names``, in their order."""
    return {CARDS: _cards(run, names), PROBLEMS: _problems(run, names)}


def remembered(run: Path, name: str) -> str:
    """The list below a notebook's heading *Remember*, as Markdown; "" where it has none."""
    import nbformat

    notebook = nbformat.read(run / f"{name}.ipynb", as_version=4)
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    section = re.search(r"^## Remember\n+(.*?)(?=^## |\Z)", text, flags=re.M | re.S)
    kept = section[1].strip() if section else ""
    introduction, _, rest = kept.partition("\n\n")
    return rest.strip() if introduction.endswith(":") else kept  # it introduces a drawing, which a card has not


def _cards(run: Path, names: Sequence[str]) -> str:
    from nbconvert.filters import markdown2html

    parts = ["<h1>Cards</h1><p>What each chapter says to remember. Its title leads to where it is shown.</p>"]
    for name in names:
        if kept := remembered(run, name):
            parts += [_heading(run, name), pages.linked(markdown2html(kept), set(names))]
    return "\n".join(parts)


def _problems(run: Path, names: Sequence[str]) -> str:
    lead = "Five for each chapter, each with a number as its answer. What is needed stands on the chapter's page."
    parts = [f"<h1>Problems</h1><p>{lead} The way there is folded.</p>"]
    for name in names:
        if (chapter := project.chapter_name(name)) in CHAPTERS:
            parts += [_heading(run, name), problems(chapter)._repr_html_()]
    return "\n".join(parts)


def _heading(run: Path, name: str) -> str:
    title = html.escape(pages.notebook_title(run, name))
    return f'<h2 id="{pages.slug(title)}"><a href="{name}.html">{title}</a></h2>'
