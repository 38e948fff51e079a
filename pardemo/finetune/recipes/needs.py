"""Checks what a recipe needs on this machine, before a run fails for lack of it."""

from typing import Any

import torch

from pardemo.baichuan2.checkpoints import find_shards, read_config
from pardemo.finetune.recipes import recipe
from pardemo.finetune.recipes.recipe_schema import Recipe


def needs(job: Recipe, gpus: int = 0, gpu_gb: float = 0) -> list[dict[str, Any]]:
    """Rows of ``what, needed, found, ok``: the model's folder, the data, and so many GPUs of so much memory."""
    rows = [_row("model folder", job.model.path, *_model(job))]
    for label, path in (("training data", job.data.train), ("test data", job.data.test)):
        exists = recipe.locate(path).is_file()
        rows.append(_row(label, path, "there" if exists else "no such file", exists))
    if gpus:
        sizes = [torch.cuda.get_device_properties(i).total_memory / 1e9 for i in range(torch.cuda.device_count())]
        present = f"{len(sizes)}" + (f" of {min(sizes):.0f} GB" if sizes else "")
        enough = sum(size >= 0.98 * gpu_gb for size in sizes) >= gpus  # 80 GB cards report a little less
        rows.append(_row("GPUs", f"{gpus} of {gpu_gb:g} GB", present, enough))
    return rows


def _model(job: Recipe) -> tuple[str, bool]:
    folder = recipe.locate(job.model.path)
    try:
        read_config(folder)
        shards = find_shards(folder)
    except (ValueError, OSError) as error:
        return str(error).replace(str(folder), job.model.path), False
    return f"{len(shards)} files, {sum(path.stat().st_size for path in shards) / 1e9:.1f} GB", True


def _row(what: str, needed: str, found: str, ok: bool) -> dict[str, Any]:
    return {"what": what, "needed": needed, "found": found, "ok": ok}
