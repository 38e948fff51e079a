"""Model states in bytes, on each rank under ZeRO, by the number of GPUs, and over a step."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, SHADES, VERDICTS, WHOLE, ink_on
from pardemo.draw.parts import check_range, legend, parts, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import memory
from pardemo.project import is_headless

#: From which of ZeRO-1, ZeRO-2 and ZeRO-3 on a kind of state is in shards.
SINCE = {"parameters": 3, "gradients": 2, "optimizer states": 1}
KEPT_OF_MODEL = {kind: KEPT[kind] for kind in SINCE}
STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def states(
    canvas: Canvas, x: float, y: float, unit: float, high: float, ranks: int, shown: Mapping[str, Collection[int]],
    bytes_each: Sequence[int] = memory.ADAM,
) -> None:  # fmt: skip
    """Model states of a rank side by side, ``unit`` wide for a byte: of each kind the parts in ``shown``, of N."""
    for kind, nbytes in zip(SINCE, bytes_each, strict=True):
        parts(canvas, x, y, nbytes * unit, high, ranks, shown[kind], KEPT[kind])
        x += nbytes * unit


@drawing(520)
def zero_stages(canvas: Canvas, totals: bool = True) -> str:
    """The model states of mixed-precision Adam on each of four ranks: areas are bytes, rows are the model's parts.

    Args:
        totals: with the bytes of each rank as numbers beside the boxes; without, they are left to the reader's guess.
    """
    ranks = 4
    formulas = ("2 + 2 + 12", "2 + 2 + 12/N", "2 + (2 + 12)/N", "(2 + 2 + 12)/N")
    notes = ("every rank keeps all", "optimizer states are cut", "gradients too", "parameters too")
    left, gap = 16, 10
    each = ((434 if totals else 608) - gap * (ranks - 1)) / ranks
    unit = each / memory.ADAM.total  # of a byte
    for rank in range(ranks):
        canvas.text(left + rank * (each + gap) + each / 2, 20, f"rank {rank}")
    if totals:
        canvas.text(470, 20, "bytes each", "start")
    bytes_each = []
    for stage in memory.STAGES:
        y = 66 + 98 * stage
        canvas.text(left, y - 17, STAGES[stage], "start", bold=True, size=20)
        canvas.text(left + 94, y - 17, notes[stage], "start")
        for rank in range(ranks):
            shown = {kind: range(ranks) if stage < since else [rank] for kind, since in SINCE.items()}
            states(canvas, left + rank * (each + gap), y, unit, 60, ranks, shown)
        # of as many parameters as ranks: shares are whole
        bytes_each.append(memory.model_states_bytes(ranks, ranks, stage) / ranks)
        if totals:
            canvas.text(470, y + 15, formulas[stage], "start")
            canvas.text(470, y + 43, f"= {bytes_each[-1]:.3g}", "start", size=22, bold=True)
    legend(canvas, left, 462, KEPT_OF_MODEL)
    canvas.text(left, 496, f"widths are bytes; rows are the model's {ranks} parts", "start")
    numbers = f": {', '.join(f'{nbytes:.3g}' for nbytes in bytes_each)}" if totals else ""
    return (
        f"Bytes for each parameter on each of {ranks} ranks, in plain data parallelism and under ZeRO-1, ZeRO-2 and "
        f"ZeRO-3{numbers}. ZeRO-1 cuts the optimizer states, ZeRO-2 the gradients too, ZeRO-3 the parameters too."
    )


@drawing(312)
def sixteen_bytes(canvas: Canvas) -> str:
    """One parameter in mixed precision: a box for each byte, a row for each tensor, and who reads it when."""
    tensors = (
        ("parameter, bf16", 2, "parameters", "forward and backward"),
        ("gradient, bf16", 2, "gradients", "backward, then Adam"),
        *(
            (f"{name}, fp32", 4, "optimizer states", "Adam, once a step")
            for name in ("parameter", "momentum", "variance")
        ),
    )
    byte, left = 44, 186
    for number, (name, nbytes, kind, read) in enumerate(tensors):
        y = 10 + 52 * number
        canvas.text(left - 12, y + 19, name, "end")
        canvas.boxes([(left + byte * k, y, byte, 38) for k in range(nbytes)], KEPT[kind])
        canvas.text(left + byte * nbytes + 14, y + 19, read, "start")
    canvas.text(left - 12, 284, "all: 16 bytes", "end", size=20, bold=True)
    canvas.text(left, 284, "12 of them are Adam's alone: K = 12", "start")
    tensors_text = "; ".join(f"{name}: {nbytes} bytes, read by {read}" for name, nbytes, _, read in tensors)
    return f"The 16 bytes of one parameter. {tensors_text}."


def states_explorer(billions: float = 7.5, world_size: int = 64, k: int = 12) -> Any:
    """Sliders and bars that follow them; where no Python runs to redraw these, in a page, a player over N."""
    if is_headless():
        return states_by_ranks(billions, start=world_size)
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(billions: float, world_size: int, k: int) -> None:
        # interactive shows what is displayed, not what is returned
        display(Drawing(*_frame(billions, world_size, memory.StateBytes(optimizer=k))))

    return widgets.interactive(
        redraw,
        # 0.025 of a decade: a step lies on 10^0.875 = 7.499, the paper's 7.5
        billions=widgets.FloatLogSlider(
            billions, min=-1, max=3, step=0.025, description="Ψ, 10⁹", readout_format=".3g"
        ),
        world_size=widgets.IntSlider(world_size, min=1, max=1024, description="N"),
        k=widgets.Dropdown(options=[12, 8, 6, 4], value=k, description="K"),
    )


def states_by_ranks(billions: float = 7.5, start: int = 64) -> Player:
    """Bars of GB on a GPU, plain and under ZeRO-1, 2 and 3; each frame has twice as many GPUs as the one before.

    Args:
        billions: Ψ, in 10⁹ parameters. start: the number of GPUs shown first, up to 1024.
    """
    frames = [_frame(billions, 2**k) for k in range(11)]
    name = f"model states of {billions:g}·10⁹ parameters by GPUs, plain and under ZeRO-1, 2 and 3"
    return Player(frames, name, [2**k for k in range(11)].index(start))


def _frame(billions: float, ranks: int, bytes_each: memory.StateBytes = memory.ADAM) -> tuple[Canvas, str]:
    canvas, room = Canvas(640, 290), 85  # GB of a GPU, red marks
    left, most = 108, bytes_each.total * billions
    scale = 430 / most
    params = round(billions * 1e9)
    letters = f"Ψ = {billions:.3g}·10⁹, N = {ranks:,}"
    if bytes_each != memory.ADAM:
        letters += f", K = {bytes_each.optimizer}"
    canvas.text(8, 18, letters, "start", bold=True, size=20)
    totals = []
    for stage in memory.STAGES:
        y, x = 46 + 50 * stage, left
        kinds = {kind: nbytes / 1e9 for kind, nbytes in memory.model_states(params, ranks, stage, bytes_each).items()}
        canvas.text(left - 10, y + 18, STAGES[stage], "end")
        for kind, gigabytes in kinds.items():
            canvas.box(x, y, gigabytes * scale, 36, KEPT[kind], thick=1)
            x += gigabytes * scale
        totals.append(sum(kinds.values()))
        digits = ".3g" if totals[-1] < 10 else ".1f" if totals[-1] < 1000 else ",.0f"
        canvas.text(x + 8, y + 18, f"{totals[-1]:{digits}} GB", "start", bold=totals[-1] <= room)
        if room <= most:  # between the bars, where no text is
            canvas.line([(left + room * scale, y - 12), (left + room * scale, y - 2)], VERDICTS["fails"], 3)
    if room <= most:
        canvas.line([(left + room * scale, 234), (left + room * scale, 244)], VERDICTS["fails"], 3)
        canvas.line([(556, 260), (556, 276)], VERDICTS["fails"], 3)
        canvas.text(564, 268, f"{room:g} GB", "start")
    legend(canvas, 8, 268, KEPT_OF_MODEL, gap=16)
    fits = [name for name, total in zip(STAGES, totals, strict=True) if total <= room]
    gigabytes_by_stage = ", ".join(f"{total:.3g}" for total in totals)
    ways = "plain data parallelism, ZeRO-1, ZeRO-2 and ZeRO-3"
    caption = f"On {ranks:,} GPU{'s' * (ranks > 1)}, {ways} keep {gigabytes_by_stage} GB on each. "
    return canvas, caption + (
        f"These fit into {room:g} GB: {', '.join(fits)}." if fits else f"None of them fits into {room:g} GB."
    )


LAYERS = (1, 2, 3)
_TALK = DONE["communication"]
_MOVED = {"all-gather": "parameters", "reduce-scatter": "gradients"}


@dataclass
class Moment:
    """The state of each rank after an event of the step.

    Attributes:
        does: "forward", "backward", "all-gather", "reduce-scatter", "free", "update" or "" at the beginning.
        layers: the layers that it happens to.
        caption: the event in words, below the frame.
        held: (rank, layer, kind) -> the parts that are there, of N.
        summed: layers of whose gradients each rank has the sum over all ranks, for its own part.
        sent: numbers of 2 bytes that each rank has sent, in units of all parameters, without the (N − 1)/N.
    """

    ranks: int
    does: str = ""
    layers: tuple[int, ...] = ()
    caption: str = ""
    held: dict[tuple[int, int, str], set[int]] = field(default_factory=dict)
    summed: set[int] = field(default_factory=set)
    sent: float = 0.0

    def keep(self, kind: str, layer: int, all_parts: bool | None) -> None:
        """``all_parts`` True: every rank holds all parts; False: its own part alone; None: nothing."""
        for rank in range(self.ranks):
            held_parts = set(range(self.ranks)) if all_parts else {rank} if all_parts is False else set()
            self.held[rank, layer, kind] = held_parts

    @property
    def bytes_each(self) -> float:
        """Bytes on a rank for each parameter of the model."""
        bytes_of = dict(zip(SINCE, memory.ADAM, strict=True))
        nbytes = sum(bytes_of[kind] * len(held_parts) for (rank, _, kind), held_parts in self.held.items() if rank == 0)
        return nbytes / (self.ranks * len(LAYERS))


def zero_step(stage: int, ranks: int = 2) -> Player:
    """A forward, a backward and an update of three equal layers under ZeRO.

    Args:
        stage: 1, 2 or 3, for ZeRO-1, ZeRO-2 and ZeRO-3. ranks: N, from 2 to 4. Others raise a ValueError.
    """
    course = moments(stage, ranks)
    frames = [(_step_frame(moment, ranks), moment.caption) for moment in course]
    wanted = "all-gather" if stage == 3 else "reduce-scatter"  # on paper one frame has to tell the idea
    start = next(number for number, moment in enumerate(course) if moment.does == wanted)
    return Player(frames, f"a step of three layers under ZeRO-{stage} on {ranks} ranks", start)


def moments(stage: int, ranks: int) -> list[Moment]:
    """The step as a list of what happens; raises as :func:`zero_step` does."""
    if stage not in (1, 2, 3):
        raise ValueError(f"there are ZeRO-1, ZeRO-2 and ZeRO-3, and no ZeRO-{stage!r}")
    check_range(ranks, 2, 4)
    kept = "all parameters, but only its own part of the optimizer states"
    kept = "only its own part of everything" if stage == 3 else kept
    course = [Moment(ranks, caption=f"Between two steps each rank keeps {kept}. Ψ is the number of all parameters.")]
    for kind, since in SINCE.items():
        for layer in LAYERS:
            course[0].keep(kind, layer, None if kind == "gradients" else stage < since)
    for does, layers, caption, changes in _stage_3() if stage == 3 else _stage_1_or_2(stage):
        moment = deepcopy(course[-1])
        moment.does, moment.layers, moment.caption = does, layers, caption
        for kind, layer, all_parts in changes:
            moment.keep(kind, layer, all_parts)
        moment.sent += len(layers) / len(LAYERS) * (does in _MOVED)
        if does == "reduce-scatter":
            moment.summed |= set(layers)
        elif does == "update":
            moment.summed.clear()
        course.append(moment)
    course[-1].caption += f" In all, each rank has sent {_psi(course[-1].sent)} numbers."
    return course


def _psi(sent: float) -> str:
    """``1⅓ Ψ(N − 1)/N``: what has been sent comes in thirds, a layer's each."""
    full, thirds = divmod(round(sent * len(LAYERS)), len(LAYERS))
    count = (str(full) if full else "") + ("", "⅓", "⅔")[thirds]
    return unbroken(f"{'' if count == '1' else count + ' '}Ψ(N − 1)/N")


