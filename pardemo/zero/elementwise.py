"""Does an optimizer work element by element? A shard is a flat piece of several parameters: what looks at a parameter's
shape or at its norm does something else there, and most such optimizers do not say so."""

import torch
from torch import nn

from pardemo.zero.param_groups import MakeOptimizer, ParamGroups

Shapes = list[torch.Size]
STEPS = 12  # some optimizers look back every fifth or tenth step
#: Matrices, kernels of convolutions, whose gradients some optimizers treat as blocks, a bias. All cuts are within rows.
SMALL: Shapes = [torch.Size(shape) for shape in ((6, 8), (4, 3, 3, 5), (5, 4, 3), (7,))]
SMALL_PIECES: Shapes = [torch.Size([numel]) for numel in (20, 150, 125)]
#: What some optimizers factor, from 128 × 128 on at the latest. Tried when small ones are right: flat pieces of this
#: size are dear where an optimizer takes them for rows.
LARGE: Shapes = [torch.Size([129, 131])]
LARGE_PIECES: Shapes = [torch.Size([numel]) for numel in (9001, 129 * 131 - 9001)]
TOLERANCE = (
    1e-3  # of the largest change: vector and scalar instructions round differently, other optimizers differ by 1
)


def check_elementwise(make: MakeOptimizer, groups: ParamGroups, device: torch.device) -> None:
    """Runs the optimizer on a few tensors of several shapes, and on the same numbers in flat pieces, one at a time.

    Costs milliseconds and no random number. What the factory itself raises for a matrix is left as it is.

    Raises:
        ValueError: the pieces end with other numbers than the tensors, or the optimizer refuses them.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        _compare(make, groups, SMALL, SMALL_PIECES, STEPS, device)
        _compare(make, groups, LARGE, LARGE_PIECES, 2, device)


def _compare(
    make: MakeOptimizer, groups: ParamGroups, whole: Shapes, pieces: Shapes, steps: int, device: torch.device
) -> None:
    name = type(_Sample(make, groups, whole[:1], device).optimizer).__name__
    try:
        expected = _Sample(make, groups, whole, device).after(steps, together=True)
        result = _Sample(make, groups, pieces, device).after(steps, together=False)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{name} cannot update flat shards ({type(error).__name__}: {reason})") from error
    sizes = [shape.numel() for shape in whole]
    before = _weights(sum(sizes), device).expand_as(expected)
    # each tensor on its own: what is done to one of them may be small beside the others
    for shape, *parts in zip(whole, *(flat.split(sizes, -1) for flat in (before, expected, result)), strict=True):
        start, theirs, ours = parts
        if not (ours - theirs).abs().max() <= TOLERANCE * (theirs - start).abs().max():
            raise ValueError(
                f"{name} is not element by element: it updates a tensor of shape {tuple(shape)} and its flat pieces, "
                "which are what ZeRO's ranks have, differently; AdamW, SGD and the like do not"
            )


class _Sample:
    """The same numbers in tensors of the given shapes, for each parameter group, under an optimizer of their own."""

    def __init__(self, make: MakeOptimizer, groups: ParamGroups, shapes: Shapes, device: torch.device):
        self._shapes, self._device, self._numel = shapes, device, sum(shape.numel() for shape in shapes)
        self._tensors = [
            [nn.Parameter(piece) for piece in self._cut(_weights(self._numel, device))] for _ in groups.settings
        ]
        numbered = [(number, tensor) for number, tensors in enumerate(self._tensors) for tensor in tensors]
        self.optimizer = make(groups.shards(numbered))
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr") or 1e-2  # a schedule may begin at zero, which would hide everything

    def after(self, steps: int, together: bool) -> torch.Tensor:
        """The numbers after each step, [steps, groups, elements]: what is done at every tenth may add up to the same.

        ``together``: one step for all tensors, else one for each, as engines do.
        """
        history = []
        for step in range(steps):
            gradients = self._cut(_gradients(step, self._numel, self._device))
            for part in [range(len(gradients))] if together else [[at] for at in range(len(gradients))]:
                for at in part:
                    for tensors in self._tensors:
                        tensors[at].grad = gradients[at].clone()
                self.optimizer.step()
                for at in part:
                    for tensors in self._tensors:
                        tensors[at].grad = None
            history.append(torch.stack([torch.cat([t.detach().flatten() for t in ts]) for ts in self._tensors]))
        return torch.stack(history)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [piece.reshape(shape).clone() for piece, shape in zip(pieces, self._shapes, strict=True)]


def _weights(numel: int, device: torch.device) -> torch.Tensor:
    """Numbers whose rows, columns and pieces differ much in size, so that no norm of one is that of another."""
    at = torch.arange(numel, device=device, dtype=torch.float32)
    return torch.cos(3 * at) * (1 + at // 8 % 6) * (1 + at % 8)


def _gradients(step: int, numel: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(numel, device=device, dtype=torch.float32)
    return torch.sin((2 + step) * at + 1) * (1 + at % 8) ** 2 / (1 + at // 8 % 6)
