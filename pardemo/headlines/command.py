"""``pardemo data build | check``."""

import argparse
import json
import sys
from dataclasses import asdict, fields
from typing import Any

from pardemo import argument_checks
from pardemo.closed_pipe import work_goes_on
from pardemo.headlines.build import GENERATED, Limits


def add_data(commands: Any) -> None:
    """Adds ``data`` to the command line."""
    data = commands.add_parser("data", help="build and check the headline data: train.json and test.json")
    actions = data.add_subparsers(dest="data_command", required=True, metavar="build|check")
    build = actions.add_parser(
        "build",
        help="choose rows by a seed and write train.json, test.json, manifest.json and lengths.png",
        description="Writes rows of the form (instruction, input, output, source), none twice and none in both files.",
    )
    build.add_argument(
        "--from", nargs="+", dest="origins", default=[GENERATED], metavar="FOLDER|NAME",
        help="generated (the default: the project's own made-up news), folders with csl.jsonl.gz, LCSTS's or XL-Sum's"
        " *.jsonl, or neuclir/csl, hugcyp/LCSTS, csebuetnlp/xlsum, which are then fetched",
    )  # fmt: skip
    build.add_argument("--out", metavar="DIR", help="folder to write to (default outputs/latest/headlines)")
    build.add_argument("--train", type=int, metavar="N", help="training rows (80000; 20000 of generated ones)")
    build.add_argument("--test", type=int, default=1000, metavar="N", help="test rows (1000)")
    build.add_argument("--seed", type=int, metavar="N", help="chooses the rows (0; 1 of generated rows)")
    real = build.add_argument_group("of real sources only")
    real.add_argument("--tasks", type=_names, metavar="A,B", help="what csl is for (title,keywords,category)")
    real.add_argument(
        "--sources", type=_names, dest="wanted", metavar="A,B", help="which to take (csl,lcsts,xlsum-zh,xlsum-en)"
    )
    for limit in fields(Limits):
        end, side = limit.name.split("_")
        most = f"{'fewest' if end == 'min' else 'most'} characters of the {side} ({limit.default})"
        real.add_argument(f"--{end}-{side}", type=int, metavar="N", help=most)
    build.add_argument("--json", action="store_true", help="print the manifest")
    build.set_defaults(action=_build)
    check = actions.add_parser(
        "check", help="name every bad row of a file by line and reason; status 1 if there is one"
    )
    check.add_argument("file", metavar="FILE", help="a JSON array of rows, or JSON lines")
    check.add_argument("--json", action="store_true", help="print the file's rows and bad rows as JSON")
    check.set_defaults(action=_check)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


@work_goes_on()
def _build(arguments: argparse.Namespace) -> int:
    lengths = [limit.name for limit in fields(Limits)]
    argument_checks.at_least(arguments, 0, "train", "test", *lengths)
    from pardemo.headlines.build import build
    from pardemo.tables import text_table

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    limits = {name: given[name] for name in lengths if name in given}
    choice: dict[str, Any] = {name: given[name] for name in ("tasks", "wanted") if name in given}
    choice |= {"limits": Limits(**limits)} if limits else {}
    if choice and arguments.origins == [GENERATED]:
        raise ValueError("tasks, sources and lengths choose among real sources: generated rows have none of them")
    sizes = {name: given[name] for name in ("train", "test", "seed") if name in given}
    manifest = build(arguments.origins, arguments.out, **sizes, **choice, on_read=_print_name)
    if arguments.json:
        print(json.dumps(manifest, indent=1, ensure_ascii=False))
        return 0
    for entry in manifest.get("left_out", []):
        lines = ", ".join(map(str, entry["first_lines"])) + ", …" * (entry["count"] > len(entry["first_lines"]))
        print(f"{entry['file']}: {entry['count']:,} left out, {entry['reason']} (lines {lines})", file=sys.stderr)
    counts = [(name, *row) for name, file in manifest["files"].items() for row in file["by_source"].items()]
    print(text_table([("file", "source", "rows"), *((name, source, f"{n:,}") for name, source, n in counts)]))
    return 0


def _print_name(name: str) -> None:
    print(f"reading {name} …", file=sys.stderr, flush=True)


def _check(arguments: argparse.Namespace) -> int:
    from pardemo.headlines.rows import check
    from pardemo.tables import text_table

    report = check(arguments.file)
    if arguments.json:
        bad = [asdict(problem) for problem in report.problems]
        values = {"file": arguments.file, "rows": report.rows, "forms": dict(report.forms), "bad": bad}
        print(json.dumps(values, indent=1, ensure_ascii=False))
    else:
        if report.problems:
            print(text_table([("line", "reason"), *((str(bad.line), bad.reason) for bad in report.problems)]))
        forms = ", ".join(f"{count:,} of the form {form}" for form, count in report.forms.most_common())
        print(f"{arguments.file}: {report.rows:,} rows, {len(report.problems):,} bad" + (f"; {forms}" if forms else ""))
    return 1 if report.problems else 0
