"""Checkpoint folders, as downloaded or our own: looked through first, then read shard by shard, never run."""

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pardemo import extras, project

with extras.needed_by(__name__):
    from safetensors import SafetensorError, safe_open

from pardemo.baichuan2.configuration import Baichuan2Config
from pardemo.baichuan2.modeling import Baichuan2ForCausalLM

SINGLE, INDEX = ("model.safetensors", "pytorch_model.bin"), ".index.json"
#: A layer is an object of a tenth of a millisecond and 50 kB, also without its parameters.
MOST_LAYERS = 10_000


def load_checkpoint(
    folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu", **changes
) -> Baichuan2ForCausalLM:
    """The model of a folder, official or ours, in evaluation mode, straight onto ``device``.

    The model is made without memory, and each tensor goes from the mapped file to its place: there is never a second
    copy. On a CPU in the file's own type the parameters are the mapped file itself (changes stay in this process), so
    that ranks of one host share it.

    Args:
        dtype: of all parameters; the configuration's own (bf16 in the official ones) when None.
        changes: of the configuration, such as ``loss_head="full"``.

    Raises:
        FileNotFoundError: no config.json, no weights, or a shard that the index names is missing.
        ValueError: another architecture, sizes that no model has, a git-lfs pointer or a truncated file in place of a
            shard, a parameter that is missing, unknown, twice there, or of another shape: each named with its file.
    """
    folder = Path(folder)
    config = read_config(folder, **changes)
    dtype = dtype or config.dtype or torch.bfloat16
    model = _without_memory(config, folder)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    shards, listed = _shards_and_names(folder)
    # what the index promises, before gigabytes are read for nothing
    for names, problem in ((listed - set(shapes), "lists what the model has not"), (set(shapes) - listed, "lacks")):
        if listed and names:
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            raise ValueError(f"{folder.name}: the index {problem}: {min(names)!r}{more}")
    remaining = dict(shapes)
    for path in shards:
        for name, tensor in _tensors(path):
            if name not in remaining:
                problem = "is there twice" if name in shapes else "is no parameter of this model"
                raise ValueError(f"{path.name}: {name!r} {problem}")
            if remaining.pop(name) != tuple(tensor.shape):
                raise ValueError(f"{path.name}: {name!r} is {list(tensor.shape)}, the configuration says "
                                 f"{list(shapes[name])}")  # fmt: skip
            owner, _, last = name.rpartition(".")
            value = torch.nn.Parameter(tensor.to(device=device, dtype=dtype))
            setattr(model.get_submodule(owner), last, value)
    if remaining:
        raise ValueError(f"{folder.name}: {len(remaining)} parameters are in no shard, such as {min(remaining)}")
    config.dtype = dtype
    config._name_or_path = str(folder)
    path = folder / "generation_config.json"
    if path.is_file():
        _set_generation(model, _read_json(path))
    return model


def _without_memory(config: Baichuan2Config, folder: Path) -> Baichuan2ForCausalLM:
    """The model with parameters that have shapes alone."""
    try:
        with torch.device("meta"):
            return Baichuan2ForCausalLM(config).eval()
    except Exception as error:  # what constructors of torch and Transformers make of nonsense
        line = project.first_line(error)  # torch's have a trace of many lines behind it
        raise ValueError(f"{folder.name}/config.json makes no model: {line}") from None


