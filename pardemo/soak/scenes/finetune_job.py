"""The job that the fine-tune's scenes disturb: the article's in small, and a run of it that nobody disturbed.

A random Baichuan2 of two layers, 96 generated headlines, six steps on two ranks.
"""

import hashlib
import json
import shutil
import time
from pathlib import Path

import torch

from pardemo import headlines
from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer, save_checkpoint
from pardemo.finetune import recipe
from pardemo.finetune.launch import launch
from pardemo.finetune.recipe import Recipe
from pardemo.finetune.tiny import train_tokenizer
from pardemo.project import only_writer
from pardemo.soak.scene import Scene

STEPS, EVERY = 6, 3
LAST, FIRST = f"checkpoint-{STEPS}", f"checkpoint-{EVERY}"
SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


def _model(folder: Path, texts: list[str], seed: int) -> None:
    folder.mkdir(parents=True)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 1400))
    tokenizer = Baichuan2Tokenizer(str(folder / "tokenizer.model"))
    torch.manual_seed(seed)
    config = Baichuan2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **SIZES)
    save_checkpoint(Baichuan2ForCausalLM(config), folder, tokenizer)


def base_of(scene: Scene) -> Path:
    """Data, two models and a run that was not disturbed: made once for all scenes of a soak."""
    base = scene.shared / "finetune"
    with only_writer(scene.shared, "wait"):
        if not base.exists():
            part = scene.shared / "finetune.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            rows, _ = headlines.corpus(train=96, test=8)
            (part / "train.json").write_text(json.dumps(rows, ensure_ascii=False), encoding="utf-8")
            for number, name in enumerate(("model", "other")):
                _model(part / name, [row["input"] + row["output"] for row in rows], number)
            launch(job_in(part, part / "run"))  # the first one of a process loads libraries
            shutil.rmtree(part / "run")
            begin = time.monotonic()
            launch(job_in(part, part / "run"))
            (part / "seconds").write_text(str(time.monotonic() - begin))
            part.rename(base)
    return base


def job_in(base: Path, run: Path, *changes: str) -> Recipe:
    """The job, with its output in ``run``."""
    usual = (
        f"model.path={base / 'model'}", f"data.train={base / 'train.json'}", f"data.test={base / 'train.json'}",
        f"train.max_steps={STEPS}", f"train.save_steps={EVERY}", "train.logging_steps=1",
        "train.per_device_train_batch_size=4", "train.warmup_steps=0", f"output_dir={run}",
    )  # fmt: skip
    return recipe.override(recipe.load("tiny-cpu"), [*usual, *changes])


def seconds_of(base: Path) -> float:
    """What the undisturbed run took."""
    return float((base / "seconds").read_text())


def adapter_of(run: Path) -> str:
    """The checksum of the weights that a run has trained."""
    return hashlib.sha256((run / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
