"""The models of a recipe: the base as it is in its folder, with a new adapter, or a trained one, or merged with it."""

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from pardemo import extras, project

with extras.needed_by(__name__):
    from peft import PeftModel, get_peft_model
    from safetensors import SafetensorError

from pardemo.baichuan2 import (
    Baichuan2ForCausalLM,
    Baichuan2Tokenizer,
    load_checkpoint,
    load_tokenizer,
    read_config,
    save_checkpoint,
)
from pardemo.finetune import lora
from pardemo.finetune.recipe import Recipe, locate, to_dict
from pardemo.world import bf16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def base(recipe: Recipe, device: torch.device | str = "cpu") -> tuple[Baichuan2ForCausalLM, Baichuan2Tokenizer]:
    """The base model in the recipe's precision, frozen, and its tokenizer.

    Raises:
        FileNotFoundError, ValueError: the folder is not whole; see :func:`pardemo.baichuan2.load_checkpoint`.
    """
    bf16.through_fp32_where_slow()  # a prediction runs in the command's own process
    folder, dtype = locate(recipe.model.path), DTYPES[recipe.train.precision]
    changes = {name: value for name, value in to_dict(recipe.model).items() if name != "path"}
    return load_checkpoint(folder, dtype, device, **changes).requires_grad_(False), load_tokenizer(folder)


def with_new_adapter(model: Baichuan2ForCausalLM, recipe: Recipe) -> PeftModel:
    """The model with LoRA on the recipe's modules: only the adapter is trained, in fp32 whatever the base has.

    Its first values depend on the seed alone, so that all ranks begin alike.

    Raises:
        ValueError: no module of the model has such a name.
    """
    config = lora.config(model, **to_dict(recipe.lora))
    torch.manual_seed(recipe.train.seed)
    with _peft():
        return get_peft_model(model, config)


def check_adapter(adapter: str | Path) -> None:
    """Raises FileNotFoundError where the folder holds no adapter."""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (Path(adapter) / name).is_file():
            raise FileNotFoundError(f"{adapter} is no adapter's folder: it has no {name}")


def with_adapter(model: Baichuan2ForCausalLM, adapter: str | Path) -> PeftModel:
    """The model with a trained adapter from its folder, in evaluation mode.

    Raises:
        FileNotFoundError: the folder holds no adapter. ValueError: it cannot be read, or is another model's.
    """
    check_adapter(adapter)
    try:
        with _peft():
            warnings.filterwarnings("error", "Found missing adapter keys")  # they would stay zero: no adapter at all
            return PeftModel.from_pretrained(model, str(adapter)).eval()
    except (UserWarning, RuntimeError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ValueError(f"{adapter} is no adapter of this model: {project.one_line(error, 200)}") from None


def export(
    recipe: Recipe, adapter: str | Path, out: str | Path, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Path:
    """Writes base + adapter as one model in the official layout, with tokenizer and generation settings.

    A folder ``out`` is a whole one. The weights are merged in the wider of the base's type and ``dtype``, so each is
    rounded once at most.

    Args:
        dtype: of all parameters; the base's own when None.
        overwrite: replace a model that ``out`` already holds.

    Raises:
        FileNotFoundError: no adapter, no base, no tokenizer.
        ValueError: ``out`` is not empty, or the base or the adapter themselves; weights that are not whole.
        OSError: ``out`` cannot be written; what was there before is there still.
    """
    folder, out = locate(recipe.model.path), Path(out)
    check_adapter(adapter)
    for source in (folder, Path(adapter)):
        if out.resolve() == source.resolve() or out.resolve() in source.resolve().parents:
            raise ValueError(f"--out {out} would replace {source}, which is read here")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; a folder is written")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"--out {out} is not empty: name another folder, or add --overwrite")
        if not (out / "config.json").is_file():
            raise ValueError(f"--out {out} is not empty and holds no model (no config.json): it is not overwritten")
    tokenizer, base_dtype = load_tokenizer(folder), read_config(folder).dtype or torch.bfloat16
    dtype = dtype or base_dtype
    model = with_adapter(load_checkpoint(folder, torch.promote_types(base_dtype, dtype)), adapter)
    # save_pretrained imports DeepSpeed where it is installed, which says what it guesses unless it is told
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    merged = model.merge_and_unload(safe_merge=True).to(dtype)
    merged.config.dtype = dtype
    save_checkpoint(merged, out, tokenizer)
    return out


@contextlib.contextmanager
def _peft() -> Iterator[None]:
    """PEFT asks Transformers for a name that is going to go, which is no user's business."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield
