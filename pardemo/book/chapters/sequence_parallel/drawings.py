"""Sequence parallelism: what a block keeps, what is whole on every rank, and three ways to cut a sequence."""

from typing import NamedTuple

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE
from pardemo.draw.parts import half_of, legend

#: A block from its input on: a tensor (its cut, what is computed, a note) or a collective.
BLOCK = (
    ("tokens", "x, norm", "cut by tokens"),
    "all-gather",
    ("whole", "into query, key, value", "all tokens on both"),
    ("columns", "attention, output", "its own heads only"),
    "reduce-scatter",
    ("tokens", "dropout, add, norm", "cut by tokens"),
    "all-gather",
    ("whole", "into the MLP", "all tokens on both"),
    ("columns", "GeLU, second matrix", "its own columns only"),
    "reduce-scatter",
    ("tokens", "dropout, add", "cut by tokens"),
)
_TALK = DONE["communication"]


@drawing(788)
def sequence_parallel(canvas: Canvas) -> None:
    """A transformer block on two ranks under sequence parallelism. Norms, dropouts and additions work on half the
    tokens; an all-gather puts all tokens together before attention and MLP, which are cut by heads and columns, and a
    reduce-scatter sums their results and cuts by tokens again."""
    lefts, wide, row = (300, 478), 146, 14  # row: of a token
    for rank, x in enumerate(lefts):
        canvas.text(x + wide / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for step in BLOCK:
        if isinstance(step, str):
            canvas.box(300, y, 324, 32, _TALK, step, size=20)
            y += 42
            continue
        cut, name, note = step
        canvas.text(20, y + 17, name, "start", bold=True, size=20)
        canvas.text(20, y + 43, note, "start")
        for rank, x in enumerate(lefts):  # its own part is coloured, the rest is empty
            if cut == "columns":
                half = wide / 2
                canvas.boxes([(x + rank * half, y + k * row, half, row) for k in range(4)], RANKS[rank])
            for token, owner in enumerate((0, 0, 1, 1)):
                if cut == "whole" or (cut == "tokens" and owner == rank):
                    canvas.boxes([(x, y + token * row, wide, row)], RANKS[owner])
            if cut != "whole":
                canvas.box(x, y, wide, 4 * row, thick=1, dashed=True)
        y += 66
    canvas.text(20, y + 16, "down: tokens; across: features; colour: the rank it comes from", "start")
    canvas.text(20, y + 50, "Backward goes from the bottom up: an all-gather becomes", "start")
    canvas.text(20, y + 74, "a reduce-scatter, and the reverse.", "start")


class BlockStep(NamedTuple):
    """A step of a block.

    Attributes:
        plain: bytes / sbh that it keeps, but for scores. scores: those of the attention's scores, over a·s/h.
        cut: whether tensor parallelism cuts what it keeps.
    """

    name: str
    plain: int
    scores: int
    cut: bool


#: Korthikanti et al. 2022 (arXiv 2205.05198, 4.1 and 4.2.1), in 16 bits.
STEPS = (
    BlockStep("norm 1", 2, 0, False),
    BlockStep("in projection", 2, 0, False),
    BlockStep("queries × keys", 4, 0, True),
    BlockStep("softmax", 0, 2, True),
    BlockStep("its dropout", 0, 1, True),
    BlockStep("× values", 2, 2, True),
    BlockStep("out projection", 2, 0, True),
    BlockStep("dropout 1", 1, 0, False),
    BlockStep("norm 2", 2, 0, False),
    BlockStep("first matrix", 2, 0, False),
    BlockStep("GeLU", 8, 0, True),
    BlockStep("second matrix", 8, 0, True),
    BlockStep("dropout 2", 1, 0, False),
)


@drawing(564)
def block_activations(canvas: Canvas) -> str:
    """A bar of bytes for each tensor that a block keeps: white where both ranks keep all of it, coloured where cut."""
    left, high = 164, 26
    kept = sum(step.plain for step in STEPS if not step.cut)
    cut = sum(step.plain for step in STEPS if step.cut)
    scores = sum(step.scores for step in STEPS)
    bars = [(left, 34 + 34 * n, 24 * step.plain + 140 * step.scores, high, step.cut) for n, step in enumerate(STEPS)]
    bars += [(12, 488, 40, 20, False), (12, 520, 40, 20, True)]  # of the legend
    for x, y, wide, tall, is_cut in bars:
        halves = [(x, y, wide / 2, tall), (x + wide / 2, y, wide / 2, tall)]
        if is_cut:
            for half, colour in zip(halves, RANKS, strict=False):
                canvas.boxes([half], colour)
        else:
            canvas.box(x, y, wide, tall, WHOLE)
    canvas.text(left, 14, "kept, bytes / sbh", "start")
    for step, (_, y, wide, *_) in zip(STEPS, bars, strict=False):
        amounts = [str(step.plain)] * (step.plain > 0) + ["as/h", "2as/h"][step.scores - 1 : step.scores]
        canvas.text(left - 12, y + high / 2, step.name, "end")
        canvas.text(left + wide + 10, y + high / 2, " + ".join(amounts), "start")
    canvas.text(64, 498, f"white: {kept} in all, whole on both ranks", "start")
    canvas.text(64, 530, f"coloured: cut; {cut} in all, and {scores}as/h, drawn shortened", "start")
    return (
        f"What each step of a transformer block keeps on two tensor-parallel ranks. The inputs of norms and of layers "
        f"cut by columns and two dropout masks, {kept} bytes for each number of the block's input, are whole on both; "
        f"{cut} bytes and the attention's scores, {scores}as/h, are cut."
    )


@drawing(396)
def sequence_cuts(canvas: Canvas) -> None:
    """Between the layers all three cut the tokens. Megatron's sequence parallelism gathers all tokens before attention,
    which is cut by heads; context parallelism leaves queries cut by tokens, and keys and values go round a ring;
    Ulysses swaps tokens for heads by an all-to-all. The last two have whole weights."""
    for x, words in ((202, "between layers"), (450, "in attention"), (580, "weights")):
        canvas.text(x, 18, words, bold=True)
    ways = (  # what is sent before attention, how attention is cut, whether a rank's weights are whole
        (("Megatron's", "(this chapter)"), "all-gather", "heads", "cut"),
        (("context", "parallelism"), "ring", "tokens", "whole"),
        (("Ulysses", "(DeepSpeed)"), "all-to-all", "heads", "whole"),
    )
    cell = 21
    for number, (name, talk, way, weights) in enumerate(ways):
        y = 44 + 104 * number
        canvas.lines(12, y + 30, name, "start")
        canvas.text(326, y + 24, talk, fill=_TALK, bold=True)
        canvas.arrow([(256, y + 46), (396, y + 46)], _TALK)
        canvas.text(580, y + 42, weights)
        for left, cut in ((160, "tokens"), (408, way)):
            for rank in range(2):
                places = [(i, 2 * rank + k) for i in range(4) for k in range(2)]
                places = places if cut == "tokens" else [(k, i) for i, k in places]
                cells = [(left + across * cell, y + down * cell, cell, cell) for across, down in places]
                canvas.boxes(cells, RANKS[rank], thick=0.8)
    canvas.text(12, 374, "down: tokens; across: heads", "start")
    legend(canvas, 400, 374, {f"rank {rank}": RANKS[rank] for rank in range(2)})


@drawing(420)
def still_whole(canvas: Canvas) -> None:
    """A transformer block on two tensor-parallel ranks. Attention and MLP are cut: each rank has a half. The norms,
    dropouts and additions before, between and after them are whole on both ranks, all tokens with all features."""
    lefts, wide = (310, 482), 146
    shape = "[b·s, h] on every rank"
    steps = {"norm": shape, "attention": "cut by heads", "dropout, addition, norm": shape,
             "MLP": "cut by columns, then rows", "dropout, addition": shape}  # fmt: skip
    for rank, x in enumerate(lefts):
        canvas.text(x + wide / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for name, note in steps.items():
        high = 44 if note == shape else 60
        middle = y + high / 2
        canvas.text(20, middle - 11, name, "start", bold=True, size=20)
        canvas.text(20, middle + 13, note, "start")
        for rank, x in enumerate(lefts):
            if note == shape:
                canvas.box(x, y, wide, high, WHOLE, "all of it")
            else:
                half_of(canvas, x, y, wide, high, rank)
        y += high + 18
    legend(canvas, 310, y + 14, {"whole on both": WHOLE})
