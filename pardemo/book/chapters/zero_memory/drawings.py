"""Model states in bytes, on each rank under ZeRO, by the number of GPUs, and over a step."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, SHADES, VERDICTS, WHOLE, ink_on
from pardemo.draw.parts import legend, parts, unbroken
from pardemo.draw.player import Player
from pardemo.formulas import memory

#: From which of ZeRO-1, ZeRO-2 and ZeRO-3 on a kind of state is in shards.
SINCE = {"parameters": 3, "gradients": 2, "optimizer states": 1}
_FORMULAS = ("2 + 2 + 12", "2 + 2 + 12/N", "2 + (2 + 12)/N", "(2 + 2 + 12)/N")
_NAMES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_HIGH = 60


@drawing(520)
def zero_stages(canvas: Canvas, ranks: int = 4, totals: bool = True) -> str:
    """The model states of mixed-precision Adam on each rank: areas are bytes, rows are the model's N parts.

    Args:
        ranks: N, from 2 to 6.
        totals: with the bytes of each rank as numbers beside the boxes; without, they are left to the reader's guess.

    Raises:
        ValueError: another number of ranks: the drawing would not be readable.
    """
    if not 2 <= ranks <= 6:
        raise ValueError(f"ZeRO on 2 to 6 ranks can be drawn, not on {ranks}")
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
        canvas.text(left, y - 17, _NAMES[stage], "start", bold=True, size=20)
        canvas.text(left + 94, y - 17, _caption(stage), "start")
        for rank in range(ranks):
            x = left + rank * (each + gap)
            for kind, nbytes in zip(SINCE, memory.ADAM, strict=True):
                shown_parts = range(ranks) if stage < SINCE[kind] else [rank]
                parts(canvas, x, y, nbytes * unit, _HIGH, ranks, shown_parts, KEPT[kind])
                x += nbytes * unit
        # of as many parameters as ranks: shares are whole
        bytes_each.append(memory.model_states_bytes(ranks, ranks, stage) / ranks)
        if totals:
            canvas.text(470, y + 15, _FORMULAS[stage], "start")
            canvas.text(470, y + 43, f"= {bytes_each[-1]:.3g}", "start", size=22, bold=True)
    legend(canvas, left, 462, {name: KEPT[name] for name in ("parameters", "gradients", "optimizer states")})
    canvas.text(left, 496, f"widths are bytes; rows are the model's {ranks} parts", "start")
    numbers = f": {', '.join(f'{nbytes:.3g}' for nbytes in bytes_each)}" if totals else ""
    return (
        f"Bytes for each parameter on each of {ranks} ranks, in plain data parallelism and under ZeRO-1, ZeRO-2 and "
        f"ZeRO-3{numbers}. ZeRO-1 cuts the optimizer states, ZeRO-2 the gradients too, ZeRO-3 the parameters too."
    )


def _caption(stage: int) -> str:
    return (
        "every rank keeps all",
        "optimizer states are cut",
        "gradients too",
        "parameters too",
    )[stage]


#: name, bytes, kind, who reads it
_SIXTEEN = (
    ("parameter, bf16", 2, "parameters", "forward and backward"),
    ("gradient, bf16", 2, "gradients", "backward, then Adam"),
    ("parameter, fp32", 4, "optimizer states", "Adam, once a step"),
    ("momentum, fp32", 4, "optimizer states", "Adam, once a step"),
    ("variance, fp32", 4, "optimizer states", "Adam, once a step"),
)
KEPT_OF_MODEL = {kind: KEPT[kind] for kind in ("parameters", "gradients", "optimizer states")}
_STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_RANKS = tuple(2**k for k in range(11))


@drawing(312)
def sixteen_bytes(canvas: Canvas) -> str:
    """One parameter in mixed precision: a box for each byte, a row for each tensor, and who reads it when."""
    byte, left, row = 44, 186, 52
    for number, (name, nbytes, kind, read) in enumerate(_SIXTEEN):
        y = 10 + row * number
        canvas.text(left - 12, y + 19, name, "end")
        canvas.boxes([(left + byte * k, y, byte, 38) for k in range(nbytes)], KEPT[kind])
        canvas.text(left + byte * nbytes + 14, y + 19, read, "start")
    y = 10 + row * len(_SIXTEEN) + 14
    total = sum(nbytes for _, nbytes, _, _ in _SIXTEEN)
    canvas.text(left - 12, y, f"all: {total} bytes", "end", size=20, bold=True)
    canvas.text(left, y, "12 of them are Adam's alone: K = 12", "start")
    tensors_text = "; ".join(f"{name}: {nbytes} bytes, read by {read}" for name, nbytes, _, read in _SIXTEEN)
    return f"The {total} bytes of one parameter. {tensors_text}."


def states_by_ranks(billions: float = 7.5, room: float = 85, start: int = 64) -> Player:
    """Bars of GB on a GPU, plain and under ZeRO-1, 2 and 3; each frame has twice as many GPUs as the one before.

    Args:
        billions: Ψ, in 10⁹ parameters. room: GB of a GPU, red marks. start: the number of GPUs shown first.

    Raises:
        ValueError: a number of GPUs that is none of the frames.
    """
    if start not in _RANKS:
        raise ValueError(f"the frames have 1, 2, 4, … {_RANKS[-1]} GPUs, not {start}")
    frames = [_frame(billions, room, ranks) for ranks in _RANKS]
    return Player(
        frames,
        f"model states of {billions:g}·10⁹ parameters by GPUs, plain and under ZeRO-1, 2 and 3",
        _RANKS.index(start),
    )


def _frame(billions: float, room: float, ranks: int) -> tuple[Canvas, str]:
    canvas = Canvas(640, 290)
    left, most = 108, memory.ADAM.total * billions
    scale = 430 / most
    params = round(billions * 1e9)
    canvas.text(8, 18, f"Ψ = {billions:g}·10⁹, N = {ranks:,}", "start", bold=True, size=20)
    totals = []
    for stage in memory.STAGES:
        y, x = 46 + 50 * stage, left
        kinds = {kind: nbytes / 1e9 for kind, nbytes in memory.model_states(params, ranks, stage).items()}
        canvas.text(left - 10, y + 18, _STAGES[stage], "end")
        for kind, gigabytes in kinds.items():
            canvas.box(x, y, gigabytes * scale, 36, KEPT[kind], thick=1)
            x += gigabytes * scale
        totals.append(sum(kinds.values()))
        label = f"{totals[-1]:.1f} GB" if totals[-1] >= 10 else f"{totals[-1]:.3g} GB"
        canvas.text(x + 8, y + 18, label, "start", bold=totals[-1] <= room)
        if room <= most:  # between the bars, where no text is
            canvas.line([(left + room * scale, y - 12), (left + room * scale, y - 2)], VERDICTS["fails"], 3)
    if room <= most:
        canvas.line([(left + room * scale, 234), (left + room * scale, 244)], VERDICTS["fails"], 3)
        canvas.line([(556, 260), (556, 276)], VERDICTS["fails"], 3)
        canvas.text(564, 268, f"{room:g} GB", "start")
    legend(canvas, 8, 268, KEPT_OF_MODEL, gap=16)
    fits = [name for name, total in zip(_STAGES, totals, strict=True) if total <= room]
    gigabytes_by_stage = ", ".join(f"{total:.3g}" for total in totals)
    ways = "plain data parallelism, ZeRO-1, ZeRO-2 and ZeRO-3"
    caption = f"On {ranks:,} GPU{'s' * (ranks > 1)}, {ways} keep {gigabytes_by_stage} GB on each. "
    return canvas, caption + (
        f"These fit into {room:g} GB: {', '.join(fits)}." if fits else f"None of them fits into {room:g} GB."
    )


LAYERS = (1, 2, 3)
_TALK = DONE["communication"]
_MARKED = 3  # with more ranks a part is too low for a letter
_STEP_NAMES = {"all-gather": "parameters", "reduce-scatter": "gradients"}


@dataclass
class Moment:
    """What each rank holds after an event of the step.

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
        stage: 1, 2 or 3, for ZeRO-1, ZeRO-2 and ZeRO-3.
        ranks: N, from 2 to 4.

    Raises:
        ValueError: another number of ZeRO, or of ranks.
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
    if not 2 <= ranks <= 4:
        raise ValueError(f"a step of 2 to 4 ranks can be drawn, not of {ranks}")
    caption = f"Between two steps each rank keeps {_CUT[stage]}. Ψ is the number of all parameters."
    course = [Moment(ranks, caption=caption)]
    for kind, since in SINCE.items():
        for layer in LAYERS:
            course[0].keep(kind, layer, None if kind == "gradients" else stage < since)
    for does, layers, caption, changes in _STEP_STAGES[stage]():
        moment = deepcopy(course[-1])
        moment.does, moment.layers, moment.caption = does, layers, caption
        for kind, layer, all_parts in changes:
            moment.keep(kind, layer, all_parts)
        moment.sent += len(layers) / len(LAYERS) * (does in _STEP_NAMES)
        if does == "reduce-scatter":
            moment.summed |= set(layers)
        elif does == "update":
            moment.summed.clear()
        course.append(moment)
    course[-1].caption += f" In all, each rank has sent {_psi(course[-1].sent)} numbers."
    return course


