"""Recipes: read by name or path, changed key by key, written, checked before a start; their steps counted.

Every error is one line that names the key. Paths in a recipe are relative to the project unless absolute:
:func:`locate`.
"""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from pardemo import extras

with extras.needed_by(__name__):
    from pydantic import TypeAdapter, ValidationError

from pardemo import project
from pardemo.finetune.recipes import strict_yaml
from pardemo.finetune.recipes.recipe_schema import Recipe

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name_or_path: str | Path) -> Recipe:
    """The recipe of that name, or in that file.

    Raises:
        ValueError: no such recipe; not YAML; a key that does not exist (with the nearest that does), a missing one,
            a value of the wrong type or out of range; the file and the key are named.
    """
    path = _path_of(name_or_path)
    return _build(_mapping(path), str(path) if path.parent != FOLDER else path.name)


def source(name_or_path: str | Path) -> str:
    """The recipe's file as it is, with its comments: reasons, and what is inferred."""
    return _path_of(name_or_path).read_text(encoding="utf-8")


def listing() -> list[dict[str, Any]]:
    """A row for each recipe of the package: name, ranks, samples a step, precision, what it is for."""
    rows = []
    for name in names():
        recipe = load(name)
        train, ranks = recipe.train, recipe.world.ranks
        about = source(name).partition("\n")[0].lstrip("# ")
        step_samples = train.per_device_batch * train.accumulation * ranks
        rows.append(
            {"name": name, "ranks": ranks, "samples a step": step_samples, "precision": train.precision, "about": about}
        )
    return rows


def override(recipe: Recipe, assignments: Sequence[str]) -> Recipe:
    """``recipe`` with some keys changed, each as ``train.learning_rate=2e-4``; the value is read as YAML.

    Raises:
        ValueError: as :func:`load`.
    """
    changed = to_dict(recipe)
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals or not key:
            raise ValueError(f"--set takes KEY=VALUE, as train.learning_rate=2e-4, not {assignment!r}")
        _set(changed, key.strip().split("."), text, assignment)
    return _build(changed, "--set " + " ".join(assignments)) if assignments else recipe


def save(recipe: Recipe, path: str | Path) -> None:
    """Writes a file that :func:`load` reads back as the same recipe."""
    text = strict_yaml.dump(to_dict(recipe))
    project.write_atomically(Path(path), lambda temporary: temporary.write_text(text, encoding="utf-8"))


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Plain mappings, lists and values: what YAML and JSON can hold."""
    plain = dataclasses.asdict(recipe)
    plain["lora"]["target"] = list(plain["lora"]["target"])
    return plain


def from_dict(plain: dict[str, Any]) -> Recipe:
    """The recipe of :func:`to_dict`. Raises ValueError as :func:`load`."""
    return _build(plain, "recipe")


def locate(path: str | Path) -> Path:
    """Where a path of a recipe leads: as it is when absolute, else from the project's root."""
    return project.root() / Path(path).expanduser()


class Steps(NamedTuple):
    """Optimizer steps."""

    per_epoch: int
    total: int


def steps(recipe: Recipe, samples: int, world_size: int | None = None, keep_partial: bool = True) -> Steps:
    """Optimizer steps per epoch and in all, as transformers 5.23's Trainer counts them.

    A rank's batches are the rounded-up share of the rounded-up batches (Accelerate evens them out), and what is left
    of an epoch after whole accumulations is a step too (``Trainer.set_initial_training_values``). The Trainer of
    2023 floored that division: ``keep_partial=False``. The article's 80,000 × 5 / 256: 1,565 kept, 1,560 floored.

    Args:
        samples: rows of the training file (of which ``max_samples`` may take fewer), or packed rows.
        world_size: ranks, the recipe's by default.
    """
    ranks = recipe.world.ranks if world_size is None else world_size
    if samples < 1 or ranks < 1:
        raise ValueError(f"samples and ranks must be at least 1, not {samples} and {ranks}")
    count = min(samples, recipe.data.max_samples or samples)
    train = recipe.train
    batches = math.ceil(math.ceil(count / train.per_device_batch) / ranks)
    whole, left = divmod(batches, train.accumulation)
    per_epoch = max(1, whole + (keep_partial and left > 0))
    return Steps(per_epoch, train.max_steps or math.ceil(train.epochs * per_epoch))


