"""A fine-tune as one YAML file: model, data, LoRA, training, prediction, DeepSpeed, ranks.

``lora`` has fields of ``peft.LoraConfig``, ``train`` of ``transformers.TrainingArguments`` and ``predict`` of
``transformers.GenerationConfig``, under their own names and with their own meaning; ``model``, ``data`` and ``world``
are ours. What else a file says is refused by name before anything starts: every key below is one that a resumed run
compares or that may change between two runs. Every error is one line that names the key. Nothing here loads torch.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

from pydantic import Field, StrictBool, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from pardemo import argument_checks, project
from pardemo.finetune import strict_yaml

FOLDER = Path(__file__).parent / "recipes"
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
section = dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})

#: Keys of recipes of pardemo 0.1 -> where they are now.
RENAMED = {
    "lora.rank": "lora.r",
    "lora.alpha": "lora.lora_alpha",
    "lora.dropout": "lora.lora_dropout",
    "lora.target": "lora.target_modules",
    "train.scheduler": "train.lr_scheduler_type",
    "train.epochs": "train.num_train_epochs",
    "train.per_device_batch": "train.per_device_train_batch_size",
    "train.accumulation": "train.gradient_accumulation_steps",
    "train.precision": "train.bf16 and train.fp16, true or false,",
    "train.gradient_checkpointing": "train.activation_checkpointing",
    "train.save_limit": "train.save_total_limit",
    "train.early_stopping": "train.early_stopping_patience",
    "train.loss_head": "model.loss_head",
    "train.attention": "model.attention",
}


@section
class Model:
    """The base model: a checkpoint folder.

    ``loss_head: labels`` computes logits only where there is a label, and ``attention: blocks`` on a CPU only those
    scores that are seen: the same loss and gradients to rounding.
    """

    path: Text
    loss_head: Literal["labels", "full"] = "labels"
    attention: Literal["blocks", "whole"] = "blocks"


@section
class Data:
    """JSON files of rows; ``max_samples`` takes the first ones of the training file.

    ``valid`` is for evaluation during training; the test file is for the end.

    ``cutoff_len``: tokens of a sample, longer ones are cut. A batch holds samples of like length
    (``group_by_length``), or several in a row of ``cutoff_len`` (``packing``), or as they come.
    """

    train: Text
    test: Text
    valid: Text | None = None
    max_samples: Count | None = None
    cutoff_len: Count = 1024
    packing: StrictBool = False
    group_by_length: StrictBool = True

    @model_validator(mode="after")
    def _one_way_of_batching(self) -> "Data":
        if self.packing and self.group_by_length:
            raise ValueError("packing and group_by_length exclude one another: packed rows are all of one length")
        return self


@section
class Lora:
    """peft.LoraConfig: adapters of rank ``r`` on the modules named, their output scaled by lora_alpha / r."""

    r: Count = 8
    lora_alpha: Positive = 32
    lora_dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.1
    target_modules: Annotated[list[Text], Field(min_length=1)] = Field(default_factory=lambda: ["W_pack"])


@section
class Train:
    """transformers.TrainingArguments. Where ``max_steps`` is given it ends the run, whatever ``num_train_epochs`` says.

    ``save_steps`` and ``eval_steps`` of null: no checkpoint, no evaluation. ``early_stopping_patience`` is
    EarlyStoppingCallback's: the evaluations without a better loss after which the run ends.
    """

    learning_rate: Positive
    # those of transformers' SchedulerType that need no settings of their own
    lr_scheduler_type: Literal[
        "linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"
    ] = "cosine"  # fmt: skip
    warmup_steps: Whole = 0
    num_train_epochs: Positive | None = None
    max_steps: Count | None = None
    per_device_train_batch_size: Count = 8
    gradient_accumulation_steps: Count = 1
    max_grad_norm: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 1.0  # 0: no clipping
    bf16: StrictBool = True
    fp16: StrictBool = False
    activation_checkpointing: StrictBool = True
    logging_steps: Count = 5
    save_steps: Count | None = None
    save_total_limit: Count | None = None
    eval_steps: Count | None = None
    early_stopping_patience: Count | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 42

    @property
    def precision(self) -> str:
        """The weights' precision: ``bf16``, ``fp16``, or ``fp32`` where neither is asked for."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"

    @model_validator(mode="after")
    def _ends_and_stops(self) -> "Train":
        if self.bf16 and self.fp16:
            raise ValueError("bf16 and fp16 exclude one another: fp16 needs bf16 to be false")
        if self.num_train_epochs is None and self.max_steps is None:
            raise ValueError("num_train_epochs or max_steps has to be given")
        if self.early_stopping_patience is not None and self.eval_steps is None:
            raise ValueError("early_stopping_patience needs eval_steps: without an evaluation nothing ever stops")
        return self


@section
class Predict:
    """transformers.GenerationConfig, and ``batch``: prompts at a time and rank. ``top_k`` 0 is no limit."""

    batch: Count = 8
    max_new_tokens: Count = 512
    do_sample: StrictBool = False
    temperature: Positive = 0.95
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.7
    top_k: Whole = 50


