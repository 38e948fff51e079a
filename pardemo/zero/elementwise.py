"""Does an optimizer work element by element? A shard is a flat piece of several parameters: what looks at a parameter's
shape or at its norm does something else there, and most such optimizers do not say so."""

import torch
from torch import nn

from pardemo.zero.param_groups import MakeOptimizer, ParamGroups

ROWS, COLUMNS = 6, 8
WHOLE = [torch.Size([ROWS, COLUMNS])]
PIECES = [torch.Size([20]), torch.Size([28])]  # the cut is within a row
TOLERANCE = (
    1e-3  # of the largest change: vector and scalar instructions round differently, other optimizers differ by 1
)


def check_elementwise(make: MakeOptimizer, groups: ParamGroups, device: torch.device) -> None:
    """Runs the optimizer for two steps on a small matrix, and on the same numbers in two flat pieces, one at a time.

    Costs milliseconds and no random number. What the factory itself raises for the matrix is left as it is.

    Raises:
        ValueError: the pieces end with other numbers than the matrix, or the optimizer refuses them.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        whole = _Sample(make, groups, WHOLE, device)
        name = type(whole.optimizer).__name__
        try:
            expected = whole.after_two_steps()
            found = _Sample(make, groups, PIECES, device).after_two_steps()
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{name} cannot update flat shards ({type(error).__name__}: {reason})") from error
    change = (expected - _weights(device)).abs().max()
    if not (found - expected).abs().max() <= TOLERANCE * change:
        raise ValueError(
            f"{name} is not element by element: it updates a matrix and its flat pieces, which are what ZeRO's ranks "
            "have, differently; AdamW, SGD and the like do not"
        )


class _Sample:
    """The same numbers in tensors of the given shapes, for each parameter group, under an optimizer of their own."""

    def __init__(self, make: MakeOptimizer, groups: ParamGroups, shapes: list[torch.Size], device: torch.device):
        self._shapes, self._device = shapes, device
        self._tensors = [[nn.Parameter(piece) for piece in self._cut(_weights(device))] for _ in groups.settings]
        numbered = [(number, tensor) for number, tensors in enumerate(self._tensors) for tensor in tensors]
        self.optimizer = make(groups.shards(numbered))
        for group in self.optimizer.param_groups:
            group["lr"] = group.get("lr") or 1e-2  # a schedule may begin at zero, which would hide everything

    def after_two_steps(self) -> torch.Tensor:
        """The numbers, [groups, elements]."""
        for step in range(2):
            for at, gradient in enumerate(self._cut(_gradients(step, self._device))):
                for tensors in self._tensors:
                    tensors[at].grad = gradient.clone()
                self.optimizer.step()  # as the engine does: a step for each unit
                for tensors in self._tensors:
                    tensors[at].grad = None
        return torch.stack([torch.cat([t.detach().flatten() for t in tensors]) for tensors in self._tensors])

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [piece.reshape(shape).clone() for piece, shape in zip(pieces, self._shapes, strict=True)]


def _weights(device: torch.device) -> torch.Tensor:
    """Numbers whose rows, columns and pieces differ much in size, so that no norm of one is that of another."""
    at = torch.arange(ROWS * COLUMNS, device=device, dtype=torch.float32)
    return torch.cos(3 * at) * (1 + at // COLUMNS) * (1 + at % COLUMNS)


def _gradients(step: int, device: torch.device) -> torch.Tensor:
    at = torch.arange(ROWS * COLUMNS, device=device, dtype=torch.float32)
    return torch.sin((2 + step) * at + 1) * (1 + at % COLUMNS) ** 2 / (1 + at // COLUMNS)