def preflight(recipe: Recipe, on_cpu: bool) -> None:
    """What can be known before any rank starts: raises ValueError, in one line, for what would fail on all of them."""
    if on_cpu and recipe.train.precision == "fp16":
        raise ValueError("train.precision is fp16, which DeepSpeed refuses on a CPU: use bf16 or fp32")
    if on_cpu and recipe.world.device == "gpu":
        count = f"{recipe.world.ranks} GPU{'s' * (recipe.world.ranks > 1)}"
        raise ValueError(f"the recipe is for {count} (world.device: gpu), and its ranks would run on the CPU here: "
                         "--on-cpu, or --set world.device=any, runs it there all the same")  # fmt: skip
    if recipe.deepspeed is not None:
        from pardemo.peers.deepspeed import settings as deepspeed_settings

        try:
            deepspeed_settings.check(recipe.deepspeed, recipe.world.ranks, on_cpu)
        except ValueError as error:
            raise ValueError(f"deepspeed: {error}") from None


def _path_of(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if text in names():
        return FOLDER / f"{text}.yaml"
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    raise ValueError(f"no recipe {text!r}{_nearest(text, names())}; or name a .yaml file")


def _mapping(path: Path) -> Any:
    try:
        return strict_yaml.parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _set(section: dict[str, Any], keys: list[str], text: str, assignment: str) -> None:
    *path, last = keys
    for depth, key in enumerate(path, 1):
        if section.get(key) is None:
            section[key] = {}
        if not isinstance(section[key], dict):
            raise ValueError(f"--set {assignment}: {'.'.join(keys[:depth])} is a value, not a section")
        section = section[key]
    # where text stands now, text is meant: output_dir=2023 is a folder; but deepspeed's "auto" may become anything
    is_text = isinstance(section.get(last), str) and keys[0] != "deepspeed"
    try:
        section[last] = text if is_text else strict_yaml.parse(text)
    except ValueError as error:
        raise ValueError(f"--set {assignment}: {error}") from None


def _build(value: Any, where: str) -> Recipe:
    try:
        return TypeAdapter(Recipe).validate_python(value)
    except ValidationError as error:
        # a misspelt key is the reason of the one that is missing: tell it first
        first = min(error.errors(include_url=False), key=lambda e: e["type"] != "unexpected_keyword_argument")
        raise ValueError(f"{where}: {_error_text(first)}") from None


def _error_text(error: dict[str, Any]) -> str:
    """One of pydantic's errors in a line: the dotted key, what is wrong, what would be right."""
    *above, last = location = [str(part) for part in error["loc"]] or ["the recipe"]
    key, got = ".".join(location), error["input"]
    match error["type"]:
        case "unexpected_keyword_argument":
            return f"{'.'.join(above) or 'a recipe'} has no key {last!r}{_suggestion(above, last)}"
        case "missing":
            return f"{key} is missing"
        case "dataclass_type" | "dict_type":
            return f"{key} must be a section of keys, not {got!r}"
        case "tuple_type":
            return f"{key} must be a list, as [W_pack], not {got!r}"
        case "value_error":
            return f"{key}: {error['ctx']['error']}" if error["loc"] else str(error["ctx"]["error"])
        case "literal_error":
            return f"{key} must be {error['ctx']['expected']}, not {got!r}"
        case "too_short" | "string_too_short":
            return f"{key} must not be empty"
        case _:
            return f"{key} {error['msg'].replace('Input should', 'must', 1)}, not {got!r}"


def _suggestion(above: list[str], key: str) -> str:
    """The nearest key of the same section, else the same key of another."""
    sections = {name: kind for name, kind in get_type_hints(Recipe).items() if dataclasses.is_dataclass(kind)}
    siblings = [field.name for field in dataclasses.fields(sections[above[0]] if above else Recipe)]
    elsewhere = [f"{name}.{field.name}" for name, kind in sections.items() for field in dataclasses.fields(kind)]
    same = [full for full in elsewhere if full.partition(".")[2] == key]
    near = difflib.get_close_matches(key, siblings, 1) or same
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(siblings)}"


def _nearest(text: str, candidates: list[str]) -> str:
    near = difflib.get_close_matches(text, candidates, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(candidates)}"
