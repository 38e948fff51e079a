"""The models of a recipe: the base as it is in its folder, with a new adapter, or with a trained one."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from pardemo import extras

with extras.needed_by(__name__):
    from peft import PeftModel, get_peft_model
    from safetensors import SafetensorError

from pardemo.baichuan2 import Baichuan2ForCausalLM, Baichuan2Tokenizer, load_checkpoint, load_tokenizer, read_config
from pardemo.finetune import lora
from pardemo.finetune.recipes.recipe import locate
from pardemo.finetune.recipes.recipe_schema import Recipe
from pardemo.world import bf16

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def base(recipe: Recipe, device: torch.device | str = "cpu") -> tuple[Baichuan2ForCausalLM, Baichuan2Tokenizer]:
    """The base model in the recipe's precision, frozen, and its tokenizer.

    Raises:
        FileNotFoundError, ValueError: the folder is not whole; see :func:`pardemo.baichuan2.load_checkpoint`.
    """
    bf16.through_fp32_where_slow()  # a prediction runs in the command's own process
    folder, dtype = locate(recipe.model.path), DTYPES[recipe.train.precision]
    changes = {"loss_head": recipe.train.loss_head, "attention": recipe.train.attention}
    if recipe.model.init == "pretrained":
        model = load_checkpoint(folder, dtype, device, **changes)
    else:
        torch.manual_seed(recipe.train.seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # never a copy in fp32 first
        try:
            with torch.device(device):
                model = Baichuan2ForCausalLM(read_config(folder, **changes)).eval()
        finally:
            torch.set_default_dtype(before)
    return model.requires_grad_(False), load_tokenizer(folder)


def with_new_adapter(model: Baichuan2ForCausalLM, recipe: Recipe) -> PeftModel:
    """The model with LoRA on the recipe's modules: only the adapter is trained, in fp32 whatever the base has.

    Its first values depend on the seed alone, so that all ranks begin alike.

    Raises:
        ValueError: no module of the model has such a name.
    """
    config = lora.settings(recipe.lora, model)
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
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{adapter} is no adapter of this model: {reason}") from None


@contextlib.contextmanager
def _peft() -> Iterator[None]:
    """PEFT asks Transformers for a name that is going to go, which is no user's business."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
        yield