@section
class WorldSettings:
    """The ranks that ``pardemo finetune`` launches, each with a GPU of its own where there are so many.

    ``device``: where there are none, ``any`` means the CPU; ``gpu`` is refused, so that nobody waits a year for a job
    of eight GPUs.
    """

    ranks: Count = 1
    device: Literal["any", "gpu"] = "any"


@section
class Recipe:
    """All of a fine-tune. ``deepspeed`` is DeepSpeed's own configuration, or null for plain data parallelism."""

    model: Model
    data: Data
    lora: Lora = Lora()
    train: Train
    predict: Predict = Predict()
    deepspeed: dict[str, Any] | None = None
    world: WorldSettings = WorldSettings()
    output_dir: Text

    @property
    def step_samples(self) -> int:
        """Samples of an optimizer step, over all ranks."""
        return self.train.per_device_train_batch_size * self.train.gradient_accumulation_steps * self.world.ranks

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's stage, 0 without DeepSpeed."""
        return (self.deepspeed or {}).get("zero_optimization", {}).get("stage", 0)

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> "Recipe":
        if self.train.eval_steps is not None and self.data.valid is None:
            raise ValueError("train.eval_steps needs data.valid: the test file is for the end")
        return self

    @model_validator(mode="after")
    def _deepspeed_agrees(self) -> "Recipe":
        """Of what both could set there are no two values: the Trainer would refuse them on every rank."""
        if self.deepspeed is None:
            return self
        train = self.train
        for key, name, expected in (
            ("train_batch_size", "samples of a step", self.step_samples),
            ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", train.per_device_train_batch_size),
            ("gradient_accumulation_steps", "gradient_accumulation_steps", train.gradient_accumulation_steps),
            ("gradient_clipping", "max_grad_norm", train.max_grad_norm),
            ("fp16.enabled", "fp16", train.fp16),
            ("bf16.enabled", "bf16", train.bf16),
            ("optimizer.params.lr", "learning_rate", train.learning_rate),
        ):
            value: Any = self.deepspeed
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value not in (None, "auto", expected):
                raise ValueError(f"deepspeed.{key} is {value!r}, but train's {name} is {expected!r}: make it 'auto'")
        if "gradient_clipping" not in self.deepspeed:  # left out it is Accelerate's default, not max_grad_norm
            raise ValueError("deepspeed.gradient_clipping has to be given: make it 'auto'")
        if "scheduler" in self.deepspeed:
            raise ValueError("deepspeed.scheduler would replace train.lr_scheduler_type: leave it out")
        return self


def names() -> list[str]:
    """The recipes that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name_or_path: str | Path) -> Recipe:
    """The recipe of that name, or in that file.

    Raises:
        ValueError: no such recipe; not YAML; a key that does not exist (with the nearest that does, or its new name),
            a missing one, a value of the wrong type or out of range; the file and the key are named.
    """
    path = _path_of(name_or_path)
    try:
        values = strict_yaml.parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _build(values, path.name if path.parent == FOLDER else str(path))


def source(name_or_path: str | Path) -> str:
    """The recipe's file as it is, with its comments: reasons, and what is inferred."""
    return _path_of(name_or_path).read_text(encoding="utf-8")


def listing() -> list[dict[str, Any]]:
    """A row for each recipe of the package: name, ranks, samples a step, precision, what it is for."""
    return [
        {
            "name": name, "ranks": job.world.ranks, "samples a step": job.step_samples,
            "precision": job.train.precision, "about": source(name).partition("\n")[0].lstrip("# "),
        }
        for name, job in ((name, load(name)) for name in names())
    ]  # fmt: skip


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
        *above, last = keys = key.strip().split(".")
        values: Any = changed
        for depth, name in enumerate(above, 1):
            values[name] = values = {} if values.get(name) is None else values[name]
            if not isinstance(values, dict):
                raise ValueError(f"--set {assignment}: {'.'.join(keys[:depth])} is a value, not a section")
        # where text stands now, text is meant: output_dir=2023 is a folder; but deepspeed's "auto" may become anything
        is_text = isinstance(values.get(last), str) and keys[0] != "deepspeed"
        try:
            values[last] = text if is_text else strict_yaml.parse(text)
        except ValueError as error:
            raise ValueError(f"--set {assignment}: {error}") from None
    return _build(changed, "--set " + " ".join(assignments)) if assignments else recipe


def on_ranks(recipe: Recipe, ranks: int) -> Recipe:
    """``recipe`` for another number of ranks. Raises ValueError where DeepSpeed's configuration names a batch."""
    return recipe if ranks == recipe.world.ranks else override(recipe, [f"world.ranks={ranks}"])


def save(recipe: Recipe, path: str | Path) -> None:
    """Writes a file that :func:`load` reads back as the same recipe."""
    project.write_text(Path(path), strict_yaml.dump(to_dict(recipe)))


