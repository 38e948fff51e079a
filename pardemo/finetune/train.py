"""The fine-tune on one rank: transformers' Trainer, PEFT and DeepSpeed, put together from a recipe and checked.

Every rank of a job calls :func:`train`: those of a :class:`pardemo.World` (``pardemo finetune``), of torchrun, of
DeepSpeed's or Accelerate's launcher.
"""

import copy
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pardemo import compat, extras, signed_folders

with extras.needed_by(__name__):
    import transformers
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from pardemo.baichuan2 import Baichuan2Tokenizer
from pardemo.finetune import checkpoints, models, recipe
from pardemo.finetune.logs import Progress, TokenCount, draw_loss
from pardemo.finetune.recipe import Recipe
from pardemo.finetune.samples import Collator, Order, Samples, pack
from pardemo.world.rank import device


@dataclass
class TrainingResult:
    """Result of a run: optimizer steps, the mean training loss, where things are, and what actually ran."""

    steps: int
    loss: float
    run: str
    adapter: str
    engine: str
    zero_stage: int | None
    ranks: int
    tokens: int
    seconds: float
    resumed_from: str | None = None
    notes: list[str] = field(default_factory=list)


def train(
    job: Recipe,
    resume: bool = False,
    overwrite: bool = False,
    callbacks: Sequence[TrainerCallback] = (),
    allow: Sequence[str] = (),
) -> TrainingResult:
    """Runs the recipe on this rank; all ranks of the job call it alike.

    Writes into the recipe's ``output_dir``: ``recipe.yaml``, ``train_log.jsonl``, TensorBoard's events, ``loss.png``,
    signed ``checkpoint-N`` folders, and at the end ``adapter``.

    Args:
        resume: go on from the newest checkpoint that is whole and ours; from the beginning where none was written.
        overwrite: remove what an earlier run left in the folder.
        callbacks: of transformers, further ones.
        allow: keys of the recipe that may differ from those of the run that is resumed; of
            :data:`pardemo.finetune.checkpoints.CHANGEABLE`.

    Raises:
        ValueError, FileNotFoundError: recipe, model or data are not what they should be; the folder holds an earlier
            run, and neither ``resume`` nor ``overwrite`` was given; checkpoints that none can be read of, or of other
            data, batch or settings; another run writes to the folder.
        RuntimeError: the ranks or DeepSpeed's stage are not those of the recipe; nothing trains unsynchronised.
        OSError: a checkpoint or the adapter could not be written, as on a full disk; the last whole one is named.
    """
    forget_earlier_runs()
    job = recipe.on_ranks(job, _size())  # a launcher's number counts
    recipe.preflight(job, on_cpu=device().type == "cpu")
    run = recipe.locate(job.output_dir)
    with checkpoints.only_run(run):
        return _train(job, run, *checkpoints.begin_run(run, job, resume, overwrite, allow), callbacks)


def _train(
    job: Recipe, run: Path, start: Path | None, notes: list[str], callbacks: Sequence[TrainerCallback]
) -> TrainingResult:
    # under ZeRO-3 no rank's GPU may hold the whole model; otherwise no host needs to hold it once per rank
    model, tokenizer = models.base(job, "cpu" if job.zero_stage == 3 else device())
    data = _samples(job, job.data.train, tokenizer, job.data.max_samples)
    valid = None if job.data.valid is None else _samples(job, job.data.valid, tokenizer)
    trainer = _Trainer(
        job=job,
        run=run,
        model=models.with_new_adapter(model, job),
        args=arguments_of(job, run, start),
        train_dataset=data,
        eval_dataset=valid,
        data_collator=Collator(tokenizer.pad_token_id, multiple=1 if device().type == "cpu" else 8),
        callbacks=list(callbacks),
    )
    for unwanted in (transformers.PrinterCallback, transformers.trainer_callback.ProgressCallback):
        trainer.remove_callback(unwanted)
    trainer.add_callback(Progress(run, trainer.tokens.total))
    if job.train.early_stopping_patience is not None:
        trainer.add_callback(EarlyStoppingCallback(job.train.early_stopping_patience))
    if trainer.is_world_process_zero():
        recipe.save(job, run / "recipe.yaml")
        for line in notes:
            print(line, flush=True)
    try:
        outcome = trainer.train(resume_from_checkpoint=None if start is None else str(start))
    finally:
        if start is not None and checkpoints.UNIVERSAL in start.name and trainer.is_world_process_zero():
            shutil.rmtree(start, ignore_errors=True)
    engine, stage = _check_engine(trainer, job)
    adapter = _save_adapter(trainer, run)
    tokens = trainer.tokens.total()
    if trainer.is_world_process_zero():
        draw_loss(run)
    return TrainingResult(
        steps=outcome.global_step,
        loss=outcome.training_loss,
        run=str(run),
        adapter=str(adapter),
        engine=engine,
        zero_stage=stage,
        ranks=trainer.args.world_size,
        tokens=tokens,
        seconds=outcome.metrics["train_runtime"],
        resumed_from=None if start is None else start.name.lstrip(".").partition(checkpoints.UNIVERSAL)[0],
        notes=notes,
    )


def _samples(job: Recipe, path: str, tokenizer: Baichuan2Tokenizer, limit: int | None = None) -> Samples:
    samples = Samples.read(recipe.locate(path), tokenizer, job.data.cutoff_len, limit)
    return pack(samples, job.data.cutoff_len) if job.data.packing else samples


