"""Small models, tokenizers and texts, made up, in the forms in which scripts of others load theirs."""

import json
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = 480
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<|im_start|>")


def words(count: int, seed: int) -> list[str]:
    """Sentences of made-up words, from 8 to 24 of them."""
    draw = random.Random(seed)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(draw.randrange(8, 25))) for _ in range(count)]


def tokenizer(folder: Path, **described: Any) -> None:
    """A tokenizer of whole words, of :data:`SPECIAL` and :data:`WORDS` tokens, as Transformers loads one."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *(f"w{n}" for n in range(WORDS))))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    marks = [("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", marks)
    made.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    as_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **special, **described})


def as_json(path: Path, content: Any) -> None:
    """Writes a file of one JSON object, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def as_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a file of one JSON object a line, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def llama(folder: Path) -> dict[str, Any]:
    """A configuration of a Llama of four layers of 128, with its tokenizer."""
    described = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(SPECIAL) + WORDS,
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    tokenizer(folder)
    as_json(folder / "config.json", described)
    return described


def llama_weights(described: dict[str, Any], path: Path) -> None:
    """Random weights for :func:`llama`, by the names of Transformers."""
    torch.manual_seed(0)
    h, i, vocabulary = (described[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, h), "model.norm.weight": (h,)}
    shapes["lm_head.weight"] = (vocabulary, h)
    for layer in range(described["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.self_attn.{part}_proj.weight": (h, h) for part in "qkvo"}
        shapes |= {f"{name}.mlp.{part}_proj.weight": (i, h) for part in ("gate", "up")}
        shapes |= {f"{name}.mlp.down_proj.weight": (h, i)}
        shapes |= {f"{name}.{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, path)


def stand_in(module: str, *names: str, within: Path) -> None:
    """A module that can be imported, and whose functions say, if they are called, that they are not there."""
    file = within.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True, exist_ok=True)
    absent = "def _absent(*_, **__):\n    raise NotImplementedError('a stand-in, to be imported only')\n\n\n"
    file.write_text(absent + "".join(f"{name} = _absent\n" for name in names), encoding="utf-8")


def nanogpt(folder: Path, clone: Path) -> None:
    """A data set in nanoGPT's form: random characters of an alphabet of 320."""
    data, draw = folder / "data" / "pardemo", random.Random(0)
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        numpy.array([draw.randrange(320) for _ in range(100_000)], dtype=numpy.uint16).tofile(data / f"{name}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 320}))


def deepspeed(folder: Path, clone: Path) -> None:
    """A Llama's folder, with random weights."""
    llama_weights(llama(folder / "tiny-llama"), folder / "tiny-llama" / "model.safetensors")


def picotron(folder: Path, clone: Path) -> None:
    """A model's folder, its weights where picotron looks for what it has downloaded, a text, and a configuration.

    Its model.py imports three functions of flash_attn also where its option says that they are not to be called.
    """
    for module, name in (("flash_attn_interface", "flash_attn_func"), ("layers.rotary", "apply_rotary_emb"),
                         ("ops.triton.layer_norm", "layer_norm_fn")):  # fmt: skip
        stand_in(f"flash_attn.{module}", name, within=folder / "stand-ins")
    described = llama(folder / "tiny-llama")
    as_json(folder / "hf_model" / "tiny-llama" / "config.json", described)
    llama_weights(described, folder / "hf_model_safetensors" / "model.safetensors")
    as_lines(folder / "tiny-text" / "train.jsonl", [{"text": line} for line in words(4000, 0)])
    as_json(folder / "config.json", {
        "distributed": {
            "tp_size": 2, "cp_size": 1, "pp_size": 2, "dp_size": 2, "pp_engine": "1f1b", "backend": "nccl",
            "use_cpu": False,
        },
        "model": {"name": "tiny-llama", "dtype": "bfloat16", "use_flash_attention": False, "use_fused_adam": True},
        "training": {
            "seed": 42, "learning_rate": 3e-4, "total_train_steps": 20, "seq_length": 64, "micro_batch_size": 4,
            "gradient_accumulation_steps": 4, "num_samples": 4000, "max_tokens": None,
        },
        "dataset": {"name": "tiny-text", "subset_name": None, "num_workers": 0, "num_proc": 1},
        "checkpoint": {"save_dir": "ckpt", "save_frequency": 300, "load_path": ""},
        "logging": {"use_wandb": False, "project_name": "picotron", "run_name": None},
        "environment": {
            "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": "none",
        },
    })  # fmt: skip


def accelerate(folder: Path, clone: Path) -> None:
    """A BERT of two layers of 128, pairs of sentences and a metric, where the names of the hub's are looked for."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    BertModel(BertConfig(vocab_size=len(SPECIAL) + WORDS, max_position_embeddings=64, **sizes)).save_pretrained(
        folder / "bert-base-cased"
    )
    tokenizer(folder / "bert-base-cased", model_max_length=64)
    glue = folder / "nyu-mll" / "glue"
    for split, count in (("train", 1024), ("validation", 128), ("test", 128)):
        pairs = zip(words(count, count), words(count, count + 1), strict=True)
        rows = [{"sentence1": a, "sentence2": b, "label": n % 2, "idx": n} for n, (a, b) in enumerate(pairs)]
        as_lines(glue / f"{split}.jsonl", rows)
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "validation", "test"))
    glue.joinpath("README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n")
    metric = folder / "glue" / "glue.py"
    metric.parent.mkdir(exist_ok=True)
    metric.write_text(METRIC, encoding="utf-8")


METRIC = '''"""Accuracy, in the place of the metric that evaluate would load from the hub."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="accuracy", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(predictions)}
'''


def torchtitan(folder: Path, clone: Path) -> None:
    """A text by the name of the one that torchtitan tests itself with, beside its own tokenizer."""
    assets = folder / "tests" / "assets"
    as_lines(assets / "c4_test" / "data.json", [{"text": line} for line in words(2000, 0)])
    shutil.copytree(clone / "tests" / "assets" / "tokenizer", assets / "tokenizer", dirs_exist_ok=True)
