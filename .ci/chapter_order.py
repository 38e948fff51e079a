"""The chapters' order in file names and links: ``python .ci/chapter_order.py`` after a change of ``CHAPTERS``.

A chapter's number stands in the name of its notebook and, with it, in the links of other chapters and of documents. All
follow the list: this renames the notebooks, writes each one's first heading, and mends links whose number is an older
one. Pages of ``outputs/reference`` that a document leads to are there when a run has been committed.
"""

import json
import re
from pathlib import Path

from pardemo import project
from pardemo.book.contents import CHAPTERS, notebook_of

#: A link to a chapter: its text, the chapter's name, and an address inside it.
LINK = re.compile(r"\[([^\[\]]*)\]\((?:[\w./]*/)?\d\d_(\w+)\.ipynb(#[^)\s]*)?\)")
#: A document's link to a chapter's notebook or page: the folder, the chapter's name, the suffix.
IN_DOCUMENT = re.compile(r"(\((?:\.\./)*(?:outputs/reference|notebooks)/)\d\d_(\w+?)(\.(?:ipynb|html))")


def main() -> None:
    """Brings all notebooks of the collection into the list's order."""
    root = project.root()
    rename(root / "notebooks")
    for path in [*root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if (new := mended_document(text)) != text:
            project.write_text(path, new)


def mended_document(text: str) -> str:
    """A document with links to chapters that have their numbers of today."""

    def link(match: re.Match[str]) -> str:
        before, name, suffix = match.groups()
        return f"{before}{notebook_of(name)}{suffix}" if name in CHAPTERS else match.group()

    return IN_DOCUMENT.sub(link, text)


def rename(folder: Path) -> list[str]:
    """Renames the notebooks of a folder, and mends their headings and links; returns what was changed.

    Raises:
        ValueError: two notebooks have one chapter's name.
    """
    there: dict[str, Path] = {}
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        chapter = project.chapter_name(path.stem)
        if chapter in there:
            raise ValueError(
                f"{there[chapter].name} and {path.name} are both the chapter {chapter}: one of them is old"
            )
        there[chapter] = path
    changed = []
    waiting = {c: path.rename(path.with_suffix(".moved")) for c, path in there.items() if c in CHAPTERS}
    for chapter, moved in waiting.items():
        path = folder / f"{notebook_of(chapter)}.ipynb"
        moved.rename(path)
        if path != there[chapter]:
            changed.append(f"{there[chapter].name} -> {path.name}")
        notebook = json.loads(path.read_text(encoding="utf-8"))
        before = json.dumps(notebook)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "markdown":
                cell["source"] = mended("".join(cell["source"]), chapter).splitlines(keepends=True)
        if json.dumps(notebook) != before:
            changed.append(f"{path.name}: heading or links")
            text = json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"
            project.write_text(path, text)
    return changed


def mended(text: str, chapter: str) -> str:
    """A Markdown cell of a chapter with its heading, and with links to chapters that have their numbers of today."""

    def link(match: re.Match[str]) -> str:
        words, name, inside = match.groups()
        return f"[{words}]({notebook_of(name)}.ipynb{inside or ''})" if name in CHAPTERS else match.group()

    return LINK.sub(link, re.sub(r"\A# .*$", f"# {CHAPTERS[chapter]}", text, flags=re.M))


if __name__ == "__main__":
    main()
