"""Runs layouts on warm ranks, and keeps the reference run and each step's comparison with it."""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pardemo.compat import dtype_name
from pardemo.script.compare.layouts import Layout
from pardemo.script.compare.parameter_map import Holders, Part, Strip, assembled, part_of_piece
from pardemo.script.record import rank_record
from pardemo.script.record.numbers import SHORT
from pardemo.script.record.parameters import Multiplied, Wanted
from pardemo.script.record.rank_record import OF_PARAMETERS, STATE, RankRecord, Step, Tensors
from pardemo.script.record.recorder import Recording, record_script
from pardemo.script.runtime.launch_lines import Launch, read_launch
from pardemo.script.runtime.runner import ScriptError, run_on_ranks, script_text

#: Elements of a model above which parameters are compared by sketches first.
SKETCHED = 20_000_000


class ProveError(ValueError):
    """A layout could not be run; one line says what happened, ``details`` where."""

    def __init__(self, message: str, details: str = ""):
        super().__init__(message)
        self.details = details


@dataclass
class Run:
    """The run of a layout: each rank's record. ``error``: why it could not be run.

    ``timed_out``: whether its time limit ended it. ``strips``: by rank the pieces that hold several of the reference's
    parameters and are read in strips. ``wanted``: steps to be compared; one more may have been recorded.
    """

    layout: Layout
    records: list[RankRecord] = field(default_factory=list)
    error: str = ""
    details: str = ""
    strips: dict[int, dict[str, list[Strip]]] = field(default_factory=dict)
    wanted: int = sys.maxsize
    timed_out: bool = False

    @property
    def steps(self) -> int:
        """Number of steps that every rank has recorded, at most those to be compared."""
        return min((min(len(record.steps), self.wanted) for record in self.records), default=0)

    def tensors(self, step: int, rank: int, kind: str) -> Tensors:
        """Reads a rank's tensors of a step, by name.

        ``kind``: ``before``, ``after``, ``gradient``, ``output``, ``input``.

        Of a parameter that ranks gather behind the optimizer's step, or in the next forward pass, what it is after a
        step is what the next forward pass has used.
        """
        stored = self._stored(step, rank, kind)
        if kind == "after" and step + 1 < len(self.records[rank].steps):
            stored |= self._stored(step + 1, rank, "used")
        return stored

    def keys(self, step: int, rank: int) -> list[str]:
        """Returns the kinds and names of all tensors that a rank recorded in a step."""
        with safe_open(self.records[rank].steps[step].file, framework="pt") as stored:
            return list(stored.keys())

    def since(self, step: int) -> "Run":
        """Returns the run without its first ``step`` steps."""
        records = [replace(record, steps=record.steps[step:]) for record in self.records]
        return replace(self, records=records, wanted=self.wanted - step)

    def _stored(self, step: int, rank: int, kind: str) -> Tensors:
        file = self.records[rank].steps[step].file
        prefix = f"{kind}/"
        with safe_open(file, framework="pt") as stored:
            tensors = {key[len(prefix) :]: stored.get_tensor(key) for key in stored.keys() if key.startswith(prefix)}  # noqa: SIM118
        cut = kind in OF_PARAMETERS or kind.startswith(STATE)
        for name, strips in self.strips.get(rank, {}).items() if cut else ():
            if (tensor := tensors.pop(name, None)) is not None:  # a state may be one number
                tensors |= {strip.name_in(name): strip.cut_from(tensor) if tensor.dim() else tensor for strip in strips}
        return tensors

    def gathers_late(self) -> bool:
        """Whether a forward pass has used other parameters than the optimizer's step had left."""
        steps = [(step, rank) for rank, record in enumerate(self.records) for step in range(len(record.steps))]
        return any(self._stored(step, rank, "used") for step, rank in steps)

    def cut(self, strips: dict[int, dict[str, list[Strip]]]) -> None:
        """Splits these pieces into strips, which are read as pieces of their own from now on."""
        self.strips = strips
        for rank, held in strips.items():
            for step in self.records[rank].steps:
                step.pieces = [
                    part
                    for piece in step.pieces
                    for part in ([s.as_piece(piece) for s in held[piece.name]] if piece.name in held else [piece])
                ]


