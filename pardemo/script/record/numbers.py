"""Notes a script's random numbers on a rank, and runs it in fp64 or with all numbers rounded otherwise."""

import contextlib
import functools
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from pardemo import compat
from pardemo.compat import dtype_name, local_part
from pardemo.script.record import rank_record
from pardemo.script.record.rank_record import Mask
from pardemo.script.runtime import stand_ins
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.hooks import Hooks
from pardemo.script.runtime.libraries import is_script, note_once

#: Dropout in its forms: torch.nn's modules call these.
_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextlib.contextmanager
def dropout_noted(sites: CallSites, note: Callable[[Mask], None], notes: list[str]) -> Iterator[None]:
    """Notes each mask that dropout draws within the block; its input is left as it is.

    So layouts that cannot draw the same masks can be compared all the same, and their masks by themselves.
    """
    functional: Any = torch.nn.functional

    def dropout(
        function: Callable[..., Any], input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        if not training or p <= 0:
            return function(input, p, training, inplace)
        note_once(notes, "dropout → its masks are drawn and compared, and not applied")
        with torch.no_grad():
            plain = local_part(input)
            dropped = rank_record.digest(function(torch.ones_like(plain), p, True) == 0)
        site = sites.here()
        note(Mask(site.module, site.line, rank_record.digest(plain), dropped, plain.numel(), site.repeated))
        return input

    attend = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **options: Any
    ) -> Any:
        if dropout_p:
            note_once(notes, "dropout within scaled_dot_product_attention → left out: its mask is not to be seen")
        return attend(query, key, value, attn_mask, 0.0, *args, **options)

    changed = stand_ins.outermost_calls([getattr(functional, name) for name in _DROPOUT], dropout)
    with stand_ins.replaced_everywhere([*changed, (attend, attention)]):
        yield


def as_in_a_new_process() -> None:
    """Resets the generators as in a new process: torch's to its usual seed, Python's and NumPy's to none."""
    torch.default_generator.manual_seed(torch.Generator().initial_seed())
    random.seed()
    np.random.seed()


