"""Every notebook with other numbers of ranks: ``python .ci/world_sizes.py``, and the table it writes.

One notebook at a time, in a folder for each number of ranks. A notebook that says in its ``need_ranks`` that it does
not take that number is refused before a kernel starts. What has finished with the same sources is not run again, so a
run that was interrupted goes on where it was.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from pardemo import project
from pardemo.book.run import endings, runner
from pardemo.book.run.endings import NotebookEnding
from pardemo.book.run.parameters import RunError, assign

SIZES = (1, 2, 3, 4, 8)
COLUMNS = ("notebook", "world_size", "result")
TABLE = Path("outputs", "reference", "world_sizes.csv")


def run(
    names: Sequence[str], sizes: Sequence[int], work: Path, table: Path, missing: bool = False
) -> list[dict[str, str]]:
    """Runs each of the notebooks with each number of ranks, and rewrites the table after each number.

    Args:
        names: notebooks, as ``pardemo run`` takes them; all where there are none.
        work: a folder for the runs, one within it for each size.
        missing: whether a notebook that the table has as ``held`` is left out.

    Returns:
        The table's rows: ``held``, ``refused: …`` or ``failed: …`` for each notebook and size; of those that were not
        asked for, what the table had.
    """
    rows = {(row["notebook"], int(row["world_size"])): row for row in read(table)} if table.exists() else {}
    rows = {key: row for key, row in rows.items() if key[0] in project.notebooks()}  # a chapter may have a new number
    for size in sizes:
        parameters = {"world_size": size}
        results, fit = {}, []
        for name, path in runner.choose_notebooks(names).items():
            if missing and rows.get((name, size), {}).get("result") == "held":
                continue
            try:
                assign({name: path}, parameters)
                fit.append(name)
            except RunError as error:
                results[name] = f"refused: {error}"
        folder = work / str(size)
        if fit:
            runner.run_notebooks(fit, parameters, folder, resume=True)
        ended = endings.read_endings(folder)
        results |= {name: _result(ended[name]) for name in fit}
        for name, result in results.items():
            rows[name, size] = {"notebook": name, "world_size": str(size), "result": result}
        project.write_csv(table, COLUMNS, [[rows[key][name] for name in COLUMNS] for key in sorted(rows)])
    return [rows[key] for key in sorted(rows)]


def read(table: Path) -> list[dict[str, str]]:
    """The rows of a table, each with its :data:`COLUMNS`."""
    with table.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def _result(outcome: NotebookEnding) -> str:
    return "held" if outcome.status == "ok" else f"failed: {outcome.error.strip().partition(chr(10))[0]}"


def main() -> int:
    """The command: returns 1 where a notebook fails."""
    parser = argparse.ArgumentParser(prog="python .ci/world_sizes.py", description=__doc__)
    parser.add_argument("notebooks", nargs="*", help="such as 01; all where none is named")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, metavar="N", help="numbers of ranks")
    parser.add_argument("--work", type=Path, default=project.output_dir() / "world_sizes", help="folder for the runs")
    parser.add_argument("--table", type=Path, default=project.root() / TABLE, help="what is written")
    parser.add_argument("--missing", action="store_true", help="leave out what the table has as held")
    asked = parser.parse_args()
    if min(asked.sizes) < 1:  # it would be a row of the table
        parser.error(f"--sizes must be at least 1, not {min(asked.sizes)}")
    rows = run(asked.notebooks, asked.sizes, asked.work, asked.table, asked.missing)
    for row in rows:
        print(f"{row['notebook']:28} {row['world_size']:>2}  {row['result']}")
    return int(any(row["result"].startswith("failed") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
