"""The plan of Baichuan2-13B: its states against a GPU, a layer's matrices to scale, an epoch's steps, a micro-batch."""

from collections.abc import Mapping

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import KEPT, OTHER, SHADES, VERDICTS, WHOLE
from pardemo.draw.parts import legend
from pardemo.draw.player import Player
from pardemo.formulas import memory

#: Baichuan2-13B, what LoRA of rank 8 on W_pack trains of it, and an A800's bytes.
PARAMS, TRAINED, ROOM = 13_896_668_160, 6_553_600, 79.33 * 2**30
_GB = 2.7e-9  # units of the drawing for a byte


@drawing(372)
def states_and_gpu(canvas: Canvas) -> None:
    """Model states of Baichuan2-13B to scale: 222 GB if all parameters are trained, 52 GB on each of eight GPUs under
    ZeRO-2, 28 GB with LoRA; an A800 has 85 GB. What a step itself needs comes on top and is not yet known."""
    canvas.text(10 + ROOM * _GB, 16, "an A800 is full: 85 GB")
    every = memory.model_states(PARAMS, 1, 0)
    shared = memory.model_states(PARAMS, 8, 2)
    frozen = {"frozen parameters": 2 * PARAMS} | memory.model_states(TRAINED, 8, 2)
    _states(canvas, 34, "all parameters trained, 16 bytes each", every, "")
    _states(canvas, 124, "the same, shared by 8 GPUs (ZeRO-2)", shared, "?")
    _states(canvas, 214, "LoRA", frozen, "?")
    colours = {kind: KEPT[kind] for kind in ("parameters", "gradients", "optimizer states")}
    canvas.text(10, 312, "? is what a step makes on top: how far does the arrow go?", "start")
    legend(canvas, 10, 346, colours | {"frozen": SHADES["frozen parameters"]}, gap=8)


def _states(canvas: Canvas, y: float, name: str, states: Mapping[str, float], more: str) -> None:
    total = sum(states.values())
    canvas.text(10, y + 12, f"{name}: {total / 1e9:.0f} GB", "start")
    x = 10.0
    for kind, nbytes in states.items():
        width = nbytes * _GB
        if width > 1:
            canvas.box(x, y + 28, width, 40, KEPT.get(kind) or SHADES[kind], thick=1)
        x += width
    if more:  # an arrow has no length of its own: nothing is said yet of how much it is
        canvas.line([(x + 4, y + 30), (x + 4, y + 66)], thick=2, dashed=True)
        canvas.arrow([(x + 6, y + 48), (x + 34, y + 48)], dashed=True)
        canvas.text(x + 46, y + 48, more, size=24, bold=True)
    edge = 10 + ROOM * _GB
    canvas.line([(edge, y + 24), (edge, y + 72)], VERDICTS["fails"], 3)


@drawing(500)
def gated_layer(canvas: Canvas) -> None:
    """A layer of Baichuan2-13B, its matrices to scale. Attention: W_pack, h by 3h, makes queries, keys and values; o is
    h by h. The gated MLP: gate and up, h by 13,696 each; SiLU of the one times the other; down, 13,696 by h. The three
    have 210 million parameters, attention 105 million."""
    fill, activations = SHADES["frozen parameters"], KEPT["activations"]
    hidden, middle = 60, 160.5  # 5,120 and 13,696 features
    for x, y in ((16, 48), (543, 48), (16, 272), (543, 272)):
        canvas.box(x, y, 14, hidden, activations)
        canvas.text(x + 7, y + 78, "h", size=20)
    canvas.text(10, 18, "attention: 4h² = 105 million", "start", bold=True)
    canvas.arrow([(34, 78), (62, 78)])
    canvas.box(65, 48, 3 * hidden, hidden, fill, "W_pack", size=20)
    canvas.text(155, 126, "h × 3h")
    canvas.arrow([(249, 78), (283, 78)])
    canvas.box(286, 54, 122, 48, "none", "q, k, v", size=20)
    canvas.arrow([(411, 78), (445, 78)])
    canvas.box(448, 48, hidden, hidden, fill, "o", size=20)
    canvas.text(478, 126, "h × h")
    canvas.arrow([(512, 78), (540, 78)])
    canvas.text(10, 172, "gated MLP: 3 · h · 13,696 = 210 million", "start", bold=True)
    for y, name in ((202, "gate"), (342, "up")):
        canvas.arrow([(34, 302), (48, 302), (48, y + 30), (62, y + 30)])
        canvas.box(65, y, middle, hidden, fill, name, size=20)
        canvas.text(65 + middle / 2, y + 78, "h × 13,696")
    canvas.arrow([(229, 232), (263, 232)])
    canvas.box(266, 208, 74, 48, "none", "SiLU", size=20)
    canvas.arrow([(343, 232), (370, 232), (370, 279)])
    canvas.arrow([(229, 372), (370, 372), (370, 325)])
    canvas.box(349, 282, 42, 40, "none", "×", size=26)
    canvas.arrow([(394, 302), (445, 302)])
    canvas.box(448, 302 - middle / 2, hidden, middle, fill, "down")
    canvas.text(478, 402, "13,696 × h")
    canvas.arrow([(512, 302), (540, 302)])
    canvas.text(10, 450, "× 40 layers, and two tables of 125,696 × h beside them:", "start")
    canvas.text(10, 474, "embedding and head, 644 million each", "start")


