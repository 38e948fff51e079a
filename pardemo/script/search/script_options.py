"""Reads the options of a script from its text, without running it: those that say how it is run in parallel."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: Names under which scripts have a size of :data:`pardemo.script.compare.run_layouts.SIZES`, or the batch of a rank.
NAMES = {
    "tp": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pp": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "cp": ("cp", "cp_size", "context_parallel", "context_parallel_size"),
    "ep": ("ep", "ep_size", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"),
    "sp": ("sp_size", "sequence_parallel_size", "ulysses"),
    "accumulate": ("accumulate", "accumulation", "accumulation_steps", "gradient_accumulation_steps", "grad_accum"),
    "micro_batches": ("micro_batches", "num_microbatches", "microbatches"),
    "batch": ("batch", "batch_size", "micro_batch", "micro_batch_size", "per_device_train_batch_size"),
}
#: Options whose choices are ways to run the same training.
WAYS = ("sharding", "shard", "parallel", "parallelism", "strategy", "engine", "wrap", "zero", "zero_stage", "stage",
        "schedule", "checkpointing", "recompute", "activation_checkpointing", "reshard", "sync")  # fmt: skip


@dataclass(frozen=True)
class ScriptOption:
    """An option that a script's parser has: ``flag`` as it is written, its choices and its default where it says them.

    ``takes_value``: False of a switch, as one with ``action="store_true"`` is.
    """

    flag: str
    choices: tuple[Any, ...] = ()
    default: Any = None
    takes_value: bool = True

    @property
    def name(self) -> str:
        """The name of its value: ``tp_size`` of ``--tp-size``."""
        return self.flag.lstrip("-").replace("-", "_")


def script_options(text: str) -> dict[str, ScriptOption]:
    """Returns the options of a script's ``add_argument`` calls by name; none where it is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {option.name: option for node in ast.walk(tree) for option in _options_of(node)}


def _options_of(node: ast.AST) -> Iterator[ScriptOption]:
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
    if not (called and isinstance(node, ast.Call)):
        return
    flags = [value for argument in node.args if isinstance(value := _literal(argument), str) and value[:2] == "--"]
    if flags:
        given = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
        choices = given.get("choices")
        yield ScriptOption(
            flags[0], tuple(choices) if isinstance(choices, (list, tuple)) else (), given.get("default"),
            not str(given.get("action", "store")).startswith(("store_", "count", "help", "version")),
        )  # fmt: skip


def _literal(node: ast.expr) -> Any:
    """Returns what an expression says without being run; None where it is more than a literal."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def option_for(name: str, options: Mapping[str, ScriptOption]) -> ScriptOption | None:
    """Returns the option that takes the value called ``name``: of that name, or of another one in :data:`NAMES`."""
    known = [options[other] for other in (name, *NAMES.get(name, ())) if other in options]
    return next((option for option in known if option.takes_value), None)