#: (what happens, to which layers, in words, [(kind, layer, all parts)])
Event = tuple[str, tuple[int, ...], str, list[tuple[str, int, bool | None]]]


def _stage_1_or_2(stage: int) -> Iterator[Event]:
    for layer in LAYERS:
        yield "forward", (layer,), f"Layer {layer} goes forward. Every rank has all its parameters.", []
    for layer in reversed(LAYERS):
        stay = (
            ", and its gradients stay on every rank."
            if stage == 1
            else ". For a moment its gradients are there in full."
        )
        yield "backward", (layer,), f"Layer {layer} goes backward{stay}", [("gradients", layer, True)]
        if stage == 2:
            caption = (
                f"A reduce-scatter: each rank keeps the sum for its own part of layer {layer}, and frees the rest."
            )
            yield "reduce-scatter", (layer,), caption, [("gradients", layer, False)]
    if stage == 1:
        caption = "A reduce-scatter gives each rank the sum over all ranks for its own part, Σ."
        yield "reduce-scatter", LAYERS, caption + " Its whole gradients stay as well.", []
    caption = "Each rank updates its own part of the parameters. The other parts are out of date now."
    yield "update", LAYERS, caption, [("gradients", layer, None) for layer in LAYERS]
    yield "all-gather", LAYERS, "An all-gather brings the new parameters to every rank.", []


