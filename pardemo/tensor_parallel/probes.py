"""Does a function give a part what it gives it within the whole? Asked by running it on both.

Ranks run an attention's core on their own heads, an activation on their own columns, and with sequence parallelism a
norm on their own tokens. A core that computes ALiBi's slopes from ``q.shape[1]``, or that mixes heads, then gives
numbers of another model, without an error.

    whole    [ head 0 | head 1 | head 2 | head 3 ] -> core -> [ y0 | y1 | y2 | y3 ]
                                                                        =    =  ?
    part                       [ head 2 | head 3 ] -> core ->         [ y2 | y3 ]
"""

import copy
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from pardemo import compat
from pardemo.tensor_parallel.replicas import random_states

#: Share of the largest result by which equal ones may differ: kernels add in another order where there are more heads.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-4}
COARSE_ROUNDING = 0.03  # of bf16 and fp16, and on GPUs, whose fp32 products may be TF32's
_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout}


class DimPart(NamedTuple):
    """A part of a dimension: what ``narrow`` takes."""

    dim: int
    start: int
    length: int


class Probe(NamedTuple):
    """What came of a probe: ``objection`` is a half-sentence, or None; ``ran`` is false where nothing could be run;
    ``trained`` says that tensors other than the inputs, and a module's own, are trained through the function."""

    objection: str | None
    ran: bool = True
    trained: bool = False


def probe(
    function: Callable, inputs: Sequence[torch.Tensor], cuts: Sequence[DimPart], part: str, *, training: bool = False
) -> Probe:
    """Runs ``function`` on ``inputs`` and on their parts, dropout left out, and compares what the part gives.

    Args:
        function: from tensors to one tensor; of a module a copy is run.
        inputs: the whole tensors. cuts: for each of them the part; the first one's is that of the result, too.
        part: its name in the objection, such as "heads 2 to 3".
        training: run a module as in training (batch norm), unless it draws random numbers then.

    A function that runs on the part and not on the whole has been made for the part: no objection.
    """
    quiet = _quiet(function, training)
    rounding = COARSE_ROUNDING if inputs[0].is_cuda else ROUNDING.get(inputs[0].dtype, COARSE_ROUNDING)
    parts = [tensor.narrow(*cut) for tensor, cut in zip(inputs, cuts, strict=True)]
    devices = [inputs[0].device] if inputs[0].is_cuda else []
    python, device = random.getstate(), inputs[0].device
    with compat.without_modes(), torch.enable_grad(), torch.random.fork_rng(devices):
        before = random_states(device)
        with _NoDropout():
            whole, alone = _run(quiet, inputs), _run(quiet, parts)
        draws = random_states(device) != before
    random.setstate(python)
    if isinstance(alone, str):
        if isinstance(whole, str):
            return Probe(None, ran=False)
        return Probe(f"does not run on {part} alone ({alone})")
    trained = alone.requires_grad
    if isinstance(whole, str):
        return Probe(None, trained=trained)
    if draws:
        if training and isinstance(function, nn.Module):
            return probe(function, inputs, cuts, part)
        return Probe("draws random numbers by other means than torch's dropout, so that it cannot be compared")
    cut = cuts[0]
    if whole.dim() != inputs[0].dim() or whole.shape[cut.dim] != inputs[0].shape[cut.dim]:
        return Probe(f"makes {tuple(whole.shape)} of {tuple(inputs[0].shape)}", trained=trained)
    expected = whole.narrow(*cut)
    scale = expected.detach().nan_to_num(posinf=0, neginf=0).abs().max().item()
    if alone.shape == expected.shape and torch.allclose(
        alone, expected, rtol=rounding, atol=rounding * scale, equal_nan=True
    ):
        return Probe(None, trained=trained)
    return Probe(f"gives {part} other results alone than among all", trained=trained)


def numbers(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """The same random numbers on every rank, of ``like``'s dtype and device."""
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    return drawn.to(like.device, like.dtype)


def name_of(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _quiet(function: Callable, training: bool) -> Callable:
    """A module's copy, frozen. Its values are moved a little: a bias that begins with zeros would hide what it adds."""
    if not isinstance(function, nn.Module):
        return function
    quiet = copy.deepcopy(function).requires_grad_(False).train(training)
    for values in quiet.parameters():
        if values.is_floating_point():
            values.add_(0.1 * numbers(*values.shape, like=values))
    return quiet


def _run(function: Callable, inputs: Sequence[torch.Tensor]) -> torch.Tensor | str:
    """The result, or the first line of what went wrong. The function may change what it is given."""
    try:
        result = function(*(tensor.clone() for tensor in inputs))
    except Exception as error:  # whatever a caller's function raises
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return result if isinstance(result, torch.Tensor) else f"it returns a {type(result).__name__}, not a tensor"


class _NoDropout(TorchFunctionMode):
    """Dropout passes everything on, and random slopes are the mean ones: what is compared has no random numbers."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if function is F.rrelu:
            kwargs["training"] = False
        if function is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        return function(*args, **kwargs)
