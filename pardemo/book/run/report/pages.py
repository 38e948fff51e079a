"""An executed notebook as one page, through nbconvert: no script and no style from elsewhere, the pictures inside.

nbconvert's own pages ask two servers for MathJax and require.js. Here its bare template gives the body alone. Formulas
still show, since the notebooks write them as text (2(N−1)/N·S), which every reader, terminal and page has a font for.
"""

import base64
import html
import re
import struct
from functools import cache
from pathlib import Path
from typing import Any

from pardemo import compat, project
from pardemo.draw import pictures

#: Pixels that a phone of 390 has between the page's margins.
PHONE_PX = 372


def executed_copy(folder: Path, name: str) -> Path | None:
    """The executed copy of a notebook in a run's folder, where there is one."""
    path = folder / f"{name}.ipynb"
    return path if path.is_file() else None


def to_page(address: str) -> str:
    """The address of a cell in an executed copy, as that of the same cell in its page."""
    return re.sub(r"^(\d\d_\w+)\.ipynb", r"\1.html", address)


def notebook_title(folder: Path, name: str) -> str:
    """The first heading of a notebook without its number; its name where it has none."""
    notebook = _notebook(folder, name)
    cells = notebook.cells if notebook else []
    headings = (line for c in cells if c.cell_type == "markdown" for line in c.source.splitlines() if line[:2] == "# ")
    return re.sub(rf"^# (?:{name[:2]}\s+)?", "", next(headings, name))


def notebook_question(folder: Path, name: str) -> str:
    """Returns the question that a notebook answers, from its metadata; empty where it has none."""
    notebook = _notebook(folder, name)
    return str(notebook.metadata.get("pardemo", {}).get("question", "")) if notebook else ""


def _notebook(folder: Path, name: str) -> Any:
    """A notebook's executed copy, else the collection's; None where neither can be read."""
    import nbformat

    path = executed_copy(folder, name) or project.root() / "notebooks" / f"{name}.ipynb"
    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, nbformat.ValidationError):  # a notebook that was not run, or half a file
        return None


def write_page(folder: Path, name: str, chapters: list[dict[str, Any]], into: Path) -> Path:
    """Writes ``<name>.html`` into a folder, from the executed copy in ``folder``.

    Args:
        chapters: of the run, in order, each with ``name``, ``number``, ``title`` and ``page`` (None where it has none).
    """
    from pardemo.book.run.report import environment

    body = _addressed(_exporter().from_notebook_node(_with_drawings(folder, name))[0])
    there = [chapter for chapter in chapters if chapter["page"]]
    number = [chapter["name"] for chapter in there].index(name)
    page = (
        environment()
        .get_template("page.html.j2")
        .render(
            body=_unbroken(_legible(linked(body, {chapter["name"] for chapter in there}))),
            chapter=there[number],
            before=there[number - 1] if number else None,
            after=there[number + 1] if number + 1 < len(there) else None,
            sections=sections(body),
            asks="data-question=" in body,
            highlight=highlight(),
        )
    )
    path = into / f"{name}.html"
    project.write_text(path, page)
    return path


def _with_drawings(folder: Path, name: str) -> Any:
    """A notebook's executed copy, its pictures as the SVG files that they name, where the run has these."""
    import nbformat

    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    for output in (output for cell in notebook.cells for output in cell.get("outputs", [])):
        file = output.get("metadata", {}).get("image/png", {}).get("file", "")
        path = folder / "figures" / Path(file).name
        if file and path.is_file():
            output.data["image/svg+xml"] = path.read_text(encoding="utf-8")
    return notebook


def _addressed(body: str) -> str:
    """Each section's heading has an address, a number behind it where two are alike."""
    given: dict[str, int] = {}

    def with_address(heading: re.Match) -> str:
        address = slug(heading[1])
        given[address] = given.get(address, 0) + 1
        number = "" if given[address] == 1 else f"-{given[address]}"
        return f'<h2 id="{address}{number}">{heading[1]}</h2>'

    return re.sub(r"<h2>(.*?)</h2>", with_address, body, flags=re.S)


def slug(text: str) -> str:
    """A heading's address, as GitHub makes it."""
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", re.sub(r"<[^>]+>", "", text).strip().lower()))


def sections(body: str) -> list[tuple[str, str]]:
    """Address and text of the headings below a page's own."""
    headings = re.findall(r'<h2 id="([^"]+)"[^>]*>(.*?)</h2>', body, flags=re.S)
    return [(anchor, re.sub(r"<[^>]+>", "", text)) for anchor, text in headings]


