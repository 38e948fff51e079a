"""Defines the options of ``pardemo plan``, and refuses those that the question would ignore."""

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from pardemo import argument_checks
from pardemo.planner import hardware
from pardemo.planner.layouts import layout_command
from pardemo.planner.layouts.layout_command import RANK, SEQUENCE
from pardemo.planner.layouts.tuning import BASES, STATES
from pardemo.planner.progress import progress

#: What is taken where an option is left out. The parser fills none of them in, so that set options can be told from
#: others.
LEFT_OUT = {
    "recipe": "baichuan2-13b-lora-bf16", "gpu": "A800-80GB", "samples": 80_000, "labels": 1.0, "tp": 1, "pp": 1,
}  # fmt: skip
PLAN = "a fine-tune's plan"
_JOB = ("model", "full", "target", "rank", "sequence", "per_step", "gpu", "gpus", "hosts", "link", "write", "snapshot")
#: The options of each question, and of the plan that is made where none of the others is asked.
TAKES = {
    PLAN: (
        *_JOB, "recipe", "batch", "samples", "epochs", "labels", "price", "tp", "pp", "zero",
        "checkpointing",
        "base", "optimizer", "fused_loss", "embeddings", "dry_run", "backwards", "all", "json",
    ),
    "--search": (*_JOB, "program", "precision", "price", "measured", "all", "json"),
    "--explain": (*_JOB, "program", "precision", "price", "measured", "json"),
    "--against": ("gpu", "picture", "json"),
    "--validate": ("json",),
    "--measure": ("gpus", "json"),
}  # fmt: skip
#: Options of a fine-tune's plan that a layout says in words of its own.
_IN_A_LAYOUT = {
    "tp": "tp=8", "pp": "pp=4", "zero": "sharding=zero1", "batch": "micro_batch=2", "checkpointing": "recompute=full",
}  # fmt: skip


_OPTIONS: dict[str, dict[str, Any]] = {
    "model": {"metavar": "MODEL", "help": "a folder, a config.json, or a name, as baichuan2-13b"},
    "recipe": {"metavar": "RECIPE", "help": f"a recipe ({LEFT_OUT['recipe']})"},
    "full": {"action": "store_true", "help": "train all parameters instead of the recipe's LoRA (as --search and "
             "--explain do unless told --target or --rank)"},
    "target": {"metavar": "NAMES",
               "help": "LoRA's modules, as q_proj,v_proj; with --search and --explain: train LoRA"},
    "rank": {"type": int, "metavar": "N",
             "help": f"of LoRA's matrices (the recipe's; of --search and --explain {RANK})"},
    "base": {"choices": tuple(BASES), "metavar": "KIND",
             "help": "of LoRA's frozen weights: nf4 (QLoRA), int8, … (bf16)"},
    "optimizer": {"choices": tuple(STATES), "metavar": "NAME", "help": "adamw-8bit, paged-adamw, … (adamw)"},
    "fused_loss": {"action": "store_true", "help": "logits made piece by piece in the loss (Liger's)"},
    "embeddings": {"action": "store_true", "help": "LoRA, and embedding and head whole (PEFT's modules_to_save)"},
    "dry_run": {"action": "store_true",
                "help": "also run the recommended row's engine on fake tensors, and compare"},
    "batch": {"type": int, "metavar": "N", "help": "only this micro-batch (default: those that divide)"},
    "sequence": {"type": int, "metavar": "N",
                 "help": f"tokens of a sample (the recipe's cutoff_len; of --search and --explain {SEQUENCE:,})"},
    "samples": {"type": int, "metavar": "N", "help": "samples of the data set (80,000)"},
    "epochs": {"type": float, "metavar": "E", "help": "how often the fine-tune goes through them (the recipe's, 5)"},
    "per_step": {"type": int, "metavar": "N", "help": "samples of an optimizer step (the recipe's; of --search one a "
                 "GPU, of --explain what the layout makes)"},
    "labels": {"type": float, "metavar": "SHARE", "help": "of the tokens, with a label (1)"},
    "gpu": {"metavar": "GPU", "help": "A800-80GB, H100, …, or a profile.json (A800-80GB)"},
    "gpus": {"type": int, "metavar": "N",
             "help": "in all (default: the recipe's ranks; --search and --explain want it said)"},
    "hosts": {"type": int, "metavar": "N", "help": "that they are on (hosts of at most 8, or of the profile's size)"},
    "link": {"metavar": "LINK", "help": "between hosts: a name, or Gbit/s (the profile's, or ethernet-100g)"},
    "price": {"type": float, "metavar": "X", "help": "of a GPU and hour, in any currency"},
    "tp": {"type": int, "metavar": "N", "help": "tensor-parallel ranks (1)"},
    "pp": {"type": int, "metavar": "N", "help": "pipeline stages (1)"},
    "zero": {"nargs": "+", "choices": ("0", "1", "2", "3", "fsdp2"), "metavar": "STAGE",
             "help": "only these; fsdp2 is FSDP2"},
    "checkpointing": {"choices": ("on", "off"), "help": "only so (default: both)"},
    "backwards": {"action": "store_true", "help": "also: longest sequence, largest batch, fewest GPUs"},
    "write": {"metavar": "DIR", "help": "write configurations and launch commands there: of the best row or layout, "
              "or the explained one"},
    "snapshot": {"metavar": "FILE", "help": "write that row's or layout's planned memory there (x.pickle), for "
                 "torch's memory viewer"},
    "validate": {"action": "store_true", "help": "instead: the planner against runs whose outcome is known"},
    "measure": {"metavar": "FILE", "help": "instead: measure this machine's rates, for --gpu FILE"},
}  # fmt: skip
SHOWN = 20  # rows of the table