def _stage_3() -> Iterator[Event]:
    for layer in LAYERS:
        before = [("parameters", layer - 1, False)] if layer > 1 else []
        caption = f"Layer {layer - 1} is done; each rank frees it, except its own part. " * (layer > 1)
        caption += f"An all-gather brings layer {layer}'s parameters to every rank."
        yield "all-gather", (layer,), caption, [*before, ("parameters", layer, True)]
        yield "forward", (layer,), f"Layer {layer} goes forward.", []
    caption = "The forward pass is over, and no layer is there in full."
    yield "free", LAYERS[-1:], caption, [("parameters", LAYERS[-1], False)]
    for layer in reversed(LAYERS):
        caption = f"The backward pass needs layer {layer}'s parameters again: another all-gather."
        yield "all-gather", (layer,), caption, [("parameters", layer, True)]
        caption = f"Layer {layer} goes backward. For a moment its gradients are there in full."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
        caption = (
            f"A reduce-scatter: each rank keeps the sum for its own part of layer {layer}, and frees the rest of it."
        )
        yield "reduce-scatter", (layer,), caption, [("gradients", layer, False), ("parameters", layer, False)]
    caption = "Each rank updates its own part. No all-gather follows: the next forward pass will gather."
    yield "update", LAYERS, caption, [("gradients", layer, None) for layer in LAYERS]