def read_config(folder: str | Path, **changes) -> Baichuan2Config:
    """The folder's ``config.json``; its ``auto_map`` (names of code beside it) is ignored.

    Raises:
        FileNotFoundError: there is none. ValueError: it is no JSON, or of another architecture.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no model folder: it has no config.json")
    values = _read_json(path)
    kind = values.get("model_type")
    if kind != Baichuan2Config.model_type:
        raise ValueError(f"{path}: model_type is {kind!r}; this loader reads 'baichuan'")
    try:
        config = Baichuan2Config.from_dict({**values, **changes})
    except Exception as error:  # of ours, of Transformers, of its validators
        raise ValueError(f"{path}: {_first_line(error)}") from None
    if config.dtype is not None and not isinstance(config.dtype, torch.dtype):
        raise ValueError(f"{path}: torch_dtype is {config.dtype!r}; it names a type, as bfloat16")
    if config.num_hidden_layers > MOST_LAYERS:
        raise ValueError(f"{path}: num_hidden_layers is {config.num_hidden_layers:,}; {MOST_LAYERS:,} are the most")
    return config


def find_shards(folder: str | Path) -> list[Path]:
    """The files that hold the weights: of an index, or the single one; safetensors before pickles.

    Raises:
        FileNotFoundError: none, or not all that the index names. ValueError: a git-lfs pointer, an unreadable index.
    """
    return _shards_and_names(Path(folder))[0]


def _shards_and_names(folder: Path) -> tuple[list[Path], set[str]]:
    """The files of :func:`find_shards`, and the parameters that an index lists; without one, none."""
    for single in SINGLE:
        index = folder / (single + INDEX)
        if index.is_file():
            weight_map = _weight_map(index)
            names = sorted(set(weight_map.values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise FileNotFoundError(f"{folder}: {len(missing)} of {len(names)} shards are missing: {missing[0]!r}")
            return [_checked_shard(folder / name) for name in names], set(weight_map)
        if (folder / single).is_file():
            return [_checked_shard(folder / single)], set()
    raise FileNotFoundError(f"{folder} holds no weights: no {' and no '.join(SINGLE)}, and no index of several")


def save_checkpoint(
    model: Baichuan2ForCausalLM, folder: str | Path, tokenizer=None, shard_bytes: int = 5 * 10**9
) -> None:
    """Writes the official layout in safetensors, beside the target first: a folder of that name is a whole one."""
    write_folder(folder, lambda part: save_into(model, tokenizer, part, shard_bytes))


def write_folder(folder: str | Path, write: Callable[[Path], None]) -> None:
    """Lets ``write`` fill a new folder beside ``folder``, and gives it that name when it is complete.

    An older folder of that name goes only then; what was begun and failed is removed.
    """
    folder = Path(folder).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        write(part)
        for path in part.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        part.chmod(0o755)
        if folder.exists():
            old = part.with_name(part.name + ".old")
            folder.rename(old)
            try:
                part.rename(folder)
            except OSError:
                old.rename(folder)
                raise
            shutil.rmtree(old)
        else:
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)  # there, where something failed


def save_into(model: Baichuan2ForCausalLM, tokenizer, folder: Path, shard_bytes: int = 5 * 10**9) -> None:
    """The files of a checkpoint into a folder that is there; see :func:`save_checkpoint`."""
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    path = folder / "config.json"
    values = _read_json(path) | {"architectures": ["BaichuanForCausalLM"]}  # the name that other tools look for
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", "utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or any(Path(str(name)).name != name for name in weight_map.values()):
        raise ValueError(f"{index}: weight_map does not say which file of the folder holds which parameter")
    return weight_map


def _checked_shard(path: Path) -> Path:
    with open(path, "rb") as file:
        project.refuse_pointer(path, file.read(100), "weights")
    return path


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a shard, mapped from the file; no code of it is run."""
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118, no mapping
                    yield name, file.get_tensor(name)
        else:
            mapped = zipfile.is_zipfile(path)  # older pickles are no archives, and cannot be mapped
            yield from torch.load(path, weights_only=True, mmap=mapped, map_location="cpu").items()
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, AttributeError, KeyError) as error:
        raise ValueError(f"{path} cannot be read: truncated, or no file of weights ({_first_line(error)})") from None
    except Exception as error:  # the unpickler's own, for what is more than tensors
        raise ValueError(
            f"{path} holds something other than tensors, which is not read: {_first_line(error)}"
        ) from None


def _first_line(error: Exception) -> str:
    return project.first_line(str(error) or type(error).__name__)[:120]


def _set_generation(model: Baichuan2ForCausalLM, values: dict) -> None:
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "user_token_id", "assistant_token_id", "max_new_tokens",
                "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"):  # fmt: skip
        if key in values:
            setattr(model.generation_config, key, values[key])


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # nested without end
        raise ValueError(f"{path} is not JSON: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: an object in braces is expected")
    return content