def to_dict(recipe: Any) -> dict[str, Any]:
    """A recipe, or a section of one, as plain mappings, lists and values: what YAML and JSON can hold."""
    return dataclasses.asdict(recipe)


def from_dict(plain: dict[str, Any]) -> Recipe:
    """The recipe of :func:`to_dict`. Raises ValueError as :func:`load`."""
    return _build(plain, "recipe")


def locate(path: str | Path) -> Path:
    """Resolves a path of a recipe: as it is when absolute, else from the project's root."""
    return project.root() / Path(path).expanduser()


class Steps(NamedTuple):
    """Optimizer steps."""

    per_epoch: int
    total: int


def steps(recipe: Recipe, samples: int, world_size: int | None = None) -> Steps:
    """Optimizer steps per epoch and in all, as transformers 5.23's Trainer counts them.

    A rank's batches are the rounded-up share of the rounded-up batches (Accelerate evens them out), and what is left
    of an epoch after whole accumulations is a step too (``Trainer.set_initial_training_values``). The Trainer of
    2023 floored that division. The article's 80,000 × 5 / 256: 1,565 kept, 1,560 floored.

    Args:
        samples: rows of the training file (of which ``max_samples`` may take fewer), or packed rows.
        world_size: ranks, the recipe's by default.
    """
    ranks = recipe.world.ranks if world_size is None else world_size
    argument_checks.whole_number(samples, "samples")
    argument_checks.whole_number(ranks, "ranks")
    count = min(samples, recipe.data.max_samples or samples)
    train = recipe.train
    batches = math.ceil(math.ceil(count / train.per_device_train_batch_size) / ranks)
    per_epoch = math.ceil(batches / train.gradient_accumulation_steps)
    return Steps(per_epoch, train.max_steps or math.ceil((train.num_train_epochs or 0) * per_epoch))


def preflight(recipe: Recipe, on_cpu: bool) -> None:
    """Checks a recipe before any rank starts: raises ValueError, in one line, for what would fail on all of them."""
    if on_cpu and recipe.train.fp16:
        raise ValueError("train.fp16 is true, which DeepSpeed refuses on a CPU: set it to false, and bf16 to true or "
                         "false")  # fmt: skip
    if on_cpu and recipe.world.device == "gpu":
        count = f"{recipe.world.ranks} GPU{'s' * (recipe.world.ranks > 1)}"
        raise ValueError(f"the recipe is for {count} (world.device: gpu), and its ranks would run on the CPU here: "
                         "--on-cpu, or --set world.device=any, runs it there all the same")  # fmt: skip
    if recipe.deepspeed is not None:
        from pardemo.peers.deepspeed import deepspeed_settings

        try:
            deepspeed_settings.check_settings(recipe.deepspeed, recipe.world.ranks, on_cpu)
        except ValueError as error:
            raise ValueError(f"deepspeed: {error}") from None


def _path_of(name_or_path: str | Path) -> Path:
    text, path = str(name_or_path), Path(name_or_path)
    if text in names():
        return FOLDER / f"{text}.yaml"
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    raise ValueError(f"no recipe {text!r}{argument_checks.nearest(text, names())}; or name a .yaml file")


def _build(value: Any, origin: str) -> Recipe:
    try:
        return TypeAdapter(Recipe).validate_python(value)
    except ValidationError as error:
        # a misspelt key is the reason of the one that is missing: it comes first
        details = min(error.errors(include_url=False), key=lambda e: e["type"] != "unexpected_keyword_argument")
        raise ValueError(f"{origin}: {_error_text(details)}") from None


def _error_text(error: Any) -> str:
    """One of pydantic's errors in a line: the dotted key, what is wrong, what would be right."""
    location = [str(part) for part in error["loc"]]
    key, got = ".".join(location) or "the recipe", error["input"]
    match error["type"]:
        case "unexpected_keyword_argument":
            return f"{'.'.join(location[:-1]) or 'a recipe'} has no key {location[-1]!r}{_suggestion(key)}"
        case "missing":
            return f"{key} is missing"
        case "dataclass_type" | "dict_type":
            return f"{key} must be a section of keys, not {got!r}"
        case "value_error":
            return f"{key}: {error['ctx']['error']}" if location else str(error["ctx"]["error"])
        case _:
            text = re.sub("^(Input|List|String) should", "must", error["msg"]).removesuffix(" after validation, not 0")
            return f"{key} {text}, not {got!r}"


def _suggestion(key: str) -> str:
    """The new name of a key, else the nearest one of the same section, else the same one of another section."""
    if key in RENAMED:
        return f"; it is {RENAMED[key]} now"
    section, _, last = key.rpartition(".")
    hints = get_type_hints(Recipe)
    keys = {name: list(get_type_hints(kind)) for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    elsewhere = [f"; did you mean '{name}.{last}'?" for name in keys if last in keys[name]]
    return argument_checks.nearest(last, keys.get(section, list(hints)), next(iter(elsewhere), None))
