"""What pages of one file are made of: a frame with sections, tables, lists, keys of colours; nothing asks a network."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from pardemo.draw import page_style
from pardemo.draw.palette import INK

STYLE = """
body { max-width: 60rem; }
h1, code, td span { overflow-wrap: anywhere; }
svg { margin: .4rem 0; }
td small { display: block; }
li { margin: .3rem 0; }
details { margin: .8rem 0; } summary { cursor: pointer; }
.key { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.1rem; padding: 0; margin: .3rem 0 .8rem;
  font-size: .95rem; max-width: 640px; }
.key i { display: inline-block; width: .9em; height: .9em; outline: 1px solid var(--line);
  border-radius: .15rem; vertical-align: -.1em; margin-right: .35em; }
@media (max-width: 44rem) { nav { position: static; } }
"""


class Section(NamedTuple):
    """A heading, the address of its place on the page, and what stands there."""

    anchor: str
    heading: str
    body: str


def document(title: str, head: str, sections: Iterable[Section], style: str = "") -> str:
    """A page: its title, what stands first, and the sections that have something to say, with links to them.

    Args:
        title: in words. head: HTML. style: what this page has beside the common style.
    """
    there = [section for section in sections if section.body]
    links = "".join(f'<a href="#{one.anchor}">{words(one.heading)}</a>' for one in there)
    parts = "".join(
        f'<section id="{one.anchor}"><h2>{words(one.heading)}</h2>\n{one.body}</section>\n' for one in there
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{words(title)}</title>\n<style>\n{page_style.css()}{STYLE}{style}</style>\n</head>\n<body>\n"
        f'<nav aria-label="sections">{links}</nav>\n<main>\n<h1>{words(title)}</h1>\n'
        f"{head}\n{parts}</main>\n</body>\n</html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Of cells that are HTML already, under a head in words."""
    heads = "".join(f'<th scope="col">{words(name)}</th>' for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}</tbody></table></div>'


def bullets(items: Iterable[str]) -> str:
    """A list of items that are HTML already."""
    return "<ul>" + "".join(f"<li>{item}</li>\n" for item in items) + "</ul>"


def key(first: str, colours: Mapping[str, str]) -> str:
    """What colours mean, beneath a drawing."""
    if not colours:
        return ""
    items = "".join(
        f'<li><i style="background: {colour}; border: 1px solid {INK}"></i>{words(name)}</li>'
        for name, colour in colours.items()
    )
    return f'<ul class="key">{f"<li>{words(first)}:</li>" if first else ""}{items}</ul>'


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[:1].upper() + text[1:] + "."


def words(text: str) -> str:
    """Words as HTML: what comes from a script is never markup."""
    return escape(text)
