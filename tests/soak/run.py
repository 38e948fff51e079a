"""A long run of ``pardemo soak``, to commit: ``python tests/soak/run.py`` writes outputs/reference/soak.json.

The table of docs/records/soak.md is made of it; with ``--page`` it is written anew, and nothing is run. ``--faults``,
``--layouts`` and ``--seed`` go to ``pardemo soak``.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SUMMARY, PAGE = ROOT / "outputs" / "reference" / "soak.json", ROOT / "docs" / "records" / "soak.md"
BEGIN, END = "<!-- made by tests/soak/run.py -->\n", "<!-- end of the table -->\n"
NO_COLUMNS = ("skipped", "seconds_each")


def table(run: dict[str, Any]) -> str:
    """A row for each group of scenes, the sum, and a line of what could not be played and of what failed.

    A column for each thing that the run counted.
    """
    groups: dict[str, list[dict[str, float]]] = {}
    for kind, counts in run["kinds"].items():
        groups.setdefault(kind.partition("/")[0], []).append(counts)
    counted = [name for name in next(iter(run["kinds"].values())) if name not in NO_COLUMNS]
    titles = (name.replace("_", " ") for name in counted)
    lines = [f"| group | kinds | {' | '.join(titles)} |", f"|---|{'---:|' * (len(counted) + 1)}"]
    for group, kinds in groups.items():
        sums = (sum(counts[name] for counts in kinds) for name in counted)
        lines.append(f"| `{group}` | {len(kinds)} | {' | '.join(f'{count:,}' for count in sums)} |")
    lines.append(f"| all | {len(run['kinds'])} | {' | '.join(f'{run[name]:,}' for name in counted)} |")
    skipped = "; ".join(f"not played: {', '.join(kinds)} ({why})" for why, kinds in run["not_played"].items())
    lines += [
        "",
        f"Seed {run['seed']}, {run['seconds'] / 60:.0f} minutes on two cores; {skipped or 'all kinds were played'}.",
    ]
    lines += ["", *(f"- failed: `{each['again']}`: {each['reasons']}" for each in run["failures"])]
    return "\n".join(lines).rstrip() + "\n"


def page(text: str, run: dict[str, Any]) -> str:
    """The page with the run's table."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table(run)}{END}{rest.partition(END)[2]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="write the page's table anew from the committed run")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--layouts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    status = 0
    if not given.page:
        asked = [f"--{name}={getattr(given, name)}" for name in ("faults", "layouts", "seed")]
        done = subprocess.run(
            [sys.executable, "-m", "pardemo", "soak", "--json", *asked], stdout=subprocess.PIPE, text=True
        )
        status, run = done.returncode, json.loads(done.stdout)
        SUMMARY.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    run = json.loads(SUMMARY.read_text(encoding="utf-8"))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), run), encoding="utf-8")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
