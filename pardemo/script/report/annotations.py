"""Reports a proof's verdict on a pull request: annotations at the script's lines, JUnit, a summary.

The action of this repository (``action.yml``) runs it behind ``pardemo prove --out DIR``, as any other workflow can::

    python -m pardemo.script.report.annotations DIR/prove.json --script train.py --junit junit.xml

It reads what ``prove --json`` prints, needs the standard library alone, and leaves the exit status to ``prove``.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from pardemo.extras import REPOSITORY
from pardemo.script.words import cause_text, count_text, finding_text, first_of

CAUSES = f"{REPOSITORY}/blob/main/docs/prove.md#each-cause"
#: ``train.py:7``, in what is said of a layout that could not be run.
_LINE = re.compile(r"([\w.-]+\.py):(\d+)")
#: What XML cannot hold, as a terminal's colours.
_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

Verdict = Mapping[str, Any]


def finding_message(row: Verdict) -> str:
    """Returns a row of ``findings`` in one line, as the screen has it."""
    message = finding_text(row["step"], row["what"], row["factor"], row["rest"], row["module"])
    message += f": {cause_text(row['cause'], row['why'])}"
    if row["parameters"]:
        message += f" ({count_text(len(row['parameters']), 'parameter')}: {first_of(row['parameters'], 4)})"
    return message


def annotation(message: str, title: str, file: str = "", line: str = "") -> str:
    """Returns a workflow command that GitHub shows as an error, at a line of a file where these are given.

    >>> annotation("100 %", "a, b", "train.py", "7")
    '::error file=train.py,line=7,title=a%2C b::100 %25'
    """
    given = {"file": file, "line": line if file else "", "title": title}
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in given.items() if value)
    return f"::error {properties}::{_escaped(message)}"


def _escaped(text: str, more: str = "") -> str:
    """Escapes a text for a workflow command, in one line."""
    text = text.replace("%", "%25")
    for character in f"\r\n{more}":
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def annotations(verdict: Verdict, script: str, root: Path) -> list[str]:
    """Returns an annotation for each finding and for each layout that could not be run.

    Args:
        verdict: as ``prove --json`` prints it, made in the folder that we are in.
        script: the script's path, for what has no line. root: the repository, from which GitHub counts paths.
    """
    lines = []
    for row in verdict["findings"]:
        file, line = _file_and_line(row, script, root)
        message = finding_message(row) + (f". What to change: {CAUSES}" if row["cause"] else "")
        lines.append(annotation(message, f"pardemo prove, {row['layout']}", file, line))
    for row in verdict["layouts"]:
        if row["error"]:
            line = next(
                (match[2] for match in _LINE.finditer(row["error"]) if match[1] == os.path.basename(script)), ""
            )
            lines.append(annotation(row["error"], f"pardemo prove, {row['layout']}", _from(root, script), line))
    return lines


def _file_and_line(row: Verdict, script: str, root: Path) -> tuple[str, str]:
    """Returns a finding's file, the script where it has no line, and its line; both empty outside of the repository."""
    file, _, line = row.get("line", "").rpartition(":")
    return (inside, line) if (inside := _from(root, file or script)) else ("", "")


def _from(root: Path, file: str) -> str:
    """Returns a file's path from the repository's root; empty where it lies elsewhere."""
    path = Path(file).resolve()
    return path.relative_to(root.resolve()).as_posix() if file and path.is_relative_to(root.resolve()) else ""


def junit(verdict: Verdict, script: str, root: Path) -> ElementTree.Element:
    """Writes a test case for each layout that is compared with the reference.

    Args:
        verdict, script, root: as in :func:`annotations`; a file outside of the repository is named as it was given.
    """
    suite, file = ElementTree.Element("testsuite", name="pardemo prove"), _from(root, script) or script
    for layout in verdict["layouts"][1:]:
        case = ElementTree.SubElement(suite, "testcase", classname=file, name=_plain(layout["layout"]), file=file)
        rows = [row for row in verdict["findings"] if row["layout"] == layout["layout"]]
        if rows:
            sites = [
                ":".join(filter(None, _file_and_line(row, script, root))) or row.get("line") or file for row in rows
            ]
            text = "\n".join(f"{site}: {finding_message(row)}" for site, row in zip(sites, rows, strict=True))
            attributes = {"message": _plain(finding_message(rows[0])), "type": rows[0]["cause"] or "no known cause"}
            ElementTree.SubElement(case, "failure", attributes).text = _plain(text)
        elif layout["error"]:
            attributes = {"message": _plain(layout["error"]), "type": "not compared"}
            ElementTree.SubElement(case, "error", attributes).text = _plain(layout["error"])
    return _suites(suite)


