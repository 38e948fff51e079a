"""A proof as a page: one file, that asks no network for anything: each layout's verdict, and the map of the model."""

from pardemo.draw import page_parts
from pardemo.draw.page_parts import Section
from pardemo.draw.page_parts import words as _t
from pardemo.prove import map_drawing, text
from pardemo.prove.facts import Finding
from pardemo.prove.layouts import Layout
from pardemo.prove.model_map import COLUMNS, Map
from pardemo.prove.proof import Proof
from pardemo.prove.unexplained import MOST_BYTES
from pardemo.tables import amount

STYLE = """
.line { overflow-wrap: anywhere; }
.findings { padding-left: 1.1rem; } .findings div { overflow-wrap: anywhere; }
"""
#: The sign before a layout, the class of its colour.
_EQUAL, _DIFFERENT, _FAILED = ("✓", "ok"), ("✗", "failed"), ("?", "not")


def page(made: Proof, script: str) -> str:
    """The page: what is said of all layouts first, then each of them with its map.

    Args:
        script: its name.
    """
    sections = [
        Section("verdict", "Verdict", _verdict(made)),
        *(_section(made, number, one) for number, one in enumerate(made.layouts[1:], 1)),
        Section("notes", "Notes", page_parts.bullets(map(_t, made.notes)) if made.notes else ""),
        Section("files", "Beside this page", _files(made)),
    ]
    head = f"<p>{_t(page_parts.sentence(text.verdict(made)))} The reference is {_t(text.reference(made))}.</p>"
    return page_parts.document(f"{script} in {len(made.layouts)} layouts", head, sections, map_drawing.STYLE + STYLE)


def _of(made: Proof, layout: Layout) -> list[Finding]:
    return [finding for finding in made.findings if finding.layout == layout.name]


def _sign(made: Proof, layout: Layout) -> tuple[str, str]:
    return _FAILED if layout.name in made.failed else _DIFFERENT if _of(made, layout) else _EQUAL


def _verdict(made: Proof) -> str:
    items = []
    for number, one in enumerate(made.layouts[1:], 1):
        sign, colour = _sign(made, one)
        found = _of(made, one)
        said = "could not be compared" if one.name in made.failed else text.head(found[0]) if found else text.EQUAL
        link = f'<a href="#layout-{number}">{_t(one.name)}</a>'
        items.append(f'<b class="{colour}">{sign}</b> {link}: {_t(said)}')
    return page_parts.bullets(items)


def _section(made: Proof, number: int, layout: Layout) -> Section:
    return Section(f"layout-{number}", f"{_sign(made, layout)[0]} {layout.name}", _layout(made, layout))


def _layout(made: Proof, layout: Layout) -> str:
    body = f'<p class="line"><code>{_t(" ".join(layout.line))}</code></p>' if layout.line else ""
    if layout.name in made.failed:
        return f"{body}<p>{_t(page_parts.sentence(made.failed[layout.name]))}</p>"
    found = _of(made, layout)
    if found:
        items = "".join(f"<li>{_finding(made, finding)}</li>\n" for finding in found)
        body += f'<ol class="findings">{items}</ol>'
    else:
        body += f"<p>{_t(page_parts.sentence(text.EQUAL))}</p>"
    of = made.maps.get(layout.name)
    if of is None:
        return body
    drawn = map_drawing.drawing(of, [finding.module for finding in found if finding.module])
    return f"{body}<h3>The model in step {of.step}</h3><p>{_t(_compared(of, found))}</p>{drawn}"


def _finding(made: Proof, finding: Finding) -> str:
    parts = [f"<b>{_t(text.head(finding))}</b>", _t(text.why(finding))]
    if finding.parameters:
        parts.append(_t(text.parameters(finding)))
    if finding in made.files:
        kept, name = made.kept[finding], made.files[finding]
        size = sum(tensor.nbytes for tensor in kept.tensors.values())
        said = f'<a href="{_t(name)}">{_t(name)}</a>, {_t(amount(size))}'
        if kept.sketches:
            said += f"; of {_t(', '.join(kept.sketches))} these are sketches"
        if kept.left_out:
            said += f"; without {_t(', '.join(kept.left_out))}, for which there was no room"
        parts.append(f"tensors: {said}")
    return "".join(f"<div>{part}</div>" for part in parts)


def _compared(of: Map, found: list[Finding]) -> str:
    """What was compared of the step that the map shows, and what was not."""
    numbers = "; ".join(f"{what}: {of.counts[key][0]} of {of.counts[key][1]}" for key, what in COLUMNS.items())
    said = f"Compared are {numbers}."
    what = {finding.what for finding in found}
    if {"data", "parameters"} & what:
        return f"{said} Where samples or first parameters are wrong, nothing that is made of them is looked at."
    if "forward" in what:
        return f"{said} Where outputs are wrong, gradients are not looked at, nor what is made of them."
    return f"{said} Steps behind the first one that differs are not compared." if found else said


def _files(made: Proof) -> str:
    files = ["<code>prove.json</code> the same for programs, with all parameters of each finding"]
    if made.files:
        files.append(
            "<code>tensors</code> the reference's and the layout's tensors of findings that nobody explains, up to "
            f"{_t(amount(MOST_BYTES))} of each"
        )
    return page_parts.bullets(files)
