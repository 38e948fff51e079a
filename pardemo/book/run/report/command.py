"""``pardemo report``: the pages of a finished run, written again."""

import argparse
import os
from pathlib import Path

from pardemo.closed_pipe import work_goes_on

BEGIN, END = "<!-- table: make reference -->", "<!-- end of table -->"
COUNTS, COUNTS_END = "<!-- counts: make reference -->", "<!-- end of counts -->"
CHAPTERS, CHAPTERS_END = "<!-- chapters: make reference -->", "<!-- end of chapters -->"


def add_report(commands: argparse._SubParsersAction) -> None:
    """Adds the command ``report`` to the command line."""
    parser = commands.add_parser("report", help="write report.html and the notebooks' pages of a finished run again")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a run's folder (default outputs/latest)")
    parser.add_argument("--readme", metavar="FILE", help="also put the run's table between the marks of this file")
    parser.set_defaults(action=_command)


@work_goes_on()
def _command(arguments: argparse.Namespace) -> int:
    from pardemo import project
    from pardemo.book.run import report

    folder = Path(arguments.folder) if arguments.folder else project.output_dir()
    path = report.rebuild(folder)
    if arguments.readme:
        update(Path(arguments.readme), folder)
    print(f"report: {os.path.relpath(path)}")
    return 0


def update(file: Path, folder: Path) -> None:
    """Replaces what stands between the marks of ``file``: the run's table, its counts, the list of chapters.

    Raises:
        ValueError: the file has no such marks.
    """
    from pardemo import claims, project

    text, rows = file.read_text(encoding="utf-8"), claims.read(folder)
    replaced = False
    for begin, end, text_of in (
        (BEGIN, END, markdown),
        (COUNTS, COUNTS_END, counts),
        (CHAPTERS, CHAPTERS_END, chapters),
    ):
        before, mark, tail = text.partition(begin)
        _, last, after = tail.partition(end)
        if mark and last:
            text, replaced = f"{before}{begin}\n{text_of(rows)}{end}{after}", True
    if not replaced:
        raise ValueError(f"{file} has no place for the table: it stands between {BEGIN} and {END}")
    project.write_text(file, text)


def chapters(rows: list[dict]) -> str:
    """The notebooks as a Markdown table: title, question (of the notebook's metadata), committed copy."""
    import json

    from pardemo import project
    from pardemo.book.run.report import pages

    lines = ["| chapter | what it answers |", "|---|---|"]
    for name, path in project.notebooks().items():
        question = json.loads(path.read_text(encoding="utf-8"))["metadata"]["pardemo"]["question"]
        at = f"outputs/reference/{name}"
        lines.append(f"| [{name[:2]} {pages.notebook_title(path.parent, name)}]({at}.ipynb) | {question} |")
    return "\n".join(lines) + "\n"


def counts(rows: list[dict]) -> str:
    """``365 claims in 854 cases. Of the cases 767 hold, 58 differ, …``, every verdict, also what does not occur."""
    from pardemo import claims

    words = {"holds": "hold", "differs": "differ", "fails": "fail"}
    verdicts_text = ", ".join(f"{n} {words.get(verdict, verdict)}" for verdict, n in claims.counts(rows).items())
    return f"{len(claims.by_claim(rows))} claims in {len(rows)} cases. Of the cases {verdicts_text}.\n"


def markdown(rows: list[dict]) -> str:
    """Claims by kind of evidence and verdict, as a Markdown table."""
    from pardemo import claims
    from pardemo.book.run import scorecard

    lines = [f"| {' | '.join(('evidence', 'claims', 'cases', *claims.VERDICTS))} |", "|---|" + "---:|" * 7]
    for line in scorecard.totals(rows, "evidence"):
        kind = line["evidence"]
        name = f"{kind}: {claims.EVIDENCE[kind]}" if kind in claims.EVIDENCE else kind
        figures = (line["claims"], line["cases"], *(line[verdict] or "" for verdict in claims.VERDICTS))
        lines.append(f"| {' | '.join((name, *map(str, figures)))} |")
    return "\n".join(lines) + "\n"