@contextlib.contextmanager
def unseeded_noted(sites: CallSites, lines: list[str]) -> Iterator[None]:
    """Notes the script's lines that draw, within the block, from a generator that nobody has seeded.

    Of Python's ``random`` and NumPy's functions, of ``numpy.random.default_rng()`` without a seed, and of
    ``torch.seed()``. torch's own generators begin from the same seed in every process.
    """
    seeded: set[str] = set()

    def seeds(which: str) -> Callable[[Any], str]:
        def unseeded(given: Any) -> str:
            if given is None:
                return f"{which}.seed() without a seed"
            seeded.add(which)
            return ""

        return unseeded

    def draws(which: str, name: str) -> Callable[[Any], str]:
        return lambda given: "" if which in seeded else f"{which}.{name}"

    def watched(function: Callable[..., Any], unseeded: Callable[[Any], str]) -> Callable[..., Any]:
        """The function, which first asks of its first argument what to note."""

        def call(*args: Any, **kwargs: Any) -> Any:
            call_text = unseeded(args[0] if args else next(iter(kwargs.values()), None))
            if call_text and is_script(sys._getframe(1).f_code.co_filename):
                note_once(lines, f"{sites.here().line} ({call_text})")
            return function(*args, **kwargs)

        return call

    generator = "numpy.random.default_rng() without a seed"
    pythons = ("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss")
    numpys = ("rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "uniform", "normal")
    functions: list[tuple[Any, str, Callable[[Any], str]]] = [
        (random, "seed", seeds("random")),
        (np.random, "seed", seeds("numpy")),
        (torch, "seed", lambda given: "torch.seed()"),
        (np.random, "default_rng", lambda given: generator if given is None else ""),
        *((random, name, draws("random", name)) for name in pythons),
        *((np.random, name, draws("numpy", name)) for name in numpys),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, unseeded in functions:
            stack.enter_context(compat.replaced(owner, name, watched(getattr(owner, name), unseeded)))
        yield


#: Functions and methods of tensors that a script and its libraries draw random numbers by.
_DRAWS = {
    torch: (
        "rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "normal", "bernoulli", "multinomial",
    ),
    torch.Tensor: ("normal_", "uniform_", "bernoulli_", "exponential_"),
}  # fmt: skip
_TORCH = os.path.dirname(torch.__file__) + os.sep
#: Of torch's own files those that draw for who calls them. Others make seeds, samplers and initial weights.
_FOR_OTHERS = (f"{_TORCH}distributions{os.sep}", f"{_TORCH}nn{os.sep}functional.py")


@contextlib.contextmanager
def draws_noted(sites: CallSites, drawn: Callable[[], dict[str, str] | None]) -> Iterator[None]:
    """Adds hashes of what is drawn from torch's own generator within the block to ``drawn()``, by the script's line.

    By the script, and by libraries that it calls there: tokens that are generated, actions that are taken, pictures
    that are cropped. What each rank draws for itself is another one in each layout.
    """

    def note(name: str, args: Any, result: torch.Tensor) -> torch.Tensor:
        by_line = drawn()
        if by_line is not None and (line := sites.here().line):
            line = f"{line} ({name})"
            by_line[line] = f"{zlib.crc32((by_line.get(line, '') + rank_record.digest(result)).encode())}"
        return result

    with draws_followed(note):
        yield


@contextlib.contextmanager
def draws_followed(follow: Callable[[str, Any, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Has ``follow`` return what is drawn from torch's own generator within the block: itself, or numbers in its place.

    ``follow`` gets the function's name, its arguments, and what it drew. No draws of seeds, samplers, first weights.
    """

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            plain = type(result) is torch.Tensor and result.device.type == "cpu" and kwargs.get("generator") is None
            frame = sys._getframe(1)
            while frame.f_code.co_filename == __file__ and frame.f_back is not None:  # of another one who follows
                frame = frame.f_back
            file = frame.f_code.co_filename
            if not plain or (file.startswith(_TORCH) and not file.startswith(_FOR_OTHERS)):
                return result
            numbers = follow(function.__name__, args, result)
            return numbers if numbers is result or not function.__name__.endswith("_") else result.copy_(numbers)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in ((owner, name) for owner, names in _DRAWS.items() for name in names):
            stack.enter_context(compat.replaced(owner, name, watched(getattr(owner, name))))
        yield


_SHORT = {torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2}
#: Methods that name a type.
_NAMED = {torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16}
#: Functions whose result has the type of what they read, and not of what they are asked for.
_READS = {torch.from_numpy, torch.frombuffer, torch.load, torch.tensor, torch.as_tensor}


class _DoubleMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is compat.scaled_mm:
            return _scaled_mm(*args, **kwargs)
        if func in _NAMED:
            return torch.Tensor.double(*args)
        if any(arg in _SHORT for arg in args if isinstance(arg, torch.dtype)):
            args = tuple(torch.float64 if isinstance(arg, torch.dtype) and arg in _SHORT else arg for arg in args)
        if kwargs.get("dtype") in _SHORT and isinstance(kwargs["dtype"], torch.dtype):
            kwargs = {**kwargs, "dtype": torch.float64}
        result = func(*args, **kwargs)
        if func in _READS and isinstance(result, torch.Tensor) and result.dtype in _SHORT:
            return result.double()
        return result


def _scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, bias: Any = None, *_: Any, **__: Any
) -> torch.Tensor:
    """The product of two matrices that were scaled for fp8, each with one scale, or one for each row or column."""
    product = (a * scale_a) @ (b * scale_b)
    return product if bias is None else product + bias


@contextlib.contextmanager
def in_double(notes: list[str]) -> Iterator[None]:
    """Makes floating point fp64 within the block: torch's default and types that a script names; autocast is off."""
    from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

    before, set_default, mode = torch.get_default_dtype(), torch.set_default_dtype, _DoubleMode()

    def backward(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """torch takes the mode away while a backward pass runs; a forward pass that it runs again needs it."""
        with mode:
            return run(*args, **kwargs)

    def off(given: dict[str, Any]) -> None:
        given["enabled"] = False

    def in_one_type(given: dict[str, Any]) -> None:
        given.update({name: None for name, dtype in given.items() if type(dtype) is torch.dtype and dtype in _SHORT})

    notes.append("--double: fp32, bf16 and fp16 → fp64, autocast → off")
    set_default(torch.float64)
    autocast: Any = torch.amp.autocast_mode.autocast
    policies: list[tuple[Any, Any]] = [(MixedPrecisionPolicy, in_one_type), (MixedPrecision, in_one_type)]
    with contextlib.ExitStack() as stack:
        stack.callback(set_default, before)
        stack.enter_context(compat.replaced(torch, "set_default_dtype", lambda dtype: set_default(torch.float64)))
        for kind, change in [(autocast, off), *policies]:
            init = stand_ins.with_changed_arguments(kind.__init__, change)
            stack.enter_context(compat.replaced(kind, "__init__", init))
        stack.enter_context(compat.replaced(*compat.engine_replaced(backward)))
        stack.enter_context(mode)
        yield


#: Types whose rounding shows in gradients. That of fp32 is below what is tolerated anyway.
SHORT = {
    "bfloat16": torch.bfloat16, "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
#: Types in which nothing is added or multiplied: what is kept in them was cast, within a layer.
_CAST = (torch.float8_e4m3fn, torch.float8_e5m2)


def perturbed(tensor: torch.Tensor, seed: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Moves each element of a tensor in a short type by up to one unit of its last place, equally for equal seeds.

    Args:
        dtype: the short type, where the tensor is of a longer one.
    """
    dtype = dtype or tensor.dtype
    info = torch.finfo(dtype)
    generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(seed.encode()))
    noise = torch.rand(tensor.shape, generator=generator, device="cpu", dtype=torch.float32).to(tensor.device) * 2 - 1
    moves = tensor.float() * (1 + info.eps * noise)
    return moves.clamp(info.min, info.max).to(dtype) if dtype in _CAST else moves.to(dtype)


def casts_noted(computed_in: set[str], rounded: bool) -> AbstractContextManager[None]:
    """Notes casts to fp8 by ``Tensor.to`` within the block; ``rounded`` rounds them otherwise.

    Such a cast is within a layer, whose output is of another type. A scale that is found in a micro-batch is another
    one where micro-batches are, so that each number may be rounded otherwise.
    """
    cast = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = cast(tensor, *args, **kwargs)
        if result.dtype not in _CAST or result.dtype == tensor.dtype:
            return result
        computed_in.add(dtype_name(result.dtype))
        if rounded:
            with compat.replaced(torch.Tensor, "to", cast):
                return perturbed(tensor, f"{result.dtype} {tuple(result.shape)}", result.dtype)
        return result

    return compat.replaced(torch.Tensor, "to", to)


class Rounding(Hooks):
    """Rounds outputs of layers in bf16 or fp16, and gradients in them, otherwise within the block.

    A layer is a module without others in it. A forward pass that is run again, for its activations, gets the same.
    """

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        if not torch.is_grad_enabled() or next(module.children(), None) is not None:
            return None
        seed = f"{type(module).__name__} {[tuple(p.shape) for p in module.parameters()]}"
        changed = compat.tree_map(lambda leaf: perturbed(leaf, seed) if _is_short(leaf) else leaf, output)
        return changed if any(_is_short(leaf) for leaf in compat.tree_leaves(output)) else None

    def gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Rounds sums over ranks and micro-batches otherwise, too, before an optimizer's step."""
        with torch.no_grad():
            for group in optimizer.param_groups:
                for number, parameter in enumerate(group["params"]):
                    if parameter.grad is not None and _is_short(parameter.grad):
                        parameter.grad.copy_(perturbed(parameter.grad, str(number)))


def _is_short(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dtype in SHORT.values() and not hasattr(leaf, "placements")
