"""A fine-tune as one YAML file: model, data, LoRA, training, prediction, DeepSpeed, ranks.

Every key is a field below, with its type and range; whatever else a file says is refused by name before anything
starts. Read, changed and written in :mod:`pardemo.finetune.recipes.recipe`.
"""

from typing import Annotated, Any, Literal

from pardemo import extras

with extras.needed_by(__name__):
    from pydantic import Field, StrictBool, model_validator

from pydantic.dataclasses import dataclass

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=1)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
section = dataclass(frozen=True, kw_only=True, config={"extra": "forbid"})


@section
class ModelSettings:
    """The base model: a checkpoint folder; ``init: random`` reads only its configuration, for benches."""

    path: Text
    init: Literal["pretrained", "random"] = "pretrained"


@section
class Data:
    """JSON files of instruction, input, output, source; ``max_samples`` takes the first ones of the training file.

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
class LoraSettings:
    """Adapters of ``rank`` on the modules named by ``target``, their output scaled by alpha / rank."""

    rank: Count = 8
    alpha: Positive = 32
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = 0.1
    target: Annotated[tuple[Text, ...], Field(min_length=1)] = ("W_pack",)


@section
class Train:
    """The loop. Steps are optimizer steps; where ``max_steps`` is given it ends the run, whatever ``epochs`` says.

    ``early_stopping`` is the number of evaluations without a better loss after which the run ends. ``loss_head:
    labels`` computes logits only where there is a label, and ``attention: blocks`` on a CPU only those scores that are
    seen: the same loss and gradients to rounding.
    """

    learning_rate: Positive
    # those of transformers' SchedulerType that need no settings of their own
    scheduler: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"] = "cosine"
    warmup_steps: Whole = 0
    epochs: Positive | None = None
    max_steps: Count | None = None
    per_device_batch: Count = 8
    accumulation: Count = 1
    max_grad_norm: NotNegative = 1.0  # 0: no clipping
    precision: Literal["fp32", "fp16", "bf16"] = "bf16"
    gradient_checkpointing: StrictBool = True
    logging_steps: Count = 5
    save_steps: Count | None = None
    save_limit: Count | None = None
    eval_steps: Count | None = None
    early_stopping: Count | None = None
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**32)] = 42
    loss_head: Literal["labels", "full"] = "labels"
    attention: Literal["blocks", "whole"] = "blocks"

    @model_validator(mode="after")
    def _ends_and_stops(self) -> "Train":
        if self.epochs is None and self.max_steps is None:
            raise ValueError("epochs or max_steps has to be given")
        if self.early_stopping is not None and self.eval_steps is None:
            raise ValueError("early_stopping needs eval_steps: without an evaluation nothing ever stops")
        return self


@section
class Predict:
    """Generation: ``batch`` prompts at a time and rank; greedy, or sampled as the article's tool sampled by default."""

    batch: Count = 8
    max_new_tokens: Count = 512
    do_sample: StrictBool = False
    temperature: Positive = 0.95
    top_p: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.7
    top_k: Whole = 50  # 0: no limit


@section
class RankSettings:
    """The ranks that ``pardemo finetune`` launches, each with a GPU of its own where there are so many.

    ``device``: where there are none, ``any`` means the CPU; ``gpu`` is refused, so that nobody waits a year for a job
    of eight GPUs.
    """

    ranks: Count = 1
    device: Literal["any", "gpu"] = "any"


@section
class Recipe:
    """All of a fine-tune. ``deepspeed`` is DeepSpeed's own configuration, or null for plain data parallelism."""

    model: ModelSettings
    data: Data
    lora: LoraSettings = LoraSettings()
    train: Train
    predict: Predict = Predict()
    deepspeed: dict[str, Any] | None = None
    world: RankSettings = RankSettings()
    output_dir: Text

    @model_validator(mode="after")
    def _evaluates_on_something(self) -> "Recipe":
        if self.train.eval_steps is not None and self.data.valid is None:
            raise ValueError("train.eval_steps needs data.valid: the test file is for the end")
        return self

    @model_validator(mode="after")
    def _deepspeed_agrees(self) -> "Recipe":
        for key, ours, value in _shared_with_deepspeed(self):
            theirs = _at(self.deepspeed, key)
            if theirs not in (None, "auto") and (
                theirs != value or isinstance(theirs, bool) != isinstance(value, bool)
            ):
                raise ValueError(f"deepspeed.{key} is {theirs!r}, but {ours} is {value!r}: make it 'auto'")
        if self.deepspeed is not None:
            if "gradient_clipping" not in self.deepspeed:  # left out it is Accelerate's default, not max_grad_norm
                raise ValueError("deepspeed.gradient_clipping has to be given: make it 'auto'")
            if "scheduler" in self.deepspeed:
                raise ValueError("deepspeed.scheduler would replace train.scheduler: leave it out")
        return self


def _shared_with_deepspeed(recipe: Recipe) -> list[tuple[str, str, Any]]:
    """DeepSpeed's key, ours, and our value, of what both could set. Two values: the Trainer refuses on every rank."""
    train = recipe.train
    step_samples = train.per_device_batch * train.accumulation * recipe.world.ranks
    return [
        ("train_batch_size", "per_device_batch × accumulation × ranks", step_samples),
        ("train_micro_batch_size_per_gpu", "train.per_device_batch", train.per_device_batch),
        ("gradient_accumulation_steps", "train.accumulation", train.accumulation),
        ("gradient_clipping", "train.max_grad_norm", train.max_grad_norm),
        ("fp16.enabled", "train.precision == fp16", train.precision == "fp16"),
        ("bf16.enabled", "train.precision == bf16", train.precision == "bf16"),
        ("optimizer.params.lr", "train.learning_rate", train.learning_rate),
    ]


def _at(mapping: Any, key: str) -> Any:
    for part in key.split("."):
        mapping = mapping.get(part) if isinstance(mapping, dict) else None
    return mapping
