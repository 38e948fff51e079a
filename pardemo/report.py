"""``report.html``: a run on one page that opens from the file system, without a server and without requests."""

import base64
from pathlib import Path
from typing import Any

from pardemo import claims, project


def write(folder: Path, outcomes: list, rows: list[dict[str, Any]]) -> Path:
    """Builds the page from a run's outcomes, claims and the pictures in ``folder/figures``."""
    from jinja2 import Environment, FileSystemLoader

    chapters = [
        {
            "outcome": outcome,
            "rows": [_shown(row) for row in rows if row["notebook"] == outcome.notebook],
            "pictures": [_picture(p) for p in sorted((folder / "figures").glob(f"{outcome.notebook[:2]}_*.png"))],
        }
        for outcome in outcomes
    ]
    environment = Environment(loader=FileSystemLoader(project.PACKAGE), autoescape=True, trim_blocks=True)
    page = environment.get_template("report.html.j2").render(
        chapters=chapters, counts=claims.counts(rows), evidence=claims.EVIDENCE, total=len(rows)
    )
    path = folder / "report.html"
    project.write_atomically(path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return path


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "predicted": claims.predicted_text(row), "measured": claims.short(row["measured"])}


def _picture(path: Path) -> dict[str, str]:
    from PIL import Image

    with Image.open(path) as image:
        alt = image.info.get("Description", path.stem)
    return {"alt": alt, "data": base64.b64encode(path.read_bytes()).decode()}
