"""Computes the norm of a model's gradients where no rank has them all, and clips by it.

Each parameter counts once, wherever it is: the parts of a cut one add up over the tensor-parallel ranks, a replica is
counted by the first of them, the stages of a pipeline add up over its ranks, a tied copy is counted by the first rank
that has one. Every rank then clips by the same factor, to the last bit: replicas stay replicas. Megatron-LM does it so
(``clip_grad_norm_fp32``, with ``param_is_not_shared`` and ``param_is_not_tensor_parallel_duplicate``).

Which rank counts what, of a cut weight w, a replica b (a norm's, say) and a tied embedding e, on 2 × 2 ranks::

    stage 0    tensor rank 0: part of w, b, e      tensor rank 1: part of w
    stage 1    tensor rank 0: part of w, b         tensor rank 1: part of w      e is stage 0's
    squares are summed over the tensor-parallel ranks, then over the stages: one number on all four
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo.argument_checks import above_zero
from pardemo.collectives import ring_all_reduce
from pardemo.groups import Tied, cut_of

#: elements of a parameter in their order in memory: the first, and the one behind the last
Span = tuple[int, int]


def clip_grad_norm_(
    module: nn.Module, max_norm: float, *, pipeline_group: dist.ProcessGroup | None = None, tied: Sequence[Tied] = ()
) -> float:
    """``torch.nn.utils.clip_grad_norm_`` for a module whose layers are cut, or a stage of a pipeline. Collective.

    Call it when ``.grad`` is what the optimizer is to use: after ``BucketedDataParallel``'s backward, after a
    pipeline's ``step()``. The ZeRO engines clip by themselves (``max_norm``). Which parameters are cut, their marks
    say (:func:`pardemo.groups.cut_of`); all others are replicas.

    Args:
        module: this rank's part of the model; several chunks as an ``nn.ModuleList``.
        max_norm: the largest norm that is left as it is.
        pipeline_group: the pipeline's group; None without a pipeline.
        tied: what the ``Pipeline`` was given: parameters of which other stages have a copy, and the group of all that
            have one.

    Returns:
        The 2-norm of the whole model's gradients before clipping, the same on every rank. Where it is inf or nan the
        gradients become what torch makes of them: zeros and nan, or nan throughout.

    Raises:
        ValueError: ``max_norm`` is not above 0, or the layers are cut over different groups.
    """
    above_zero(max_norm, "max_norm")
    gradients = {p: p.grad for p in module.parameters() if p.grad is not None}
    model = NormOfModel(module, pipeline_group, tied)
    norm = model.norm(model.squares(part for p, g in gradients.items() for part in model.counted(p, g)))
    factor = clip_factor(norm, max_norm)
    for gradient in gradients.values():
        gradient.mul_(factor)
    return norm


class NormOfModel:
    """The 2-norm of gradients that are spread over tensor-parallel ranks, and over a pipeline's.

    Args: as of :func:`clip_grad_norm_`.
    """

    def __init__(self, module: nn.Module, pipeline_group: dist.ProcessGroup | None = None, tied: Sequence[Tied] = ()):
        cut, tensor_parallel = _cut_parameters(module)
        replica = tensor_parallel is not None and dist.get_rank(tensor_parallel) > 0
        #: of each parameter the elements that this rank counts, as (first, end); all where there is no entry
        self._spans = cut | {p: [] for p in module.parameters() if replica and p not in cut}
        self._spans |= {p: [] for p, holders in tied if dist.get_rank(holders) > 0}
        self._groups = [group for group in (tensor_parallel, pipeline_group) if group is not None]
        self._device = next(module.parameters()).device
        #: whether other ranks have other parts of the model
        self.is_of_a_part = any(group.size() > 1 for group in self._groups)

    def counted(self, parameter: nn.Parameter, piece: torch.Tensor, begin: int = 0) -> Iterator[torch.Tensor]:
        """Yields what this rank counts of ``piece``, the gradient of a parameter's elements from ``begin`` on."""
        if parameter not in self._spans:
            yield piece
            return
        flat = piece.reshape(-1)
        for first, end in self._spans[parameter]:
            yield flat[max(0, first - begin) : max(0, end - begin)]

    def squares(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """The sum of this rank's squares, [1] in fp64. A tensor's own norm is taken in fp32 at least."""
        norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in gradients]
        if not norms:
            return torch.zeros(1, dtype=torch.float64, device=self._device)
        return torch.stack([norm.double() for norm in norms]).square().sum().reshape(1)

    def norm(self, squares: torch.Tensor) -> float:
        """Collective: the norm of the whole model, from the squares of this rank's part of it."""
        for group in self._groups:
            ring_all_reduce(squares, group, label="squares of the gradients")
        return squares.sqrt().item()


def _cut_parameters(module: nn.Module) -> tuple[dict[nn.Parameter, list[Span]], dist.ProcessGroup | None]:
    """The parameters of which this rank has a part only, and the group that has the whole; None where nothing is cut.

    Beside each parameter, the elements that this rank counts: not those of which an earlier rank has a copy, as of a
    key/value head that several ranks hold.

    Raises:
        ValueError: the layers are cut over groups of different ranks.
    """
    cut: dict[nn.Parameter, list[Span]] = {}
    whole_group = None
    for parameter in module.parameters():
        if mark := cut_of(parameter):
            ranks, others = (dist.get_process_group_ranks(group) for group in (mark.group, whole_group or mark.group))
            if ranks != others:
                raise ValueError(f"layers are cut over ranks {others} and over {ranks}; a model has one such group")
            whole_group = mark.group
            cut[parameter] = list(mark.counted)
    return cut, whole_group


def clip_factor(norm: float, max_norm: float) -> float:
    """Returns the factor that clips gradients of that norm: at most 1."""
    factor = max_norm / (norm + 1e-6)
    return 1.0 if factor >= 1 else factor  # not min(): a norm that is no number spoils all gradients, as in torch