def junit_of_an_error(error: str, script: str) -> ElementTree.Element:
    """Writes the one test case of a proof that could not be made."""
    suite = ElementTree.Element("testsuite", name="pardemo prove")
    case = ElementTree.SubElement(suite, "testcase", classname=script, name="the reference", file=script)
    ElementTree.SubElement(case, "error", message=_plain(error), type="not compared").text = _plain(error)
    return _suites(suite)


def _suites(suite: ElementTree.Element) -> ElementTree.Element:
    """Writes the whole file, with the counts that its readers ask for."""
    suites = ElementTree.Element("testsuites")
    for element in (suites, suite):
        element.set("tests", str(len(suite)))
        element.set("failures", str(len(suite.findall("testcase/failure"))))
        element.set("errors", str(len(suite.findall("testcase/error"))))
    suites.append(suite)
    return suites


def _plain(text: str) -> str:
    return _NOT_IN_XML.sub("", text)


def summary(verdict: Verdict | None, screen: str) -> str:
    """Writes Markdown for a job's page: the verdict, and below it the screen or the error."""
    words = "could not be made" if verdict is None else "equal" if verdict["equal"] else "not compared"
    words = "different" if verdict and verdict["findings"] else words
    fence = max((run[0] for run in re.finditer("`{3,}", screen)), key=len, default="``") + "`"
    return f"### pardemo prove: {words}\n\n{fence}text\n{screen.strip()}\n{fence}\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints annotations, and writes what else is asked for."""
    parser = argparse.ArgumentParser(prog="pardemo.script.report.annotations", description=__doc__.splitlines()[0])
    parser.add_argument(
        "verdict", type=Path, metavar="prove.json", help="of prove --out; may be missing after an error"
    )
    parser.add_argument("--script", default="", metavar="FILE", help="the script (that of the first layout's line)")
    parser.add_argument("--root", type=Path, default=Path(), metavar="DIR", help="the repository (this folder)")
    parser.add_argument("--junit", type=Path, metavar="FILE", help="write a JUnit file")
    parser.add_argument("--screen", type=Path, metavar="FILE", help="what prove printed, for the summary")
    parser.add_argument("--log", type=Path, metavar="FILE", help="prove's error stream, for what it says at its end")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="append the job's summary, in Markdown")
    arguments = parser.parse_args(argv)
    screen = arguments.screen.read_text("utf-8") if arguments.screen else ""
    if arguments.verdict.is_file():
        verdict = json.loads(arguments.verdict.read_text("utf-8"))
        script = arguments.script or _script(verdict["layouts"][0]["line"])
        lines, tests = annotations(verdict, script, arguments.root), junit(verdict, script, arguments.root)
    else:
        verdict, script = None, arguments.script
        screen = _error(arguments.log.read_text("utf-8") if arguments.log else "")
        lines = [annotation(screen, "pardemo prove", _from(arguments.root, script))]
        tests = junit_of_an_error(screen, _from(arguments.root, script) or script)
    print("\n".join(lines), end="\n" if lines else "")
    if arguments.junit:
        ElementTree.indent(tests)
        ElementTree.ElementTree(tests).write(arguments.junit, encoding="utf-8", xml_declaration=True)
    if arguments.summary:
        with arguments.summary.open("a", encoding="utf-8") as file:
            file.write(summary(verdict, screen))
    return 0


def _script(line: str) -> str:
    """Returns the script in a layout's line, which may begin with a launcher; empty where it runs a module."""
    return next((word for word in line.split() if word.endswith(".py")), "")


def _error(log: str) -> str:
    """Returns the last line in which prove says why there is no verdict."""
    lines = [line for line in log.splitlines() if line.startswith("pardemo prove")]
    return lines[-1] if lines else "pardemo prove ended without a verdict"


if __name__ == "__main__":
    sys.exit(main())
