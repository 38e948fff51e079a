"""Keeps what one call of a model computes on a rank: its parameters, modules' outputs, log-probabilities of tokens."""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pardemo import compat
from pardemo.script.record.input_follower import leaves_of
from pardemo.script.record.numbers import perturbed
from pardemo.script.record.outputs import MOST_CALLS
from pardemo.script.record.pieces import held_pieces
from pardemo.script.record.rank_record import FIRST_INPUTS, Tensors, project_rows
from pardemo.script.record.recorder import Recorder
from pardemo.script.runtime.call_sites import ROOT
from pardemo.script.runtime.hooks import Hooks
from pardemo.script.runtime.steps import Enough

#: Files of recorded inputs that have this of the reference's first call, and the arguments of that call by their names.
REFERENCE, SAMPLES = "reference.safetensors", "samples.safetensors"
#: Elements of a model's parameters up to which they are kept.
KEPT = 50_000_000
#: Kinds of tensors. Behind ``output`` stand the order, the module and how often it had run.
OUTPUT, PARAMETER, LOG_PROBABILITIES, ROUNDED = "output", "parameter", "log-probabilities", "rounded otherwise"
#: How many logits a token has.
VOCABULARY = "vocabulary"


class ModelCall(Hooks):
    """Keeps what the modules return that run within the block, and the model's parameters."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module):
        super().__init__()
        self.tensors: Tensors = {}
        self._sites, self._model = recorder.sites, model
        self._times: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if sum(parameter.numel() for parameter in self._model.parameters()) <= KEPT:
            for held in held_pieces([self._model], gradients=False, at_hand=True):
                self.tensors[f"{PARAMETER}|{held.piece.name}"] = held.value.detach().clone().contiguous()
        return super().__enter__()

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        leaves = [leaf for leaf in compat.tree_leaves(output) if _is_plain(leaf)]
        returned = leaves[0] if leaves else None
        if len(leaves) == 2 and leaves[1].dim() == 1 and leaves[0].shape[-1:] == leaves[1].shape:
            returned = leaves[0] + leaves[1]  # Megatron-core's layers may leave their bias to who calls them
        name = ROOT if module is self._model else self._sites.name(module)
        self._times[name] += 1
        if returned is not None and self._times[name] <= MOST_CALLS:
            self.tensors[f"{OUTPUT}|{len(self.tensors)}|{name}|{self._times[name] - 1}"] = project_rows(returned)

    def note_output(self, tokens: Any, output: Any) -> None:
        """Keeps the log-probabilities of the samples, where they are tokens and the output says them."""
        if ways := token_logits(output, tokens):
            self.tensors[LOG_PROBABILITIES] = _log_probabilities(ways, tokens)
            self.tensors[VOCABULARY] = torch.tensor(ways[0].shape[2])

    def note_rounding(self, tokens: Any, output: Any, again: Callable[[], Any]) -> None:
        """Keeps these, and what they are if the same call's layers round otherwise, in the last place of their type."""
        self.note_output(tokens, output)
        if LOG_PROBABILITIES in self.tensors:
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            with torch.no_grad(), torch.random.fork_rng([]), _Rounded(), contextlib.suppress(Exception):
                self.tensors[ROUNDED] = _log_probabilities(token_logits(again(), tokens), tokens)
            for buffer, before in buffers:
                buffer.data.copy_(before)

    def write(self, path: Path) -> None:
        """Writes all to a file."""
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path)


class _Rounded(Hooks):
    """Moves outputs of modules without others in them by up to one unit of their last place."""

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if next(module.children(), None) is None and _is_plain(output) and output.dtype != torch.float64:
            return perturbed(output, type(module).__name__)
        return None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not hasattr(leaf, "placements")


def samples_name(given: Mapping[str, Any]) -> str:
    """Returns the name of the tensor that has the samples among a call's arguments; empty where there is none."""
    tensors = [name for name, leaf in given.items() if isinstance(leaf, torch.Tensor) and leaf.dim()]
    named = [name for known in FIRST_INPUTS for name in tensors if name.rpartition(".")[2] == known]
    return next(iter([*named, *tensors]), "")


def token_logits(output: Any, tokens: Any) -> list[torch.Tensor]:
    """Returns the logits in a model's output, [b, s, v]; none where the samples are no tokens, or it has none of them.

    They may have been [s, b, v]. Where b = s nothing says which of the two, and both ways are returned.
    """
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return []
    for leaf in (leaf for _, leaf in leaves_of(output) if _is_plain(leaf) and leaf.dim() == 3):
        ways = [way.detach() for way in (leaf, leaf.transpose(0, 1)) if way.shape[:2] == tokens.shape]
        if ways and tokens.shape[1] > 1 and int(tokens.max()) < leaf.shape[2]:
            return ways
    return []


def _log_probabilities(ways: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Computes each next token's log-probability by each of the logits, n times [b, s, v] → [n, b, s - 1], in fp64."""
    wanted = tokens[:, 1:, None].long().clamp(min=0)
    return torch.stack([way.double().log_softmax(-1)[:, :-1].gather(-1, wanted).squeeze(-1) for way in ways])


class EngineFollower(Hooks):
    """Waits on a rank until a script calls a model with the recorded samples, keeps that call, and ends the script."""

    def __init__(self, recorder: Recorder, samples: str, path: str):
        super().__init__()
        self._recorder, self._path = recorder, path
        self._samples = load_file(samples)
        self._tokens = self._samples[samples_name(self._samples)]
        self._inside = False

    def __enter__(self) -> Self:
        module = torch.nn.Module
        self.following.enter_context(compat.replaced(module, "__call__", self._around_call(module.__call__)))
        return super().__enter__()

    def _around_call(self, call_module: Any) -> Any:
        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            given = dict(leaves_of((args, kwargs)))
            tokens: Any = given.get(samples_name(given))
            known = isinstance(tokens, torch.Tensor) and tokens.shape == self._tokens.shape
            model = known and next(module.children(), None) is not None  # and no table of embeddings alone
            if self._inside or not model or not torch.equal(tokens.to(self._tokens.dtype), self._tokens):
                return call_module(module, *args, **kwargs)
            self._inside = True
            with ModelCall(self._recorder, module) as seen:
                output = call_module(module, *args, **kwargs)
            if not dist.is_initialized() or dist.get_rank() == 0:
                seen.note_output(tokens, output)
                seen.write(Path(self._path))
            raise Enough

        return call


def read_model_call(path: Path) -> Tensors:
    """Reads what :class:`ModelCall` has written.

    Raises:
        ValueError: there is no such file, or it cannot be read; one line.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"{path} cannot be read: it has nothing of a model's call") from None