def _step_frame(moment: Moment, ranks: int) -> Canvas:
    canvas = Canvas(640, 424)
    gap = 46
    each = (504 - gap * (ranks - 1)) / ranks
    unit = each / memory.ADAM.total
    for rank in range(ranks):
        canvas.text(124 + rank * (each + gap) + each / 2, 20, f"rank {rank}", bold=True, size=20)
    for layer in LAYERS:
        y = 44 + 78 * (layer - 1)
        active = layer in moment.layers
        fill = DONE.get(moment.does, "none") if active else "none"
        canvas.box(12, y + 10, 92, 40, fill, f"layer {layer}", size=20)
        for rank in range(ranks):
            x = 124 + rank * (each + gap)
            states(canvas, x, y, unit, 60, ranks, {kind: moment.held[rank, layer, kind] for kind in SINCE})
            if layer in moment.summed and ranks <= 3:  # with more ranks a part is too low for a letter
                middle = y + 60 / ranks * (rank + 0.5)
                canvas.text(x + 3 * unit, middle, "Σ", fill=ink_on(KEPT["gradients"]), bold=True)
            if active and moment.does in _MOVED and rank < ranks - 1:
                canvas.arrow([(x + each + 5, y + 30), (x + each + gap - 5, y + 30)], _TALK, both=True)
    heading = f"{moment.does}: {_MOVED[moment.does]}" if moment.does in _MOVED else moment.does
    canvas.text(124, 296, heading or "before the step", "start", bold=True, size=20)
    canvas.text(12, 332, f"each rank holds {moment.bytes_each:.3g} bytes for each parameter", "start")
    sent = f"and has sent {_psi(moment.sent)} numbers" if moment.sent else "and has sent nothing yet"
    canvas.text(12, 362, sent, "start")
    legend(canvas, 12, 402, KEPT_OF_MODEL)
    if moment.summed and ranks <= 3:
        canvas.text(628, 362, "Σ summed over ranks", "end")
    return canvas


