"""Writes a report as a screen and as a page from sections of lines, tables and charts.

The page is one file that asks no network, for a desk and a phone, light and dark.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import NamedTuple

from pardemo.draw import page_style
from pardemo.draw.palette import INK
from pardemo.tables import text_table

#: Characters of a screen's line, of a cell that is not broken on a page, and of one that is cut short on a screen.
WIDE, UNBROKEN, NARROW = 160, 16, 34
#: Characters of a screen's longest bar; a part of one on a page.
BAR, BAR_PART = 40, '<i style="width: {:.1f}%; background: {}"></i>'
STYLE = """
body { max-width: 60rem; }
h1, p, code { overflow-wrap: anywhere; } td code { white-space: nowrap; }
svg { margin: .4rem 0; }
li { margin: .3rem 0; }
details { margin: .8rem 0; } summary { cursor: pointer; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.1rem; padding: 0; margin: .3rem 0 .8rem;
  font-size: .95rem; max-width: 640px; }
.key i { display: inline-block; width: .9em; height: .9em; outline: 1px solid var(--line);
  border-radius: .15rem; vertical-align: -.1em; margin-right: .35em; }
.bar { display: flex; width: 18rem; height: 1.2em; } .bar i { outline: 1px solid var(--line); }
mark { display: inline-block; min-width: 1.2em; text-align: center; border-radius: .15rem; }
@media (max-width: 44rem) { nav { position: static; } }
"""


class Marked(NamedTuple):
    """A part of a line that is an HTML element of its own; on a screen it is its text, and ``b`` has brackets."""

    tag: str
    text: str
    attributes: str = ""


#: Words, or parts of them: what comes from a script is never markup.
Line = str | Sequence[str | Marked]


def plain_text(line: Line) -> str:
    """Returns a line as a screen has it."""
    parts = [line] if isinstance(line, str) else line
    return "".join(
        part if isinstance(part, str) else f" [{part.text}]" if part.tag == "b" and part.text else part.text
        for part in parts
    )


def html(line: Line) -> str:
    """Returns a line as a page has it."""
    made = ""
    for part in [line] if isinstance(line, str) else line:
        if isinstance(part, str):
            made += escape(part)
        elif part.text:
            made += f"{' ' * (part.tag == 'b')}<{part.tag}{part.attributes}>{escape(part.text)}</{part.tag}>"
    return made


def sentence(text: str) -> str:
    """Gives a text a capital and a full stop."""
    return text[:1].upper() + text[1:] + "."


def wrapped(text: str, width: int, first: int, further: int) -> list[str]:
    """Wraps a text to a screen's lines, with the indents of the first and of further lines."""
    return textwrap.wrap(
        text, width, initial_indent=" " * first, subsequent_indent=" " * further, break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip


@dataclass(frozen=True)
class Lines:
    """A list of lines, or, with another ``tag``, paragraphs.

    Args:
        indent: how far a line stands from a screen's edge, and what follows of it where it is long.
        on_screen: whether a screen has them, too.
    """

    lines: Sequence[Line]
    tag: str = "li"
    indent: tuple[int, int] = (2, 4)
    on_screen: bool = True

    def screen(self, width: int) -> list[str]:
        lines = self.lines if self.on_screen else ()
        return [part for line in lines for part in wrapped(plain_text(line), width, *self.indent)]

    def page(self) -> str:
        made = "".join(f"<{self.tag}>{html(line)}</{self.tag}>\n" for line in self.lines)
        return f"<ul>{made}</ul>" if self.tag == "li" and made else made


class Bar(NamedTuple):
    """A part of a bar: its share of the longest, its colour on a page, and its character on a screen."""

    share: float
    colour: str
    mark: str


@dataclass(frozen=True)
class Table:
    """A table: cells under a head. ``bars``: of each row what stands in a last column; ``most``: rows of a screen.

    ``marks``: what the bars' characters mean, above them on a screen.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[Line]]
    bars: Sequence[Sequence[Bar]] = ()
    marks: str = ""
    most: int | None = None

    def screen(self, width: int) -> list[str]:
        rows = [("", *map(plain_text, row)) for row in [self.head, *self.rows[: self.most]]]
        if "module" in self.head:
            at = 1 + self.head.index("module")
            rows = [(*row[:at], _cut(row[at]), *row[at + 1 :]) for row in rows]
        if self.bars:
            rows = [(*row, bar) for row, bar in zip(rows, [self.marks, *map(_text_bar, self.bars)], strict=True)]
        room = max(width - sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1]), 20)
        folded: list[tuple[str, ...]] = []
        for *cells, last in rows:
            first, *more = [last] if len(last) <= room else textwrap.wrap(last, room)
            folded += [(*cells, first), *((*("" for _ in cells), line) for line in more)]
        left = len(self.rows) - len(self.rows[: self.most])
        return [*text_table(folded).splitlines(), *([f"  and {left} more rows (--json has all)"] if left else [])]

    def page(self) -> str:
        if not self.rows:
            return ""
        head = "".join(f'<th scope="col">{escape(name)}</th>' for name in self.head)
        cells = [[_cell(cell) for cell in row] for row in self.rows]
        for row, bar in zip(cells, self.bars, strict=False):
            row.append(
                f'<div class="bar">{"".join(BAR_PART.format(100 * part.share, part.colour) for part in bar)}</div>'
            )
        head += "<th></th>" if self.bars else ""
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in cells)
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}</tbody></table></div>'


def _text_bar(bar: Sequence[Bar]) -> str:
    """Draws a bar as characters, :data:`BAR` for the longest; each part ends where its share does."""
    text, until = "", 0.0
    for part in bar:
        until += part.share
        text += part.mark * (round(BAR * until) - len(text))
    return text


def paragraphs(*lines: Line) -> Lines:
    """Makes paragraphs, each of which is a line on a screen."""
    return Lines(lines, "p")


def note(text: str) -> Lines:
    """Makes small print, which only a page shows."""
    return Lines([[Marked("small", text)]], "p", on_screen=False)


def _cut(text: str) -> str:
    """Leaves out the middle of a long text."""
    return text if len(text) <= NARROW else f"{text[: NARROW // 2 - 1]}…{text[-NARROW // 2 :]}"


def _cell(cell: Line) -> str:
    """Keeps a figure and its unit in one line."""
    return html(cell.replace(" ", "\N{NO-BREAK SPACE}") if isinstance(cell, str) and len(cell) <= UNBROKEN else cell)


@dataclass(frozen=True)
class Chart:
    """A drawing, which only a page shows. ``keys``: what its colours mean, by what stands before them."""

    drawing: str
    keys: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    title: str = ""

    def screen(self, width: int) -> list[str]:
        return []

    def page(self) -> str:
        title = f"<h3>{escape(self.title)}</h3>" if self.title else ""
        return title + self.drawing + "".join(_key(first, colours) for first, colours in self.keys.items())


def _key(first: str, colours: Mapping[str, str]) -> str:
    items = "".join(
        f'<li><i style="background: {colour}; border: 1px solid {INK}"></i>{escape(name)}</li>'
        for name, colour in colours.items()
    )
    before = f"<li>{escape(first)}:</li>" if first else ""
    return f'<ul class="key">{before}{items}</ul>' if colours else ""


@dataclass(frozen=True)
class Folded:
    """Blocks that only a page shows, folded under words which unfold them."""

    words: str
    blocks: Sequence["Block"]

    def screen(self, width: int) -> list[str]:
        return []

    def page(self) -> str:
        inner = "".join(block.page() for block in self.blocks)
        return f"<details><summary>{escape(self.words)}</summary>{inner}</details>"


Block = Lines | Table | Chart | Folded


class Section(NamedTuple):
    """A section of a report: the address of its place on the page, a heading with words, and what stands below."""

    anchor: str
    heading: str
    lead: str = ""
    blocks: Sequence[Block] = ()

    def screen(self, width: int) -> list[str]:
        """Returns its lines; none if nothing of it is for a screen."""
        below = [line for block in self.blocks for line in block.screen(width)]
        if not self.lead and not below:
            return []
        return [*wrapped(f"{self.heading.upper()}  {self.lead}".rstrip(), width, 0, 4), *below]

    def page(self) -> str:
        """Returns its HTML; empty if there is nothing to say."""
        lead = f"<p>{escape(sentence(self.lead))}</p>" if self.lead else ""
        body = lead + "".join(block.page() for block in self.blocks)
        return f'<section id="{self.anchor}"><h2>{escape(self.heading)}</h2>\n{body}</section>\n' if body else ""


def report_screen(head: str, sections: Iterable[Section]) -> str:
    """Writes a report for a terminal: its head, and the sections that have something to say."""
    parts = [wrapped(head, WIDE, 0, 4), *(section.screen(WIDE) for section in sections)]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def report_page(title: str, head: str, sections: Iterable[Section], style: str = "") -> str:
    """Writes a report for a browser, with links to its sections; ``style``: CSS beside the common one."""
    there = [(section, body) for section in sections if (body := section.page())]
    links = "".join(f'<a href="#{section.anchor}">{escape(section.heading)}</a>' for section, _ in there)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{page_style.css()}{STYLE}{style}</style>\n</head>\n<body>\n"
        f'<nav aria-label="sections">{links}</nav>\n<main>\n<h1>{escape(title)}</h1>\n'
        f"<p>{escape(head)}</p>\n{''.join(body for _, body in there)}</main>\n</body>\n</html>\n"
    )
