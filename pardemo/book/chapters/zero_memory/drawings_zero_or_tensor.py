"""The same shard of a matrix used in two ways: ZeRO-3 gathers it, tensor parallelism multiplies with it as it is."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, RANKS, SHADES, WHOLE, ink_on
from pardemo.draw.parts import legend

_HIGH, _WIDE, _PARTS = 96, 128, 4


def zero3_or_tensor_parallel() -> Drawing:
    """What rank 0 of four multiplies in a layer of which it keeps a quarter."""
    canvas = Canvas(640, 354)
    own, gathered = KEPT["parameters"], SHADES["gathered parameters"]
    rows = (
        ("ZeRO-3: gather, then its own samples, all features", RANKS[0],
         {0: own, 1: gathered, 2: gathered, 3: gathered}, dict.fromkeys(range(_PARTS), RANKS[0])),
        ("tensor parallel: all ranks' samples, its own features", WHOLE, {0: own}, {0: WHOLE}),
    )  # fmt: skip
    for number, (title, samples, matrix, output) in enumerate(rows):
        y = 44 + 154 * number
        canvas.text(12, y - 22, title, size=18, anchor="start", bold=True)
        canvas.box(12, y, _WIDE, _HIGH, samples)
        whose = "its own" if len(output) == _PARTS else "all ranks'"
        canvas.lines(12 + _WIDE / 2, y + _HIGH / 2 - 12, (whose, "samples"), size=18, fill=ink_on(samples))
        canvas.text(164, y + _HIGH / 2, "×", size=26)
        _strips(canvas, 190, y, matrix)
        canvas.text(342, y + _HIGH / 2, "=", size=26)
        _strips(canvas, 368, y, output)
        label = ("all its", "outputs") if len(output) == _PARTS else ("a quarter of", "the outputs")
        canvas.lines(512, y + _HIGH / 2 - 12, label, size=18, anchor="start")
    legend(canvas, 12, 334, {"rank 0's shard": own, "gathered, then freed": gathered}, gap=16)
    return Drawing(
        canvas,
        "What rank 0 of four multiplies. Under ZeRO-3 it gathers the matrix's other three quarters and multiplies its "
        "own samples with all of it. Under tensor parallelism all ranks have the same samples, and it multiplies them "
        "with its quarter alone: a quarter of the arithmetic, and of the outputs.",
    )


def _strips(canvas: Canvas, x: float, y: float, strips: dict[int, str]) -> None:
    """A matrix of four strips side by side; those that are missing are a dashed frame.

    Args:
        strips: number of a strip -> its colour.
    """
    if len(strips) < _PARTS:
        canvas.box(x, y, _WIDE, _HIGH, thick=1, dashed=True)
    for part, fill in strips.items():
        canvas.boxes([(x + part * _WIDE / _PARTS, y, _WIDE / _PARTS, _HIGH)], fill)
