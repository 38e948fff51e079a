"""A small random Baichuan2 with a tokenizer of its own, as a folder, and a recipe that names it; for several tests."""

import json
from pathlib import Path

import torch
from tiny_model import train_tokenizer

from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer, save_checkpoint
from pardemo.finetune import models, recipe

VOCABULARY = 331
TEXT = [f"第{i}号渡口开通夜航，票价{i % 7}.5元，每周{i % 5}班。Gate {i} opens at noon." for i in range(300)]


def rows(number: int) -> list[dict[str, str]]:
    """Rows of widely different lengths."""
    return [
        {
            "instruction": "拟一个标题:\n",
            "input": "".join(TEXT[(i * 7) % 200 : (i * 7) % 200 + 1 + i * 5 % 4]),
            "output": f"{i}号渡口开通夜航",
            "source": "even" if i % 2 == 0 else "odd",
        }
        for i in range(number)
    ]


def tokenizer(folder: Path) -> Baichuan2Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(TEXT, VOCABULARY))
    return Baichuan2Tokenizer(str(folder / "tokenizer.model"))


def model(position: str = "alibi", **changes) -> Baichuan2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "position_embedding": position, "initializer_range": 0.2}
    return Baichuan2ForCausalLM(Baichuan2Config(**{**sizes, "model_max_length": 400, **changes})).eval()


def folder(path: Path, **changes) -> Path:
    """A checkpoint folder whose generation settings are as those of the official ones: none may leak into greedy."""
    made = model(**changes)
    made.generation_config.update(do_sample=True, temperature=0.3, top_k=5, top_p=0.85, repetition_penalty=1.9)
    save_checkpoint(made, path / "base", tokenizer(path / "spm"))
    return path / "base"


def adapter(path: Path, settings: recipe.Recipe) -> Path:
    """An adapter with values that change what the model says."""
    peft = models.with_new_adapter(models.base(settings)[0], settings)
    for name, value in peft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.3, generator=torch.Generator().manual_seed(5))
    peft.save_pretrained(str(path))
    return path


def recipe_file(path: Path, base: Path, **predict) -> Path:
    """A recipe beside its data: 13 rows to predict."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "rows.json").write_text(json.dumps(rows(13), ensure_ascii=False), encoding="utf-8")
    values = {
        "model": {"path": str(base)},
        "data": {"train": str(path / "rows.json"), "test": str(path / "rows.json"), "cutoff_len": 64},
        "train": {"learning_rate": 0.001, "num_train_epochs": 1, "bf16": False},
        "predict": {"batch": 4, "max_new_tokens": 10, **predict},
        "output_dir": str(path / "saves"),
    }
    (path / "small.yaml").write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    return path / "small.yaml"
