"""LoRA in a layout: what is trained on a rank, what adapters read and write, which inputs frozen weights do without.

Hu et al. 2021 (arXiv 2106.09685), 4.1: beside a frozen weight of inputs × outputs go two matrices, inputs × rank and
rank × outputs. Tensor parallelism cuts both, as Megatron-Bridge does (``ParallelLinearAdapter``).
"""

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout
from pardemo.planner.layouts.model.shape import Shape
from pardemo.planner.layouts.model.tuning import Tuning, adapted, adapted_parts
from pardemo.planner.layouts.share.rank_parameters import Owned, owned_params

#: The modules of a layer that take the same input.
MIXER = {"q", "k", "v", "qkv", "q_a", "kv_a"}
UP = {"up", "gate", "gate+up"}
DOWN = {"down"}
#: Those that tensor parallelism cuts by rows: their input is cut, and of their output's sum each rank has its part.
ROWS = {"o", "down"}


def trained_params(job: Job, layout: Layout, split: list[int], place: int) -> Owned:
    """Parameters of a rank of stage ``place`` that are updated: all of them, or its layers' adapters."""
    if not job.tuning.lora:
        return owned_params(job, layout, split, place)
    return Owned(split[place] * trained_layer(job, layout).dense, 0.0)


def trained_layer(job: Job, layout: Layout) -> Owned:
    """The same of a layer, where adapters are trained."""
    each = job.tuning.rank * sum(inputs + outputs for inputs, outputs in adapted(job.tuning, job.shape))
    return Owned(each / layout.tp, 0.0)


def moved_bytes(job: Job, layout: Layout) -> float:
    """Bytes of a token that a layer's adapters read and write on a rank in one pass, as operations of their own.

    Each reads its module's input and writes an output; the sum of it and the module's output reads both and is written.
    """
    tuning, shape = job.tuning, job.shape
    total = 0.0
    for part, (inputs, outputs) in zip(adapted_parts(tuning, shape), adapted(tuning, shape), strict=True):
        read = inputs / layout.tp if part in ROWS else inputs
        total += 2 * read + 8 * outputs / layout.tp
    return total


def keeps_input(tuning: Tuning, shape: Shape, modules: set[str]) -> bool:
    """Whether the input that ``modules`` share is kept for gradients of weights: of theirs, or of an adapter's."""
    return not tuning.lora or bool(modules & set(adapted_parts(tuning, shape)))


def kept_bytes(tuning: Tuning, shape: Shape) -> float:
    """Bytes of a token that a layer's adapters keep beside their inputs: dropped copies, their masks, the low rank."""
    if not tuning.lora:
        return 0.0
    each = 3 if tuning.dropout else 0
    return sum(each * inputs + 2 * tuning.rank for inputs, _ in adapted(tuning, shape))
