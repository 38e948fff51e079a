"""``pardemo predict``, ``export`` and ``chat``: what is done with a fine-tuned model."""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pardemo import options
from pardemo.closed_pipe import work_goes_on

if TYPE_CHECKING:
    from pardemo.finetune.recipes.recipe_schema import Recipe


def add(commands: Any) -> None:
    """Adds the subcommands to the command line's parser."""
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


def _add_recipe(parser: argparse.ArgumentParser, about: str, required: bool = False) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe's name, as tiny-cpu, or its file")
    parser.add_argument("--adapter", metavar="DIR", required=required, help=f"a trained adapter; {about}")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="changes",
        help="change a key of the recipe, as predict.do_sample=true (may be repeated)",
    )  # fmt: skip


def _recipe(arguments: argparse.Namespace) -> "Recipe":
    from pardemo.finetune.recipes import recipe

    return recipe.override(recipe.load(arguments.recipe), arguments.changes)


@work_goes_on()
def _predict(arguments: argparse.Namespace) -> int:
    options.at_least(arguments, 1, "ranks", "limit")
    recipe = _recipe(arguments)

    from pardemo.finetune.prediction import predict
    from pardemo.finetune.recipes.recipe import locate
    from pardemo.headlines import read
    from pardemo.world.errors import RankError

    default = locate(recipe.output_dir) / ("predict" if arguments.adapter else "predict-base")
    out = Path(arguments.out) if arguments.out else default
    predict.check(recipe, arguments.adapter)
    rows = read(arguments.data or locate(recipe.data.test))[: arguments.limit]
    _check_writable(out)
    try:
        generated = _on_ranks(
            arguments.ranks or recipe.world.ranks, recipe, arguments.adapter, rows, as_text=arguments.as_text
        )
    except RankError as error:
        print(f"pardemo predict: {_first_line(error)}; nothing was written", file=sys.stderr)
        return 1
    results = predict.save(out, rows, generated, arguments.as_text)
    if generated.cut:
        print(f"{generated.cut:,} of {len(rows):,} prompts were too long and cut to their heads", file=sys.stderr)
    _show(results, out, arguments.json)
    return 0


def _on_ranks(ranks: int, recipe: "Recipe", adapter: str | None, rows: list[dict[str, Any]], as_text: bool) -> Any:
    from pardemo.finetune.prediction import predict
    from pardemo.project import available_cores
    from pardemo.world import World

    threads = max(1, available_cores() // ranks)
    with World(ranks, preload=["pardemo.finetune.prediction.predict"], threads=threads) as world:
        return predict.predict_on(world, recipe, adapter, rows, as_text=as_text)


def _show(results: dict[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=1, ensure_ascii=False))
        return
    from pardemo.tables import text_table

    rows = [("score", "per cent", "95 % interval")]
    for name, (low, high) in results["intervals"].items():
        rows.append((name, f"{results[f'predict_{name}']:.2f}", f"{low:.2f} to {high:.2f}"))
    print(text_table(rows))
    seconds, rate = results["predict_runtime"], results["predict_samples_per_second"]
    print(f"{results['samples']:,} samples in {seconds:.1f} s, {rate} a second; written to {out}")


def _check_writable(folder: Path) -> None:
    """Raises OSError now rather than after an hour of generation."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@work_goes_on()
def _export(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)

    from transformers.utils import logging

    from pardemo.finetune.export import export
    from pardemo.finetune.models import DTYPES

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    out = export(recipe, arguments.adapter, arguments.out, DTYPES.get(arguments.dtype), arguments.overwrite)
    files = [path for path in out.iterdir() if path.is_file()]
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e9:.3f} GB, in {out}")
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    recipe = _recipe(arguments)

    import torch

    from pardemo.finetune import models
    from pardemo.finetune.prediction.chat import HELP, chat

    model, tokenizer = models.base(recipe, "cuda" if torch.cuda.is_available() else "cpu")
    if arguments.adapter is not None:
        model = models.with_adapter(model, arguments.adapter)
    if sys.stdin.isatty():
        print(HELP)
    try:
        chat(model.eval(), tokenizer, recipe.predict, _lines(), _write, recipe.train.seed)
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
        sys.stdin.reconfigure(encoding="utf-8", errors="replace")
    while True:
        try:
            yield input(prompt)
        except EOFError:
            if prompt:
                print()
            return


def _write(piece: str) -> None:
    print(piece, end="", flush=True)