@dataclass(frozen=True)
class Options:
    """Says how layouts are run: how many steps are recorded, in fp64 or the script's own type, and the time limit.

    ``follow``: what follows more of them on a rank, of prove's recorder. ``rounded``: rounded otherwise.
    ``multiplied``: parameters that are changed on purpose.
    """

    steps: int = 3
    double: bool = False
    timeout_s: float = 600.0
    sketched: bool = False
    in_full: tuple[str, ...] = ()
    function: Callable[[Layout], Callable[[], Any]] | None = None
    follow: Callable[..., Any] | None = None
    rounded: bool = False
    multiplied: Multiplied | None = None


def run_layout(layout: Layout, options: Options, folder: Path) -> Run:
    """Runs one layout and writes its tensors to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    recorded = max(options.steps, 2)  # the second says what parameters are after the first
    wanted = Wanted(recorded, str(folder), options.sketched, options.in_full, options.rounded, options.multiplied)
    launch, text, function, name = Launch(""), "", None, "the training"
    if options.function is not None:
        function = options.function(layout)
    else:
        launch, text = launch_of(layout)
        name = os.path.basename(launch.script)
    asked = Recording(launch, os.getcwd(), wanted, options.double, function, options.follow)
    try:
        records = run_on_ranks(
            record_script, asked, text, name=name, ranks=layout.ranks, journals=str(folder), timeout_s=options.timeout_s
        )
    except ScriptError as error:
        return Run(layout, [], str(error), error.details, timed_out=error.timed_out)
    run = Run(layout, records, wanted=options.steps)
    if 1 < len(records[0].steps) <= options.steps and run.gathers_late():
        run.wanted = len(records[0].steps) - 1  # of the last step nobody has seen what parameters are after it
    return run


def launch_of(layout: Layout) -> tuple[Launch, str]:
    """Reads a layout's command line: what it starts, and the script's text.

    Raises:
        ProveError: there is no such script. ValueError: the line cannot be read.
    """
    launch = read_launch(list(layout.line), layout.ranks)
    try:
        return script_text(launch, os.getcwd())
    except ScriptError as error:
        raise ProveError(str(error)) from None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder for tensors, which is removed at the end of its ``with`` block."""
    return tempfile.TemporaryDirectory(prefix="pardemo-prove-", ignore_cleanup_errors=True)


def require_steps(run: Run) -> None:
    """Raises an error where the reference could not be run or took no step."""
    if run.error:
        raise ProveError(f"the reference, {run.layout.name}: {run.error}", run.details)
    if not run.steps:
        raise ProveError(
            f"the reference, {run.layout.name}, took no step of an optimizer after a backward pass: "
            "there is nothing to compare"
        )


def elements(run: Run) -> dict[str, int]:
    """Returns the number of elements of each parameter of a run, by what its ranks' pieces say of the whole."""
    pieces = [piece for record in run.records for piece in record.steps[0].pieces]
    return {piece.name: torch.Size(piece.whole or piece.shape).numel() for piece in pieces}