@drawing(354)
def zero3_or_tensor_parallel(canvas: Canvas) -> None:
    """What rank 0 of four multiplies. Under ZeRO-3 it gathers the matrix's other three quarters and multiplies its own
    samples with all of it. Under tensor parallelism all ranks have the same samples, and it multiplies them with its
    quarter alone: a quarter of the arithmetic, and of the outputs."""
    kept, gathered = KEPT["parameters"], SHADES["gathered parameters"]
    wide, high = 128, 96
    rows = (
        ("ZeRO-3: gather, then its own samples, all features", RANKS[0], ("its own", "samples"),
         [kept, gathered, gathered, gathered], [RANKS[0]] * 4, ("all its", "outputs")),
        ("tensor parallel: all ranks' samples, its own features", WHOLE, ("all ranks'", "samples"),
         [kept], [WHOLE], ("a quarter of", "the outputs")),
    )  # fmt: skip
    for number, (title, samples, whose, matrix, output, made) in enumerate(rows):
        y = 44 + 154 * number
        canvas.text(12, y - 22, title, "start", bold=True)
        canvas.box(12, y, wide, high, samples)
        canvas.lines(12 + wide / 2, y + high / 2 - 12, whose, fill=ink_on(samples))
        for x, sign, strips in ((190, "×", matrix), (368, "=", output)):
            canvas.text(x - 26, y + high / 2, sign, size=26)
            if len(strips) < 4:  # those that are missing are a dashed frame
                canvas.box(x, y, wide, high, thick=1, dashed=True)
            for part, fill in enumerate(strips):
                canvas.boxes([(x + part * wide / 4, y, wide / 4, high)], fill)
        canvas.lines(512, y + high / 2 - 12, made, "start")
    legend(canvas, 12, 334, {"rank 0's shard": kept, "gathered, then freed": gathered}, gap=16)
