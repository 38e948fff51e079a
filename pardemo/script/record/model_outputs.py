"""Records a call of a model on a rank: its parameters, its modules' outputs, the tokens' log-probabilities."""

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

#: Files in a folder of recorded inputs: the record of the reference's first call, and its arguments by their names.
REFERENCE, SAMPLES = "reference.safetensors", "samples.safetensors"
#: Elements of the largest model whose parameters are recorded.
MOST_ELEMENTS = 50_000_000
#: Kinds of tensors. The name of an output has its order, its module and how often that had run before.
OUTPUT, PARAMETER, LOG_PROBABILITIES, ROUNDED = "output", "parameter", "log-probabilities", "rounded otherwise"
#: Name of the number of logits of a token.
VOCABULARY = "vocabulary"


class ModelCall(Hooks):
    """Records a model's parameters, and the outputs of modules that run within the block."""

    def __init__(self, recorder: Recorder, model: torch.nn.Module):
        super().__init__()
        self.tensors: Tensors = {}
        self._sites, self._model = recorder.sites, model
        self._times: Counter[str] = Counter()

    def __enter__(self) -> Self:
        if sum(parameter.numel() for parameter in self._model.parameters()) <= MOST_ELEMENTS:
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
        """Records the log-probabilities of the samples, where these are tokens and the output has logits."""
        if ways := token_logits(output, tokens):
            self.tensors[LOG_PROBABILITIES] = _log_probabilities(ways, tokens)
            self.tensors[VOCABULARY] = torch.tensor(ways[0].shape[2])

    def note_rounding(self, tokens: Any, output: Any, again: Callable[[], Any]) -> None:
        """Records log-probabilities of the output, and of a repeated call whose layers round differently."""
        self.note_output(tokens, output)
        if LOG_PROBABILITIES in self.tensors:
            buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
            with torch.no_grad(), torch.random.fork_rng([]), _Rounded(), contextlib.suppress(Exception):
                self.tensors[ROUNDED] = _log_probabilities(token_logits(again(), tokens), tokens)
            for buffer, before in buffers:
                buffer.data.copy_(before)

    def write(self, path: Path) -> None:
        """Writes all recorded tensors to a file of safetensors."""
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, path)


class _Rounded(Hooks):
    """Perturbs the outputs of modules without submodules by up to one unit in the last place."""

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if next(module.children(), None) is None and _is_plain(output) and output.dtype != torch.float64:
            return perturbed(output, type(module).__name__)
        return None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and not hasattr(leaf, "placements")


def samples_name(given: Mapping[str, Any]) -> str:
    """Returns the name of the tensor with the samples among a call's arguments; "" where there is none."""
    tensors = [name for name, leaf in given.items() if isinstance(leaf, torch.Tensor) and leaf.dim()]
    named = [name for known in FIRST_INPUTS for name in tensors if name.rpartition(".")[2] == known]
    return next(iter([*named, *tensors]), "")


def token_logits(output: Any, tokens: Any) -> list[torch.Tensor]:
    """Finds the logits in a model's output, as [b, s, v]; returns [] without logits, or where samples are no tokens.

    A model may return [s, b, v]. Where b = s both orders are possible, and both are returned.
    """
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        return []
    for leaf in (leaf for _, leaf in leaves_of(output) if _is_plain(leaf) and leaf.dim() == 3):
        ways = [way.detach() for way in (leaf, leaf.transpose(0, 1)) if way.shape[:2] == tokens.shape]
        if ways and tokens.shape[1] > 1 and int(tokens.max()) < leaf.shape[2]:
            return ways
    return []


def _log_probabilities(ways: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Computes the next tokens' log-probabilities in fp64, for each of n logits: n × [b, s, v] → [n, b, s - 1]."""
    wanted = tokens[:, 1:, None].long().clamp(min=0)
    return torch.stack([way.double().log_softmax(-1)[:, :-1].gather(-1, wanted).squeeze(-1) for way in ways])


class EngineFollower(Hooks):
    """Waits until a script calls a model with the recorded samples, records that call, and ends the script."""

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
    """Reads the tensors that :meth:`ModelCall.write` has written.

    Raises:
        ValueError: there is no such file, or it cannot be read; one line.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"{path} cannot be read: it has nothing of a model's call") from None
