"""The tensors that a block keeps for its backward pass, and which of them tensor parallelism cuts."""

from collections.abc import Callable
from typing import NamedTuple

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import RANKS, WHOLE


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
_LEFT, _BYTE, _SCORES, _HIGH, _STEP = 164, 24, 140, 26, 34


def block_activations() -> Drawing:
    """A bar of bytes for each tensor that a block keeps: white where both ranks keep all of it, coloured where cut."""
    whole = sum(step.plain for step in STEPS if not step.cut)
    cut = sum(step.plain for step in STEPS if step.cut)
    scores = sum(step.scores for step in STEPS)
    canvas = Canvas(640, 30 + _STEP * len(STEPS) + 92)
    canvas.text(_LEFT, 14, "kept, bytes / sbh", size=18, anchor="start")
    for number, step in enumerate(STEPS):
        y = 34 + _STEP * number
        canvas.text(_LEFT - 12, y + _HIGH / 2, step.name, size=18, anchor="end")
        width = _BYTE * step.plain + _SCORES * step.scores
        _bar(canvas, y, width, step.cut)
        canvas.text(_LEFT + width + 10, y + _HIGH / 2, _amount_text(step), size=18, anchor="start")
    y = 34 + _STEP * len(STEPS) + 22
    legend_rows: tuple[tuple[str, Callable[[float], None]], ...] = (
        (f"white: {whole} in all, whole on both ranks", lambda at: canvas.box(12, at - 10, 40, 20, WHOLE)),
        (
            f"coloured: cut; {cut} in all, and {scores}as/h, drawn shortened",
            lambda at: _halves(canvas, 12, at - 10, 40, 20),
        ),
    )
    for line, (text, draw) in enumerate(legend_rows):
        draw(y + 32 * line)
        canvas.text(64, y + 32 * line, text, size=18, anchor="start")
    return Drawing(
        canvas,
        f"What each step of a transformer block keeps on two tensor-parallel ranks. The inputs of norms and of layers "
        f"cut by columns and two dropout masks, {whole} bytes for each number of the block's input, are whole on both; "
        f"{cut} bytes and the attention's scores, {scores}as/h, are cut.",
    )


def _bar(canvas: Canvas, y: float, width: float, cut: bool) -> None:
    if cut:
        _halves(canvas, _LEFT, y, width, _HIGH)
    else:
        canvas.box(_LEFT, y, width, _HIGH, WHOLE)


def _halves(canvas: Canvas, x: float, y: float, width: float, height: float) -> None:
    for rank in range(2):
        canvas.boxes([(x + rank * width / 2, y, width / 2, height)], RANKS[rank])


def _amount_text(step: BlockStep) -> str:
    times = "" if step.scores == 1 else str(step.scores)
    parts = [str(step.plain)] if step.plain else []
    return " + ".join(parts + ([f"{times}as/h"] if step.scores else []))