def _psi(sent: float) -> str:
    """``1⅓ Ψ(N − 1)/N``: what has been sent comes in thirds, a layer's each."""
    whole, thirds = divmod(round(sent * len(LAYERS)), len(LAYERS))
    count = (str(whole) if whole else "") + ("", "⅓", "⅔")[thirds]
    return unbroken(f"{'' if count == '1' else count + ' '}Ψ(N − 1)/N")


#: (what happens, to which layers, in words, [(kind, layer, all parts)])
Event = tuple[str, tuple[int, ...], str, list[tuple[str, int, bool | None]]]
_CUT = {
    1: "all parameters, but only its own part of the optimizer states",
    2: "all parameters, but only its own part of the optimizer states",
    3: "only its own part of everything",
}


def _forward() -> Iterator[Event]:
    for layer in LAYERS:
        yield "forward", (layer,), f"Layer {layer} goes forward. Every rank has all its parameters.", []


def _stage_1() -> Iterator[Event]:
    yield from _forward()
    for layer in reversed(LAYERS):
        caption = f"Layer {layer} goes backward, and its gradients stay on every rank."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
    caption = (
        "A reduce-scatter gives each rank the sum over all ranks for its own part, Σ. Its whole gradients stay as well."
    )
    yield "reduce-scatter", LAYERS, caption, []
    yield from _update_and_gather()


