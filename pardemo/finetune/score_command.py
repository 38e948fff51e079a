"""``pardemo score``: the scores of a file of predictions, as a table."""

import argparse
import json
from typing import Any


def add(commands: Any) -> None:
    """Adds the subcommand to the command line's parser."""
    score = commands.add_parser("score", help="BLEU-4 and ROUGE of generated_predictions.jsonl, with intervals")
    score.add_argument("file", metavar="FILE", help='rows of "prompt", "label" and "predict", a JSON object a line')
    score.add_argument("--by", metavar="KEY", help="score each value of this key by itself too, as --by source")
    score.add_argument("--json", action="store_true", help="print rows as JSON")
    score.set_defaults(action=_score)


def _score(arguments: argparse.Namespace) -> int:
    from pardemo.finetune.prediction import predictions
    from pardemo.tables import text_table

    rows = predictions.read(arguments.file, *([arguments.by] if arguments.by else []))
    scored = scores_of(rows, arguments.by)
    print(json.dumps(scored, indent=1, ensure_ascii=False) if arguments.json else text_table(_table(scored)))
    return 0


def scores_of(rows: list[dict[str, Any]], by: str | None = None) -> list[dict[str, Any]]:
    """:func:`pardemo.finetune.metrics.score` of all rows, then of those with each value of ``by`` apart.

    ``group`` says which: ``"all"``, or ``KEY=VALUE``.
    """
    from pardemo.finetune import metrics

    groups = {"all": rows}
    for row in rows if by else []:
        groups.setdefault(f"{by}={row[by]}", []).append(row)
    return [
        {"group": name} | metrics.score([row["predict"] for row in group], [row["label"] for row in group])
        for name, group in groups.items()
    ]


def _table(scored: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    from pardemo.finetune.metrics import NAMES

    rows = [("score", "per cent", "95 % interval", "samples", "group")]
    for scores in scored:
        for name in NAMES:
            low, high = scores["intervals"][name]
            rows.append(
                (name, f"{scores[name]:.2f}", f"{low:.2f} to {high:.2f}", f"{scores['samples']:,}", scores["group"])
            )
    return rows
