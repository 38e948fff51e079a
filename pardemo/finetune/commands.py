"""``pardemo finetune``, ``predict``, ``score``, ``export`` and ``chat``.

The libraries are imported where they are needed: the command line's ``--help`` loads none of them.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pardemo import argument_checks, project
from pardemo.closed_pipe import work_goes_on
from pardemo.world import launched
from pardemo.world.imports import without_garbage_collection

if TYPE_CHECKING:
    from pardemo.finetune.recipe import Recipe
    from pardemo.finetune.train import TrainingResult


def add_fine_tune(commands: Any) -> None:
    """Adds the subcommands to the command line's parser."""
    tune = commands.add_parser("finetune", help="fine-tune by a recipe: LoRA, DeepSpeed, on all ranks of this machine")
    _add_finetune_arguments(tune)
    tune.set_defaults(action=finetune)

    score = commands.add_parser("score", help="BLEU-4 and ROUGE of generated_predictions.jsonl, with intervals")
    score.add_argument("file", metavar="FILE", help='rows of "prompt", "label" and "predict", a JSON object a line')
    score.add_argument("--by", metavar="KEY", help="score each value of this key by itself too, as --by source")
    score.add_argument("--json", action="store_true", help="print rows as JSON")
    score.set_defaults(action=_score)

    predict = commands.add_parser("predict", help="headlines for every row of a test file, and their scores")
    _add_recipe(predict, "without it the base model predicts")
    predict.add_argument("--data", metavar="FILE", help="rows to predict (default: the recipe's data.test)")
    predict.add_argument("--out", metavar="DIR", help="where to write (default: predict in the recipe's output_dir)")
    predict.add_argument("--ranks", type=int, metavar="N", help="ranks to share the rows (default: the recipe's)")
    predict.add_argument("--limit", type=int, metavar="N", help="only the first N rows")
    predict.add_argument(
        "--as-text", action="store_true", help="ask for what follows the input as plain text: no instruction, no roles"
    )
    predict.add_argument("--json", action="store_true", help="print the results as JSON")
    predict.set_defaults(action=_predict)

    export = commands.add_parser(
        "export", help="base and adapter merged, as a checkpoint folder in the official layout"
    )
    _add_recipe(export, "what to merge", required=True)
    export.add_argument("--out", metavar="DIR", required=True, help="the folder to write, new or empty")
    export.add_argument("--dtype", choices=("bf16", "fp32"), help="of the weights (default: the base's own)")
    export.add_argument("--overwrite", action="store_true", help="replace a model that DIR holds")
    export.set_defaults(action=_export)

    chat = commands.add_parser("chat", help="talk to base and adapter in the terminal")
    _add_recipe(chat, "without it the base model answers")
    chat.set_defaults(action=_chat)


def _add_finetune_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe's name, or a .yaml file")
    _add_set(parser, "train.learning_rate=2e-4")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks to launch (default: the recipe's)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="KEY",
        help="with --resume: a key that may differ from what the run began with, as train.max_steps",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="remove what an earlier run left in the output folder")
    parser.add_argument("--on-cpu", action="store_true", help="run a recipe for GPUs on this machine's CPU")
    parser.add_argument("--list", action="store_true", help="list the recipes, and stop")
    parser.add_argument("--show", action="store_true", help="print the recipe's file with its comments, and stop")
    parser.add_argument("--json", action="store_true", help="print the outcome (or the list) as JSON")


def _add_recipe(parser: argparse.ArgumentParser, about: str, required: bool = False) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, as tiny-cpu, or its file")
    parser.add_argument("--adapter", metavar="DIR", required=required, help=f"a trained adapter; {about}")
    _add_set(parser, "predict.do_sample=true")


def _add_set(parser: argparse.ArgumentParser, example: str) -> None:
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
                        help=f"change a key of the recipe, as {example} (may be repeated)")  # fmt: skip