def _stage_2() -> Iterator[Event]:
    yield from _forward()
    for layer in reversed(LAYERS):
        caption = f"Layer {layer} goes backward. For a moment its gradients are there in full."
        yield "backward", (layer,), caption, [("gradients", layer, True)]
        caption = f"A reduce-scatter: each rank keeps the sum for its own part of layer {layer}, and frees the rest."
        yield "reduce-scatter", (layer,), caption, [("gradients", layer, False)]
    yield from _update_and_gather()


def _update_and_gather() -> Iterator[Event]:
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
    yield (
        "free",
        LAYERS[-1:],
        "The forward pass is over, and no layer is there in full.",
        [("parameters", LAYERS[-1], False)],
    )
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


_STEP_STAGES = {1: _stage_1, 2: _stage_2, 3: _stage_3}


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
            for kind, nbytes in zip(SINCE, memory.ADAM, strict=True):
                parts(canvas, x, y, nbytes * unit, 60, ranks, moment.held[rank, layer, kind], KEPT[kind])
                x += nbytes * unit
            if layer in moment.summed and ranks <= _MARKED:
                _mark_sum(canvas, 124 + rank * (each + gap) + 3 * unit, y, rank, ranks)
            if active and moment.does in _STEP_NAMES and rank < ranks - 1:
                canvas.arrow([(x + 5, y + 30), (x + gap - 5, y + 30)], _TALK, both=True)
    heading = f"{moment.does}: {_STEP_NAMES[moment.does]}" if moment.does in _STEP_NAMES else moment.does
    canvas.text(124, 296, heading or "before the step", "start", bold=True, size=20)
    canvas.text(12, 332, f"each rank holds {moment.bytes_each:.3g} bytes for each parameter", "start")
    sent = f"and has sent {_psi(moment.sent)} numbers" if moment.sent else "and has sent nothing yet"
    canvas.text(12, 362, sent, "start")
    legend(canvas, 12, 402, {name: KEPT[name] for name in SINCE})
    if moment.summed and ranks <= _MARKED:
        canvas.text(628, 362, "Σ summed over ranks", "end")
    return canvas