@dataclass
class Pair:
    """A parameter's gradient or update in the reference and in the layout.

    ``factor``: c of the best c · reference. ``rest``: ‖ours − c · reference‖ / ‖ours‖. ``off``: ‖ours − reference‖ by
    the tolerated: above 1 they differ. ``apart``: versions of ranks that hold the same part and are not equal.
    """

    name: str
    reference: torch.Tensor
    ours: torch.Tensor
    covered: torch.Tensor
    factor: float
    rest: float
    off: float
    apart: list[tuple[Part, dict[int, torch.Tensor]]] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether they are the same to rounding."""
        return self.off <= 1


@dataclass(frozen=True)
class ComparedOutput:
    """A module's output on one rank, compared with the reference's. ``strict``: none of its parameters is cut.

    ``difference``: of the two projections, where a constant is added everywhere it is the same in all. [cells, 3]
    ``whole_inputs``: whether numbers that went in, as positions do, are the reference's; None where none did.
    """

    rank: int
    module: str
    kind: str
    order: int
    strict: bool
    difference: torch.Tensor
    reference: torch.Tensor
    whole_inputs: bool | None
    equal: bool = False


@dataclass(frozen=True)
class Finding:
    """A difference from the reference, in one layout from one step on.

    ``cause``: a short name, or empty where nobody knows. ``why``: the sentence for the reader. ``factor`` and ``rest``:
    of gradients or of what the finding is about. ``parameters``: the reference's names. ``module``: the first that is
    wrong, in the order of execution forwards, then backwards.
    """

    layout: str
    step: int
    what: str
    cause: str
    why: str
    factor: float | None = None
    rest: float | None = None
    parameters: tuple[str, ...] = ()
    module: str = ""


@dataclass
class StepComparison:
    """A step of one layout, compared with the reference's.

    ``order``: modules as they run in the reference, by their number. ``tied``: parameters' other names. ``cut``: those
    of which some rank has a part. ``holders``: how many ranks hold each. ``together``: those whose gradients are the
    same on all ranks when the optimizer steps, if they were clipped before. ``names``: of each rank and parameter the
    names under which the rank has it, several where it is tied there. ``norms``: of the reference's whole
    gradient in each step. ``moved``: of parameters whose pieces have the values of another one, that one.
    ``accumulated``: of each parameter the gradients that it had after each micro-batch but the last, added up.
    ``optimizer``: the classes of the reference's optimizers, and what they are made of. ``steps``: what each rank
    recorded; ``reference_step``: the reference.
    """

    layout: Layout
    step: int
    tolerance: float
    order: dict[str, int]
    gradients: dict[str, Pair] = field(default_factory=dict)
    updates: dict[str, Pair] = field(default_factory=dict)
    earlier: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parted: list[ComparedOutput] = field(default_factory=list)
    tied: dict[str, tuple[str, ...]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    holders: dict[str, int] = field(default_factory=dict)
    together: set[str] = field(default_factory=set)
    names: dict[int, dict[str, set[str]]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    moved: dict[str, str] = field(default_factory=dict)
    accumulated: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: str = ""
    steps: Sequence[Step] = ()
    reference_step: Step = field(default_factory=Step)

    @property
    def losses(self) -> list[float]:
        """Loss of each rank in the step, of those that have one: a pipeline's other stages have none."""
        return [sum(step.losses) for step in self.steps if step.losses]

    def first(self, names: Iterable[str]) -> str:
        """Returns the module of these parameters that a backward pass reaches first: the one that ran last."""
        modules = [alias.rpartition(".")[0] for name in names for alias in (name, *self.tied.get(name, ()))]
        return max(modules, key=self.place, default="")

    def place(self, module: str) -> int:
        """Returns a module's number in the reference's order of execution, or that of the nearest module around it."""
        while module and module not in self.order:
            module = module.rpartition(".")[0]
        return self.order.get(module, -1)


def compare_pair(
    name: str,
    reference: torch.Tensor,
    ours: torch.Tensor,
    covered: torch.Tensor,
    floor: float,
    tolerance: float,
    apart: list[tuple[Part, dict[int, torch.Tensor]]],
    noise: float = 0.0,
) -> Pair:
    """Compares the covered elements of two tensors.

    Args:
        floor: the root mean square of the layer's: a gradient that is zero but for rounding is judged by it.
        tolerance: of rounding, relative. noise: a norm up to which any difference is rounding.
    """
    a, b = reference[covered].double(), ours[covered].double()
    square, size = float(a @ a), a.numel()
    factor = float(a @ b) / square if square > 0 else float("nan")
    norm = float(b.norm())
    rest = float((b - factor * a).norm()) / norm if norm > 0 and square > 0 else 0.0 if norm == 0 else 1.0
    allowed = max(tolerance * max(square**0.5, floor * size**0.5), noise)
    difference = float((b - a).norm())
    off = difference / allowed if allowed > 0 else (0.0 if difference == 0 else float("inf"))
    if not torch.isfinite(b).all():
        factor, rest, off = float("nan"), float("nan"), float("inf")
    return Pair(name, reference, ours, covered, factor, rest, off, apart)


def layer_of(name: str) -> str:
    """Returns a parameter's layer: its name up to the last number in it, or its first part."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[-1] + 1]) if numbers else parts[0]


def layer_scales(tensors: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the largest root mean square of each layer's parameters, of the whole model's where a layer has one."""
    sizes = {name: float(t.double().norm()) / max(t.numel(), 1) ** 0.5 for name, t in tensors.items()}
    layers: dict[str, list[float]] = {}
    for name, size in sizes.items():
        layers.setdefault(layer_of(name), []).append(size)
    most = max(sizes.values(), default=0.0)
    return {name: max(layers[layer_of(name)]) if len(layers[layer_of(name)]) > 1 else most for name in tensors}


@dataclass
class WholeParameters:
    """A run's parameters in full: before and after one step, and their gradients. ``tied``: other names of each."""

    before: Tensors
    after: Tensors
    gradients: Tensors
    tied: dict[str, tuple[str, ...]]