def _recipe(arguments: argparse.Namespace) -> "Recipe":
    from pardemo.finetune import recipe

    if arguments.recipe is None:
        raise ValueError(f"name a recipe: {', '.join(recipe.names())}, or a .yaml file")
    return recipe.override(recipe.load(arguments.recipe), arguments.changes)


def _job(arguments: argparse.Namespace, ranks: int | None) -> "Recipe":
    from pardemo.finetune import recipe

    job = _recipe(arguments)
    job = job if ranks is None else recipe.on_ranks(job, ranks)
    return recipe.override(job, ["world.device=any"]) if arguments.on_cpu else job


@work_goes_on()
def finetune(arguments: argparse.Namespace) -> int:
    """``pardemo finetune``."""
    argument_checks.at_least(arguments, 1, "ranks")
    from pardemo import RankError
    from pardemo.finetune import recipe
    from pardemo.finetune.launch import launch
    from pardemo.tables import text_table

    if arguments.list:
        rows = recipe.listing()
        table = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
        print(json.dumps(rows, indent=1) if arguments.json else text_table(table))
        return 0
    job = _job(arguments, arguments.ranks)
    if arguments.show:
        print(recipe.source(arguments.recipe), end="")
        return 0
    try:
        with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
            outcome = launch(job, arguments.resume, arguments.overwrite, arguments.allow)
    except RankError as error:
        print(f"pardemo finetune: {project.first_line(error)}", file=sys.stderr)
        return 1
    _print_outcome(outcome, arguments.json)
    return 0