class _Trainer(Trainer):
    """The Trainer with our order of samples, real tokens counted, and checkpoints that are signed when whole."""

    def __init__(self, job: Recipe, run: Path, **kwargs: Any):
        self._job, self._run = job, run
        self.tokens = TokenCount(kwargs["data_collator"].fills["input_ids"])
        super().__init__(**kwargs)
        if self.accelerator.num_processes != _size():  # two ways of starting end in plain replicas without a word
            raise RuntimeError(f"{_size()} ranks were started, Accelerate knows {self.accelerator.num_processes}")
        if (job.deepspeed is not None) != (used := self.is_deepspeed_enabled):
            raise RuntimeError(f"DeepSpeed is {'' if used else 'not '}in use, the recipe says otherwise")

    def _get_train_sampler(self, train_dataset=None) -> Order:
        data, job = self.train_dataset, self._job
        return Order(len(data), job.step_samples, job.train.seed, data.lengths if job.data.group_by_length else None)

    def training_step(self, model, inputs, *args, **kwargs):
        self.tokens.add(inputs["input_ids"])
        return super().training_step(model, inputs, *args, **kwargs)

    def _save_checkpoint(self, model, trial) -> None:
        folder = self._run / f"checkpoint-{self.state.global_step}"
        if self.is_world_process_zero():
            shutil.rmtree(folder, ignore_errors=True)  # what a killed run left there
        self.accelerator.wait_for_everyone()
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # of the system, of torch, of safetensors: each has its own
            readable = (f for f in checkpoints.folders(self._run) if f != folder and not signed_folders.fault(f))
            last = next(readable, None)
            # without one before it: the adapter twice, AdamW's moments and copy of it, all in fp32
            nbytes = checkpoints.folder_bytes(last) if last else checkpoints.trained_bytes(model, 20)
            reason = checkpoints.why_not_written(error, folder, nbytes)
            raise OSError(f"{folder.name} could not be written ({reason}); the last whole checkpoint is "
                          f"{last.name if last else 'none'}") from error  # fmt: skip
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            about = checkpoints.fingerprint(self._job)
            signed_folders.sign(folder, step=self.state.global_step, ranks=self._job.world.ranks, run=about)
            checkpoints.remove_oldest(self._run, self._job.train.save_total_limit)
        self.accelerator.wait_for_everyone()


def arguments_of(job: Recipe, run: Path, start: Path | None = None) -> TrainingArguments:
    """The recipe's own, and what goes with this package's samples, log and checkpoints."""
    train = {name: value for name, value in recipe.to_dict(job.train).items() if value is not None}
    train.pop("save_total_limit", None)  # the Trainer's own rotation would count checkpoints that cannot be read
    patient = train.pop("early_stopping_patience", None) is not None
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(run / "tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return TrainingArguments(
            **train,
            output_dir=str(run),
            per_device_eval_batch_size=train["per_device_train_batch_size"],
            activation_checkpointing_kwargs={"use_reentrant": False} if train["activation_checkpointing"] else None,
            logging_first_step=True,
            save_strategy="steps" if "save_steps" in train else "no",
            eval_strategy="steps" if "eval_steps" in train else "no",
            metric_for_best_model="eval_loss" if patient else None,
            prediction_loss_only=True,
            restore_callback_states_from_checkpoint=start is not None,  # early stopping's patience
            use_cpu=device().type == "cpu",
            ddp_backend=dist.get_backend() if dist.is_initialized() else None,
            deepspeed=_deepspeed(job, start),
            remove_unused_columns=False,
            report_to=["tensorboard"],
            disable_tqdm=True,
        )


def _deepspeed(job: Recipe, start: Path | None) -> dict[str, Any] | None:
    settings = copy.deepcopy(job.deepspeed)
    if settings is None:
        return None
    if job.zero_stage == 3:  # else an adapter would be saved in shards
        settings["zero_optimization"].setdefault("stage3_gather_16bit_weights_on_model_save", True)
    if start is not None and checkpoints.UNIVERSAL in start.name:
        settings["checkpoint"] = {**settings.get("checkpoint", {}), "load_universal": True}
    return settings


def _check_engine(trainer: _Trainer, job: Recipe) -> tuple[str, int | None]:
    """The class that wrapped the model and DeepSpeed's stage, as they are and not as they were asked for."""
    engine = trainer.model_wrapped
    name = type(engine).__name__
    if job.deepspeed is not None:
        from pardemo.peers.deepspeed.engine import assert_runs

        assert_runs(engine, job.zero_stage, _size())
        return name, job.zero_stage
    if _size() > 1 and name != "DistributedDataParallel":
        raise RuntimeError(f"{_size()} ranks trained in a {name}: their gradients were not synchronised")
    return name, None


def _save_adapter(trainer: _Trainer, run: Path) -> Path:
    """Writes the adapter beside its place first: a folder of that name is a whole one."""
    adapter, part = run / "adapter", run / ".adapter.part"
    try:
        trainer.save_model(str(part))  # all ranks: under ZeRO-3 they gather it
    except Exception as error:
        reason = checkpoints.why_not_written(error, part, checkpoints.trained_bytes(trainer.model, 4))
        raise OSError(f"the adapter could not be written ({reason})") from error
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        for extra in ("training_args.bin", "README.md"):  # a pickle, and a page with nothing in it
            (part / extra).unlink(missing_ok=True)
        shutil.rmtree(adapter, ignore_errors=True)
        part.rename(adapter)
    trainer.accelerator.wait_for_everyone()
    return adapter


def forget_earlier_runs() -> None:
    """A process that trained before keeps Accelerate's choice of then: the next run would silently use it."""
    compat.AcceleratorState_reset(reset_partial_state=True)
    unset_hf_deepspeed_config()
    if "deepspeed" in sys.modules:
        from pardemo.peers.deepspeed import engine as deepspeed

        deepspeed.give_back_linear()
        deepspeed.prepare()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_") and name != "ACCELERATE_USE_CPU"]:
        del os.environ[name]
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*torch.distributed.*is deprecated")


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