def _mark_sum(canvas: Canvas, x: float, y: float, rank: int, ranks: int) -> None:
    """A Σ on a rank's own part of a layer's gradients, ``x`` their middle: what it holds there is the ranks' sum."""
    canvas.text(x, y + 60 / ranks * (rank + 0.5), "Σ", fill=ink_on(KEPT["gradients"]), bold=True)


_FLAT, _WIDE, _PARTS = 96, 128, 4


@drawing(354)
def zero3_or_tensor_parallel(canvas: Canvas) -> None:
    """What rank 0 of four multiplies. Under ZeRO-3 it gathers the matrix's other three quarters and multiplies its own
    samples with all of it. Under tensor parallelism all ranks have the same samples, and it multiplies them with its
    quarter alone: a quarter of the arithmetic, and of the outputs."""
    own, gathered = KEPT["parameters"], SHADES["gathered parameters"]
    rows = (
        ("ZeRO-3: gather, then its own samples, all features", RANKS[0],
         {0: own, 1: gathered, 2: gathered, 3: gathered}, dict.fromkeys(range(_PARTS), RANKS[0])),
        ("tensor parallel: all ranks' samples, its own features", WHOLE, {0: own}, {0: WHOLE}),
    )  # fmt: skip
    for number, (title, samples, matrix, output) in enumerate(rows):
        y = 44 + 154 * number
        canvas.text(12, y - 22, title, "start", bold=True)
        canvas.box(12, y, _WIDE, _FLAT, samples)
        whose = "its own" if len(output) == _PARTS else "all ranks'"
        canvas.lines(12 + _WIDE / 2, y + _FLAT / 2 - 12, (whose, "samples"), size=18, fill=ink_on(samples))
        canvas.text(164, y + _FLAT / 2, "×", size=26)
        _strips(canvas, 190, y, matrix)
        canvas.text(342, y + _FLAT / 2, "=", size=26)
        _strips(canvas, 368, y, output)
        label = ("all its", "outputs") if len(output) == _PARTS else ("a quarter of", "the outputs")
        canvas.lines(512, y + _FLAT / 2 - 12, label, "start", size=18)
    legend(canvas, 12, 334, {"rank 0's shard": own, "gathered, then freed": gathered}, gap=16)


def _strips(canvas: Canvas, x: float, y: float, strips: dict[int, str]) -> None:
    """A matrix of four strips side by side; those that are missing are a dashed frame.

    Args:
        strips: number of a strip -> its colour.
    """
    if len(strips) < _PARTS:
        canvas.box(x, y, _WIDE, _FLAT, thick=1, dashed=True)
    for part, fill in strips.items():
        canvas.boxes([(x + part * _WIDE / _PARTS, y, _WIDE / _PARTS, _FLAT)], fill)
