"""The style that the project's pages have in common: words, tables, light and dark, a desk and a phone."""

from pathlib import Path

FILE = Path(__file__).resolve().parent / "page.css.j2"


def css() -> str:
    """For a page without templates: the file has nothing to be filled in."""
    return FILE.read_text(encoding="utf-8")