@drawing(222)
def epoch_of_steps(canvas: Canvas) -> None:
    """An epoch on one GPU: 10,000 samples are 1,250 micro-batches of 8; four make a step, so there are 312 steps and
    two micro-batches left over."""
    canvas.text(10, 18, "one epoch on one of 8 GPUs: 10,000 samples, 8 at a time", "start")
    x, each = 12.0, 34
    for name, count in (("step 1", 4), ("step 2", 4), ("…", 0), ("step 312", 4), ("½", 2)):
        width = count * each if count else 40
        for k in range(count):
            canvas.box(x + k * each, 52, each, 46, KEPT["activations"] if count == 4 else WHOLE, "8")
        if count:
            canvas.line([(x + 2, 108), (x + 2, 116), (x + width - 2, 116), (x + width - 2, 108)], thick=2)
        canvas.text(x + width / 2, *((136, name) if count else (75, name)), size=18 if count else 26)
        x += width + 8
    canvas.text(10, 174, "1,250 micro-batches = 312 · 4 + 2.", "start")
    canvas.text(10, 198, "Is the last half a step: kept, or dropped?", "start")


#: What a bar of :func:`memory_by_batch` is made of, from the left; all else is the program's.
_LINES = {
    "parameters": KEPT["parameters"],
    "frozen": SHADES["frozen parameters"],
    "gradients": KEPT["gradients"],
    "optimizer states": KEPT["optimizer states"],
    "activations": KEPT["activations"],
    "logits": SHADES["logits"],
    "temporaries and program": OTHER,
}


def memory_by_batch(
    ways: Mapping[str, Mapping[int, Mapping[str, float]]], capacity_bytes: float, start: int = 8
) -> Player:
    """A slider over the micro-batch: a GPU's peak, line by line, for each way to run the job.

    Args:
        ways: name -> micro-batch -> the planner's lines in bytes; all with the same micro-batches.
        capacity_bytes: what the GPU has. start: the micro-batch that is shown first.
    """
    batches = list(next(iter(ways.values())))
    frames = [_frame(batch, {name: way[batch] for name, way in ways.items()}, capacity_bytes) for batch in batches]
    return Player(frames, "GB of a GPU by micro-batch", start=batches.index(start))


def _frame(batch: int, bars: Mapping[str, Mapping[str, float]], capacity_bytes: float) -> tuple[Canvas, str]:
    canvas = Canvas(640, 62 + 84 * len(bars) + 66)
    unit, most, bar_texts = 4.0, 135, []  # the picture has room for so many GB
    edge = 10 + capacity_bytes / 1e9 * unit
    bottom = 44 + 84 * len(bars)
    canvas.text(10, 18, f"micro-batch {batch}", "start", size=22, bold=True)
    canvas.text(edge, 18, f"{capacity_bytes / 1e9:.1f} GB")
    for row, (name, lines) in enumerate(bars.items()):
        y, total = 44 + 84.0 * row, sum(lines.values()) / 1e9
        fits = total <= capacity_bytes / 1e9
        canvas.text(10, y + 12, name, "start")
        x = 10.0
        gigabytes_of = dict.fromkeys(_LINES, 0.0)
        for kind, nbytes in lines.items():
            name_of = kind.removesuffix(" parameters")
            gigabytes_of[name_of if name_of in _LINES else "temporaries and program"] += nbytes / 1e9
        for kind, gigabytes in gigabytes_of.items():
            width = min(gigabytes, max(0.0, most - (x - 10) / unit)) * unit
            if width > 0.8:
                canvas.box(x, y + 28, width, 38, _LINES[kind], thick=1)
            x += width
        number = f"{total:.0f}{'' if fits else ' ✗'}"
        canvas.text(x + 8, y + 47, number, "start", size=20, bold=not fits)
        bar_texts.append(f"{name} {total:.0f} GB{'' if fits else ', too much'}")
    for row in range(len(bars)):  # the line stops at the names, which it would cross
        canvas.line([(edge, 44 + 84 * row + 24), (edge, 44 + 84 * row + 70)], VERDICTS["fails"], 3)
    first = dict(list(_LINES.items())[:4])
    legend(canvas, 10, bottom + 18, first, gap=10)
    legend(canvas, 10, bottom + 50, {kind: colour for kind, colour in _LINES.items() if kind not in first}, gap=10)
    return canvas, f"Micro-batch {batch}: " + "; ".join(bar_texts) + "."