def add_plan(commands: Any, profile_of_traces: Callable[[Sequence[str]], dict[str, Any]]) -> None:
    """Adds ``plan`` to the command line's parser; ``profile_of_traces`` makes a profile's fields of files of a job."""
    plan = commands.add_parser(
        "plan", help="a full-size job before renting it: memory, time, money, configuration files"
    )
    for name, how in _OPTIONS.items():
        plan.add_argument(option(name), **how)
    layout_command.add_layout_options(plan)
    plan.add_argument(
        "--all",
        action="store_true",
        help=f"print all rows, not the first {SHOWN}; with --search all of the front of time and memory",
    )
    plan.add_argument("--json", action="store_true", help="print rows as JSON")
    plan.set_defaults(action=_plan, profile_of_traces=profile_of_traces)


def _plan(arguments: argparse.Namespace) -> int:
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    question = question_of(arguments)
    if layouts := layout_command.answer_to(question):
        return layouts(arguments)
    if arguments.measure:
        from pardemo.planner import measure_profile

        return measure_profile.measure_machine(arguments.measure, arguments.gpus, arguments.json)
    if arguments.validate:
        return _validate(arguments.json)
    from pardemo.planner.fine_tune import answer

    return answer.answer_plan(arguments, None if arguments.all else SHOWN)


def _validate(as_json: bool) -> int:
    from pardemo.planner import validate

    rows = validate.validate(progress)
    print(json.dumps(rows, indent=1) if as_json else validate.as_text(rows))
    return 0


def question_of(arguments: argparse.Namespace) -> str:
    """Returns the question that is asked, of :data:`TAKES`, and fills in the options that were left out.

    Raises:
        ValueError: two were asked, or one with an option that it has no use for; a number that is impossible.
    """
    set_options = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    questions = [question for question in TAKES if question.removeprefix("--") in set_options]
    if len(questions) > 1:
        raise ValueError(f"{' and '.join(questions)} are two questions; ask one of them")
    question = questions[0] if questions else PLAN
    every = [name for takes in TAKES.values() for name in takes]
    if foreign := [name for name in dict.fromkeys(every) if name in set_options and name not in TAKES[question]]:
        raise ValueError(_refusal(question, foreign))
    _check_numbers(arguments)
    if arguments.gpu is not None and layout_command.traces_of(arguments):
        raise ValueError("--measured's traces say the GPU and its rates; leave out --gpu")
    for name, value in LEFT_OUT.items():
        if getattr(arguments, name) is None and question != "--against":  # its files name their GPUs themselves
            setattr(arguments, name, value)
    return question


def _check_numbers(arguments: argparse.Namespace) -> None:
    """Refuses what is impossible before torch is loaded, which takes seconds."""
    argument_checks.at_least(
        arguments, 1, "gpus", "hosts", "sequence", "per_step", "batch", "samples", "tp", "pp", "rank"
    )
    if arguments.epochs is not None:
        argument_checks.above_zero(arguments.epochs, "--epochs")
    argument_checks.at_least(arguments, 0, "price")
    if arguments.target is not None and not arguments.target.strip():
        raise ValueError("--target is empty; it names LoRA's modules, as q_proj,v_proj or all-linear")
    if arguments.full and arguments.embeddings:
        raise ValueError("--full trains embedding and head with all the rest; leave out --embeddings")
    if arguments.full and (foreign := [name for name in ("target", "rank") if getattr(arguments, name) is not None]):
        raise ValueError(f"--full trains all parameters, and {option(foreign[0])} is LoRA's; leave out one of them")
    if arguments.labels is not None and not 0 < arguments.labels <= 1:
        raise ValueError(f"--labels is a share above 0 and up to 1, not {arguments.labels}")
    if arguments.price == float("inf"):
        raise ValueError("--price must be a number, not inf")
    if arguments.link is not None:
        hardware.link(arguments.link)


def _refusal(question: str, foreign: list[str]) -> str:
    """Returns the message for options that a question does not take: where they belong, and what to say instead."""
    name = foreign[0]
    others = [other for other, takes in TAKES.items() if name in takes]
    belongs = f"{option(name)} goes with {' or '.join(others)}"
    if question == PLAN:
        return belongs
    message = f"{question} has no use for {', '.join(map(option, foreign))}: {belongs}"
    if question in ("--search", "--explain") and (
        words := [_IN_A_LAYOUT[word] for word in foreign if word in _IN_A_LAYOUT]
    ):
        message += f"; one layout is asked for as --explain {','.join(words)}"
    return message


def option(name: str) -> str:
    """Returns an option as it is typed."""
    return f"--{name.replace('_', '-')}"