#: Relative differences up to which numbers of a type are taken for equal. A sum of thousands of terms in another order
#: is off by ten or a hundred roundings; a bug is off by a factor.
TOLERANCES = {
    "float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3, "float8_e4m3fn": 3e-2, "float8_e5m2": 3e-2
}  # fmt: skip
#: By how many times what rounding otherwise has moved in the reference a layout may be off. The right layouts of
#: tests/right_forms in bf16, of two ranks and two micro-batches, are off by 2.5 times at most, and half of their
#: parameters by less than 0.4; with more of either, sums are rounded more often.
TIMES = 6.0


class Reference:
    """The reference's run, put together once for all layouts.

    Args:
        noise: of each step, by kind and parameter, the norm of what moves if short types are rounded otherwise.
    """

    def __init__(self, run: Run, tolerance: float, noise: list[dict[tuple[str, str], float]] | None = None):
        self.run, self.tolerance, self.noise = run, tolerance, noise or []
        self.order = [order_of(run, step) for step in range(run.steps)]
        self.whole = [self._whole(step) for step in range(run.steps)]
        self._floors = [layer_scales(parameters.gradients) for parameters in self.whole]
        self.norms = [norm_of(parameters.gradients) for parameters in self.whole]

    def allowed(self, kind: str, name: str, step: int) -> float:
        """Returns the norm by which rounding to few bits may change a parameter's gradient or update."""
        return TIMES * self.noise[step].get((kind, name), 0.0) if step < len(self.noise) else 0.0

    def more_than_rounding(self, name: str, step: int) -> torch.Tensor:
        """Selects a parameter's elements whose gradient is more than rounding.

        Of a gradient that is rounding an optimizer may make anything.

        Where types are short, in none of the steps so far: Adam's moments remember.
        """
        above = torch.ones(self.whole[step].gradients[name].shape, dtype=torch.bool)
        for at in range(step + 1) if self.noise else (step,):
            gradient = self.whole[at].gradients.get(name)
            if gradient is not None:
                each = self.allowed("gradient", name, at) / max(gradient.numel(), 1) ** 0.5
                above &= gradient.abs() > max(self.tolerance_of(name) * self._floors[at][name], each)
        return above

    def tolerance_of(self, name: str) -> float:
        """Returns the relative difference that counts as rounding in a parameter's own type."""
        if self._moved_nothing:
            return self.tolerance
        return self._by_type.get(name, self.tolerance)

    @cached_property
    def _by_type(self) -> dict[str, float]:
        """Returns the relative difference that counts as rounding in each gradient's type."""
        tolerances: dict[str, float] = {}
        for rank in range(self.run.layout.ranks):
            for name, tensor in self.run.tensors(0, rank, "gradient").items():
                of_type = TOLERANCES.get(dtype_name(tensor.dtype), self.tolerance)
                tolerances[name] = min(max(of_type, tolerances.get(name, 0.0)), self.tolerance)
        return tolerances

    @property
    def _moved_nothing(self) -> bool:
        """Whether it computes in short types outside of all modules, so that the other rounding has changed nothing."""
        short = any(SHORT.keys() & {*record.computed_in} for record in self.run.records)
        return bool(self.noise) and short and not any(by for (key, _), by in self.noise[0].items() if key == "gradient")

    def _whole(self, step: int) -> WholeParameters:
        """Returns the full tensors: the pieces themselves where one process has all, else put together from them."""
        pieces = [piece for record in self.run.records for piece in record.steps[step].pieces]
        tied = {piece.name: piece.tied for piece in pieces if piece.tied}
        before, after, gradients = (self.in_whole(step, kind) for kind in ("before", "after", "gradient"))
        return WholeParameters(before, after, gradients, tied)

    def in_whole(self, step: int, kind: str) -> Tensors:
        """Returns the full tensors of a kind in a step, by the parameters' names."""
        holders: dict[str, Holders] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, record in enumerate(self.run.records):
            tensors = self.run.tensors(step, rank, kind)
            for piece in record.steps[step].pieces:
                shape = tuple(tensors[piece.name].shape) if piece.name in tensors else None
                if shape is not None and len(shape) in (0, len(piece.shape)):  # or a state of another form
                    piece = rank_record.scale_piece(piece, shape) if shape else piece  # a state may be one number
                    part = part_of_piece(piece, piece.name, shape)
                    every = not part.is_cut and part.flat is None
                    shapes.setdefault(piece.name, shape if every else piece.whole or piece.shape)
                    holders.setdefault(piece.name, []).append((rank, part, tensors[piece.name]))
        made = {name: assembled(shapes[name], some) for name, some in holders.items()}
        if kind == "before" and (apart := [name for name, parameter in made.items() if parameter.apart]):
            raise ProveError(
                f"the ranks of the reference, {self.run.layout.name}, hold different values of {apart[0]} in step "
                f"{step + 1}: nobody can say which are right; choose one process for the reference"
            )
        return {name: parameter.value for name, parameter in made.items()}


