"""``pardemo site``: the book as a folder that any static host can serve."""

import argparse
import os
from pathlib import Path

from pardemo.closed_pipe import work_goes_on


def add_site(commands: argparse._SubParsersAction) -> None:
    """Adds the command ``site`` to the command line."""
    parser = commands.add_parser("site", help="build the book as a site with a search, from a finished run's pages")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="a run's folder (default outputs/reference)")
    parser.add_argument("--out", metavar="DIR", help="where to (default outputs/site); replaced as a whole")
    parser.add_argument(
        "--pyodide", metavar="DIR", help="a folder of Pyodide, for the page that plans (default: npm brings it, once)"
    )
    parser.set_defaults(action=_command)


@work_goes_on()
def _command(arguments: argparse.Namespace) -> int:
    from pardemo import project
    from pardemo.book.run import site
    from pardemo.book.run.site import pyodide

    outputs = project.root() / "outputs"
    folder = Path(arguments.folder) if arguments.folder else outputs / "reference"
    out = Path(arguments.out) if arguments.out else outputs / "site"
    given = Path(arguments.pyodide) if arguments.pyodide else None
    why: list[str] = []

    def find_pyodide() -> Path | None:
        try:
            return pyodide.pyodide_folder(given)
        except pyodide.NoPyodideError as error:
            why.append(str(error))
            return None

    first = site.build_site(folder, out, find_pyodide)
    print(f"site: {os.path.relpath(first)}")
    for line in why:
        print(f"its page that plans is without Python: {line}; --pyodide DIR names a folder that has it")
    print(f"with its search: python3 -m http.server -d {os.path.relpath(out)}, then http://localhost:8000")
    return 0