@work_goes_on()
def main(argv: list[str] | None = None) -> int:
    """``python -m pardemo.finetune RECIPE``: as a rank where a launcher says so, else as ``pardemo finetune``."""
    parser = argparse.ArgumentParser(prog="pardemo.finetune", description="Fine-tune by a recipe.")
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher gives it
    _add_finetune_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        if "RANK" not in os.environ or arguments.list or arguments.show:
            return finetune(arguments)
        _as_rank(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        message = project.error_line(error)
        if "RANK" not in os.environ or launched.first_to_say(message):
            print(f"pardemo finetune: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _as_rank(arguments: argparse.Namespace) -> NoReturn:
    from pardemo.project import available_cores

    if missing := [name for name in launched.NEEDED if name not in os.environ]:
        raise ValueError(
            f"RANK is set, {', '.join(missing)} is not: start it by torchrun, deepspeed or accelerate launch"
        )
    size = int(os.environ["WORLD_SIZE"])
    job = _job(arguments, size)  # the launcher's number counts
    with without_garbage_collection():
        import pardemo.peers.deepspeed.engine  # noqa: F401, before the group: DeepSpeed chooses its device
        from pardemo.finetune.train import train

    beside = next((os.environ[name] for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in os.environ), size)
    launched.join(threads=max(1, available_cores() // int(beside)))
    from pardemo.world.rank import end

    outcome = train(job, arguments.resume, arguments.overwrite, allow=arguments.allow)
    if int(os.environ["RANK"]) == 0:
        _print_outcome(outcome, arguments.json)
    end()


def _print_outcome(outcome: "TrainingResult", as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(outcome), indent=1))
        return
    print(f"{outcome.steps} steps, mean loss {outcome.loss:.4f}, {outcome.seconds:.1f} s, {outcome.engine}"
          + (f" (ZeRO-{outcome.zero_stage})" if outcome.zero_stage is not None else "")
          + f" on {outcome.ranks} ranks; adapter: {os.path.relpath(outcome.adapter)}")  # fmt: skip


@work_goes_on()
def _predict(arguments: argparse.Namespace) -> int:
    argument_checks.at_least(arguments, 1, "ranks", "limit")
    job = _recipe(arguments)

    from pardemo import RankError, World
    from pardemo.finetune import predict
    from pardemo.finetune.recipe import locate
    from pardemo.headlines import read
    from pardemo.project import available_cores

    default = locate(job.output_dir) / ("predict" if arguments.adapter else "predict-base")
    out, ranks = Path(arguments.out or default), arguments.ranks or job.world.ranks
    predict.check_folders(job, arguments.adapter)
    rows = read(arguments.data or locate(job.data.test))[: arguments.limit]
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=out):  # OSError now rather than after an hour of generation
        pass
    try:
        threads = max(1, available_cores() // ranks)
        with World(ranks, preload=["pardemo.finetune.predict"], threads=threads) as world:
            generated = predict.predict_on(world, job, arguments.adapter, rows, as_text=arguments.as_text)
    except RankError as error:
        print(f"pardemo predict: {project.first_line(error)}; nothing was written", file=sys.stderr)
        return 1
    results = predict.save_predictions(out, rows, generated, arguments.as_text)
    if generated.cut:
        print(f"{generated.cut:,} of {len(rows):,} prompts were too long and cut to their heads", file=sys.stderr)
    _print_results(results, out, arguments.json)
    return 0


def _print_results(results: dict[str, Any], out: Path, as_json: bool) -> None:
    from pardemo.tables import text_table

    if as_json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
        return
    rows = [("score", "per cent", "95 % interval")]
    for name, (low, high) in results["intervals"].items():
        rows.append((name, f"{results[f'predict_{name}']:.2f}", f"{low:.2f} to {high:.2f}"))
    print(text_table(rows))
    seconds, rate = results["predict_runtime"], results["predict_samples_per_second"]
    print(f"{results['samples']:,} samples in {seconds:.1f} s, {rate} a second; written to {out}")


def _score(arguments: argparse.Namespace) -> int:
    from pardemo.finetune import metrics, predict
    from pardemo.tables import text_table

    rows = predict.read_predictions(arguments.file, *([arguments.by] if arguments.by else []))
    groups = {"all": rows}
    for row in rows if arguments.by else []:
        groups.setdefault(f"{arguments.by}={row[arguments.by]}", []).append(row)
    scored = [
        {"group": name} | metrics.score([row["predict"] for row in group], [row["label"] for row in group])
        for name, group in groups.items()
    ]
    table = [("score", "per cent", "95 % interval", "samples", "group")]
    for scores in scored:
        for name, (low, high) in scores["intervals"].items():
            span = f"{low:.2f} to {high:.2f}"
            table.append((name, f"{scores[name]:.2f}", span, f"{scores['samples']:,}", scores["group"]))
    print(json.dumps(scored, indent=1, ensure_ascii=False) if arguments.json else text_table(table))
    return 0


@work_goes_on()
def _export(arguments: argparse.Namespace) -> int:
    job = _recipe(arguments)

    from transformers.utils import logging

    from pardemo.finetune import models

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    dtype = models.DTYPES.get(arguments.dtype)
    out = models.export(job, arguments.adapter, arguments.out, dtype, arguments.overwrite)
    files = [path for path in out.iterdir() if path.is_file()]
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:.3f} GB, in {out}")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    job = _recipe(arguments)

    import torch

    from pardemo.finetune import models, predict

    model, tokenizer = models.base(job, "cuda" if torch.cuda.is_available() else "cpu")
    if arguments.adapter is not None:
        model = models.with_adapter(model, arguments.adapter)
    if sys.stdin.isatty():
        print("/new begins a new conversation, /quit (or Ctrl-D) ends")
    try:
        predict.chat(model.eval(), tokenizer, job.predict, _lines(), _write, job.train.seed)
    except KeyboardInterrupt:
        print()
    return 0


def _lines() -> Iterator[str]:
    """The user's messages; from a pipe as they are, in a terminal behind a prompt and with the keys of readline."""
    prompt = ""
    if sys.stdin.isatty():
        import readline  # noqa: F401, input() edits with it

        prompt = "> "
    else:
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