def noise_between(reference: Reference, rounded: Run) -> list[dict[tuple[str, str], float]]:
    """Returns for each step the norms by which another rounding changed each parameter's gradient and update."""
    noise = []
    for ours, its in zip(reference.whole, Reference(rounded, reference.tolerance).whole, strict=False):
        pairs = {("gradient", name): (its.gradients[name], ours.gradients[name])
                 for name in ours.gradients.keys() & its.gradients.keys()}  # fmt: skip
        pairs |= {("update", name): (its.after[name] - its.before[name], ours.after[name] - ours.before[name])
                  for name in ours.after.keys() & its.after.keys()}  # fmt: skip
        noise.append({key: float((a - b).norm()) for key, (a, b) in pairs.items()})
    return noise


#: Bytes of the tensors that are kept of a finding. What is beyond is left out, and said to be.
MOST_BYTES = 64_000_000


@dataclass(frozen=True)
class Kept:
    """The tensors of a finding in the reference and in the layout.

    ``gradient/NAME/reference`` and ``gradient/NAME/layout`` in whole; where ranks hold the same part and have different
    values each one's, too, as ``gradient/NAME/rank 1``. Of a module's output what was recorded of it, two random
    projections of each row and its norm: ``output/NAME/rank 0/0/reference``, with the number of the call.
    ``left_out``: what there was no room for. ``sketches``: parameters of which these are sketches.
    """

    tensors: Tensors
    left_out: tuple[str, ...] = ()
    sketches: tuple[str, ...] = ()


def kept_tensors(findings: Sequence[Finding], facts: StepComparison, reference: Run) -> dict[Finding, Kept]:
    """Collects the tensors of findings without a cause, up to :data:`MOST_BYTES` of each."""
    pieces = [piece for record in reference.records for piece in record.steps[facts.step].pieces]
    shapes = {piece.name: piece.whole or piece.shape for piece in pieces}
    made = {}
    for finding in findings:
        tensors: Tensors = {}
        left_out, sketches = [], []
        groups = _output_tensors if finding.what == "forward" else _gradient_tensors
        for name, group in groups(finding, facts) if not finding.cause else ():
            if sum(tensor.nbytes for tensor in (*tensors.values(), *group.values())) > MOST_BYTES:
                left_out.append(name)
                continue
            tensors |= group
            if groups is _gradient_tensors and tuple(facts.gradients[name].reference.shape) != shapes.get(name):
                sketches.append(name)
        if tensors or left_out:
            made[finding] = Kept(tensors, tuple(left_out), tuple(sketches))
    return made


def _gradient_tensors(finding: Finding, facts: StepComparison) -> Iterator[tuple[str, Tensors]]:
    """Yields the gradients of each parameter of the finding."""
    for name in finding.parameters:
        if (pair := facts.gradients.get(name)) is not None:
            group = {"reference": pair.reference, "layout": pair.ours}
            for _, versions in pair.apart:
                group |= {f"rank {rank}": tensor for rank, tensor in versions.items()}
            yield name, {f"gradient/{name}/{key}": tensor for key, tensor in group.items()}


def _output_tensors(finding: Finding, facts: StepComparison) -> Iterator[tuple[str, Tensors]]:
    """Yields each call's output of the first module that is wrong, on each rank where it is."""
    numbers: dict[int, int] = {}
    for output in facts.parted:
        if output.module == finding.module:
            number = numbers[output.rank] = numbers.get(output.rank, -1) + 1
            key = f"output/{output.module}/rank {output.rank}/{number}"
            yield key, {f"{key}/reference": output.reference, f"{key}/layout": output.reference + output.difference}


def order_of(run: Run, step: int) -> dict[str, int]:
    """Numbers modules in the order in which they end in the reference; a module that runs often by its last end."""
    order: dict[str, int] = {}
    for rank in range(run.layout.ranks):
        for place, call in enumerate(run.records[rank].steps[step].calls):
            order[call.module] = max(order.get(call.module, -1), place)
    return order


def norm_of(tensors: dict[str, torch.Tensor]) -> float:
    """Returns the norm of all tensors together."""
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))
