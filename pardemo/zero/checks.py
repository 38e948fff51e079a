"""Refuses models that differ between ranks and optimizers that flat shards would change, on all ranks alike."""

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo import compat, project
from pardemo.collectives.agreement import compare_lines
from pardemo.groups import cut_of, cut_within
from pardemo.zero.param_groups import MakeOptimizer, ParamGroups

DTYPES = (torch.bfloat16, torch.float32)
#: A matrix as large as any that an optimizer leaves unfactored, a convolution's kernel, a bias.
SHAPES = ((128, 128), (4, 3, 3, 5), (7,))
PIECE = 1000  # elements of a flat piece: few enough to be taken for a matrix of rows
STEPS = 3  # some optimizers begin with plain steps
TOLERANCE = 1e-3  # of the largest change: instructions round differently; an optimizer that is refused differs by 1


def compare_models(module: nn.Module, group: dist.ProcessGroup, engine: str, groups: ParamGroups) -> None:
    """All ranks need the same model and engine: a difference would end in a hang, or a wrong sum. Collective.

    Args:
        engine: what has to be the same on every rank (``"ZeRO-2, max_norm 1.0"``).

    Raises:
        ValueError, RuntimeError: what speaks against the module on some rank, or the first difference; on every rank.
    """
    with same_outcome(group):
        _check_module(module, group)
    compare_lines("the ranks' engines differ", [engine], group)
    form: list[tuple[Any, ...]] = [
        (name, tuple(p.shape), str(p.dtype), "trained" if p.requires_grad else "frozen", f"group {groups.number(p)}")
        for name, p in module.named_parameters()
    ]
    form += [(name, tuple(b.shape), str(b.dtype), "a buffer") for name, b in module.named_buffers()]
    compare_lines("the ranks' models differ", [str(line) for line in form], group)


def _check_module(module: nn.Module, group: dist.ProcessGroup) -> None:
    """ValueError for a module without anything to train, or with parameters that an engine cannot keep."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("the module has no parameter that requires a gradient: nothing to train")
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in DTYPES:  # fp16 needs loss scaling, which is not here
            raise ValueError(f"{name} is {parameter.dtype}; trained parameters are bfloat16 or float32")
    if any(compat.fsdp_state(part) for part in module.modules()):
        raise ValueError("the module is sharded by FSDP2 already, as Zero3 leaves it: make another one")
    if problem := cut_within(module, group):  # tensor-parallel ranks would be given rank 0's part
        raise ValueError(problem)
    for name, parameter in module.named_parameters():
        if (cut := cut_of(parameter)) and cut.dim is None:
            raise ValueError(
                f"{name} is an expert's, which has the gradients of all ranks' tokens, and other layers have those of "
                "one rank: ZeRO takes means over one group. Use BucketedDataParallel, and the layer's "
                "average_gradients()"
            )
    check_hooks(module.named_parameters())


def check_hooks(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """RuntimeError for hooks that would use or change a rank's own gradient as if it were the mean, such as an
    optimizer's step in backward. The meters' only look."""
    for name, parameter in named:
        for hook in compat.accumulate_hooks(parameter).values():
            if not (getattr(hook, "__module__", None) or "").startswith("pardemo."):  # a bound method of C's
                raise RuntimeError(
                    f"{name} has a hook of register_post_accumulate_grad_hook(): the gradient that it sees is this "
                    "rank's own and not the mean; remove it, and do what it does between backward() and step()"
                )


def check_elementwise(make: MakeOptimizer, groups: ParamGroups, device: torch.device) -> None:
    """Runs the optimizer on a few tensors of several shapes, and another one on the same numbers in flat pieces.

    A shard is a flat piece of several parameters: what looks at a parameter's shape or norm does something else there.
    Costs a few milliseconds and no random number. What the factory itself raises for a matrix is left as it is.

    Raises:
        ValueError: the pieces end with other numbers than the tensors, or the optimizer refuses them.
    """
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    at = torch.arange(sum(sizes), device=device, dtype=torch.float32)
    # rows, columns and pieces differ much in size, so that no norm of one is that of another
    weights = torch.cos(3 * at) * (1 + at // 8 % 6) * (1 + at % 8)
    gradients = [torch.sin((2 + step) * at + 1) * (1 + at % 8) ** 2 / (1 + at // 8 % 6) for step in range(STEPS)]

    def trained(shapes: Iterable[tuple[int, ...]]) -> tuple[str, torch.Tensor]:
        """The optimizer's name, and what it makes of tensors of these shapes in each group, [groups, elements]."""
        shapes = list(shapes)

        def cut(flat: torch.Tensor) -> list[torch.Tensor]:
            parts = flat.split([torch.Size(shape).numel() for shape in shapes])
            return [part.reshape(shape).clone() for part, shape in zip(parts, shapes, strict=True)]

        tensors = [[nn.Parameter(part) for part in cut(weights)] for _ in groups.settings]
        optimizer = make(groups.shards((number, p) for number, parameters in enumerate(tensors) for p in parameters))
        for group in optimizer.param_groups:
            group["lr"] = group.get("lr") or 1e-2  # a schedule may begin at zero, which would hide everything
        for gradient in gradients:
            for parameters in tensors:
                for parameter, part in zip(parameters, cut(gradient), strict=True):
                    parameter.grad = part
            optimizer.step()
        return type(optimizer).__name__, torch.stack(
            [torch.cat([p.detach().flatten() for p in parameters]) for parameters in tensors]
        )

    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        name, expected = trained(SHAPES)
        try:
            _, result = trained((min(PIECE, len(at) - begin),) for begin in range(0, len(at), PIECE))
        except Exception as error:
            reason = f"{type(error).__name__}: {project.first_line(error)}"
            raise ValueError(f"{name} cannot update flat shards ({reason})") from error
    # each tensor on its own: what is done to one of them may be small beside the others
    for shape, ours, theirs, begin in zip(
        SHAPES, *(t.split(sizes, -1) for t in (result, expected, weights)), strict=True
    ):
        if not (ours - theirs).abs().max() <= TOLERANCE * (theirs - begin).abs().max():
            raise ValueError(
                f"{name} is not element by element: it updates a tensor of shape {shape} and its flat pieces, which "
                "are what ZeRO's ranks have, differently; AdamW, SGD and the like do not"
            )


@contextlib.contextmanager
def same_outcome(group: dist.ProcessGroup) -> Iterator[None]:
    """The block ends well on every rank of ``group``, or raises on every rank. Collective: a small message at its end.

    The block itself must not exchange anything: a rank that fails within an exchange leaves it to the others.

    Raises:
        Exception: on a rank whose block failed, what it raised. Elsewhere the first failed rank's error with its number
            in front, of the same type where that is one of Python's own, else a RuntimeError.
    """
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    outcomes: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    mine = None if error is None else (type(error).__name__, str(error))
    dist.all_gather_object(outcomes, mine, group=group)
    if error is not None:
        raise error
    for rank, outcome in enumerate(outcomes):
        if outcome is not None:
            raise _kind(outcome[0])(f"rank {rank}: {outcome[1]}")


def _kind(name: str) -> type[Exception]:
    """Python's own exception of this name; RuntimeError for others, and for those that are not made of a message."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, (UnicodeError, ExceptionGroup)):
        return kind
    return RuntimeError