@cache
def _exporter():
    """nbconvert's own for HTML, without two passes that took two thirds of a report's time.

    One cleans code that Pygments has escaped. The other parses the page again, to call pictures without a description
    that; those of the collection have one (a test asks for it).
    """
    from nbconvert import HTMLExporter
    from nbconvert.exporters import TemplateExporter
    from nbconvert.filters.highlight import Highlight2HTML
    from nbconvert.filters.widgetsdatatypefilter import WidgetsDataTypeFilter
    from traitlets.config import Config

    class Exporter(HTMLExporter):
        def from_notebook_node(self, nb, resources=None, **kw):
            resources = compat.exporter_resources(self, resources)
            lexer = nb.metadata.get("language_info", {}).get("pygments_lexer", "ipython3")
            self.register_filter("highlight_code", Highlight2HTML(pygments_lexer=lexer, parent=self))
            metadata = compat.exporter_metadata(self)
            widgets_filter = WidgetsDataTypeFilter(notebook_metadata=metadata, parent=self, resources=resources)
            self.register_filter("filter_data_type", widgets_filter)
            return TemplateExporter.from_notebook_node(self, nb, resources, **kw)

    config = Config()
    config.HighlightMagicsPreprocessor.enabled = True
    config.HighlightMagicsPreprocessor.languages = dict.fromkeys(("%%ranks", "%%writefile"), "python3")  # as well
    config.CoalesceStreamsPreprocessor.enabled = True  # one print is one block, however the kernel sent it
    escaped = '<div class=" highlight '  # by Pygments; a raw cell is not
    filters = {"clean_html": lambda code: code if code.startswith(escaped) else html.escape(code)}
    folder = str(Path(__file__).resolve().parent)  # of cells.html.j2, which folds what the notebook does
    templates = {"template_name": "basic", "template_file": "cells.html.j2", "extra_template_paths": [folder]}
    return Exporter(**templates, exclude_anchor_links=True, filters=filters, config=config)


def linked(body: str, notebooks: set[str]) -> str:
    """Links to other notebooks lead to their pages, where the run has them."""

    def page(link: re.Match) -> str:
        return f'href="{link[1]}.html' if link[1] in notebooks else link[0]

    return re.sub(r'href="(\d\d_\w+)\.ipynb', page, body)


def _legible(body: str) -> str:
    """Pictures fit the screen, but their smallest words stay legible: where there is no room for that, they scroll.

    Where a tenth is missing on a phone, the words are that much smaller, and nothing scrolls.
    """

    def drawn(tag: re.Match) -> str:
        svg = base64.b64decode(tag[1]).decode()
        try:
            saved = pictures.read_picture(svg)
        except ValueError:  # a reader's own
            return tag[0]
        least = saved.least if saved.least > 1.1 * PHONE_PX else min(saved.least, PHONE_PX)
        size = f'width="{saved.width}" height="{saved.height}" style="min-width: {least}px"'
        return f'<img alt="{html.escape(saved.alt)}" {size} src="data:image/svg+xml;base64,{tag[1]}"'

    def sized(tag: re.Match) -> str:
        width, height = struct.unpack(">II", base64.b64decode(tag[2][:32])[16:24])  # of a PNG's header
        least = f'style="min-width: {width // 2}px"'
        attributes = re.sub(r' style="[^"]*"', "", tag[1])
        return f'{attributes} width="{width}" height="{height}" {least} src="data:image/png;base64,{tag[2]}'

    body = re.sub(r'<img src="data:image/svg\+xml;base64,([\w+/=]+)"', drawn, body)
    return re.sub(r'(<img\b[^>]*?) src="data:image/png;base64,([\w+/]{32})', sized, body)


#: Code and pictures, whose spaces are their own; cells of tables, which are narrow on a phone; and tags.
_NO_WORDS = re.compile(r"(<(pre|script|style|svg|td)\b.*?</\2>|<[^>]*>)", flags=re.S)
#: 1 S ± 0.5 %; t = 4; N · α · B.
_ONE_NUMBER = re.compile(r"(?<=±) | (?=±)|(?<=\d) (?=%|\S+ ±)|(?<=\b\w) (?== \d)|(?<=\b\w =) (?=\d)|(?<=·) | (?=·)")
#: 2.5e-07, t-th, ZeRO-3: a hyphen is a place to break.
_ONE_WORD = re.compile(r"\b(\d[\d.]*e-\d+|\w-th|ZeRO-\w)\b")
#: An option of a command in code: --stop.
_OPTION = re.compile(r"(?<!\S)(-[\w-]{1,24})(?!\S)")
_UNBROKEN = r'<span class="unbroken">\1</span>'


def _unbroken(body: str) -> str:
    """No line ends inside of a number, a letter's value, or an option or a short name in code, such as ``--get``."""

    def words(text: str) -> str:
        return _ONE_WORD.sub(_UNBROKEN, _ONE_NUMBER.sub("\N{NO-BREAK SPACE}", text))

    parts, at = [], 0
    for other in _NO_WORDS.finditer(body):
        parts += [words(body[at : other.start()]), other[0]]
        at = other.end()
    body = "".join([*parts, words(body[at:])])
    body = re.sub(r"<code>(?=[^<\s]{1,24}</code>)", '<code class="unbroken">', body)
    return re.sub(r"(?<=<code>)[^<]*(?=</code>)", lambda code: _OPTION.sub(_UNBROKEN, code[0]), body)


@cache
def highlight() -> str:
    """Colours of code, light and dark."""
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=s).get_style_defs(".highlight") for s in ("default", "github-dark"))
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
