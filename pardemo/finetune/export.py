"""The adapter merged into its base, written as a checkpoint folder in the official layout."""

import os
from pathlib import Path

import torch

from pardemo.baichuan2 import load_checkpoint, load_tokenizer, read_config, save_checkpoint
from pardemo.finetune import models
from pardemo.finetune.recipes.recipe import locate
from pardemo.finetune.recipes.recipe_schema import Recipe


def export(
    recipe: Recipe, adapter: str | Path, out: str | Path, dtype: torch.dtype | None = None, overwrite: bool = False
) -> Path:
    """Writes base + adapter as one model, with tokenizer and generation settings; a folder ``out`` is a whole one.

    The weights are merged in the wider of the base's type and ``dtype``, so each is rounded once at most.

    Args:
        dtype: of all parameters; the base's own when None.
        overwrite: replace a model that ``out`` already holds.

    Raises:
        FileNotFoundError: no adapter, no base, no tokenizer.
        ValueError: the base is random; ``out`` is not empty, or the base or the adapter themselves; weights that are
            not whole.
        OSError: ``out`` cannot be written; what was there before is there still.
    """
    base, out = locate(recipe.model.path), Path(out)
    if recipe.model.init != "pretrained":
        raise ValueError("model.init is random: there is no checkpoint to merge the adapter into")
    models.check_adapter(adapter)
    _check_target(out, (base, Path(adapter)), overwrite)
    tokenizer, own = load_tokenizer(base), read_config(base).dtype or torch.bfloat16
    dtype = dtype or own
    model = models.with_adapter(load_checkpoint(base, torch.promote_types(own, dtype)), adapter)
    # save_pretrained imports DeepSpeed where it is installed, which says what it guesses unless it is told
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    merged = model.merge_and_unload(safe_merge=True).to(dtype)
    merged.config.dtype = dtype
    save_checkpoint(merged, out, tokenizer)
    return out


def _check_target(out: Path, sources: tuple[Path, ...], overwrite: bool) -> None:
    for source in sources:
        if out.resolve() == source.resolve() or out.resolve() in source.resolve().parents:
            raise ValueError(f"--out {out} would replace {source}, which is read here")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; a folder is written")
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise ValueError(f"--out {out} is not empty: name another folder, or add --overwrite")
        if not (out / "config.json").is_file():
            raise ValueError(f"--out {out} is not empty and holds no model (no config.json): it is not overwritten")
