"""What ranks send instead of a whole gradient: 8-bit numbers, two thin matrices, or a whole gradient less often."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, ink_on

_GRADIENT, _TOP, _HIGH = KEPT["gradients"], 66, 190  # the matrix's height


def sent_instead(rows: int, columns: int, directions: int, every: int) -> Drawing:
    """Four ways to exchange a gradient of rows × columns numbers of 4 bytes; areas are in proportion to a step's bytes.

    Args:
        directions: columns of PowerSGD's two factors. every: steps between two exchanges of the last way.

    Raises:
        ValueError: a matrix whose parts would not be readable: one side twice the other, or too many directions.
    """
    if not 0.5 < columns / rows < 2 or directions * 4 > min(rows, columns):
        raise ValueError(f"{rows} × {columns} numbers by {directions} directions cannot be drawn")
    unit = min(_HIGH / rows, 156 / columns)  # of a number of 4 bytes, each way
    high, wide, thin = rows * unit, columns * unit, directions * unit
    whole = 4 * rows * columns
    ways = {
        "each step": (96, whole, "4 bytes each"),
        "int8": (246, whole / 4, "1 byte each"),
        "PowerSGD": (396, 4 * directions * (rows + columns), "P and Qᵀ"),
        f"every {every} steps": (548, whole / every, f"1/{every} a step"),
    }
    canvas = Canvas(640, _TOP + high + 68)
    for name, (middle, nbytes, note) in ways.items():
        canvas.text(middle, 16, name, size=20, bold=True)
        canvas.text(middle, _TOP + high + 22, f"{nbytes / 1e3:.3g} kB", size=20)
        canvas.text(middle, _TOP + high + 48, note, size=18)
    canvas.box(96 - wide / 2, _TOP, wide, high, _GRADIENT)
    canvas.text(96, _TOP + high / 2 - 14, "M", size=24, fill=ink_on(_GRADIENT))
    canvas.text(96, _TOP + high / 2 + 16, f"{rows} × {columns}", size=18, fill=ink_on(_GRADIENT))
    canvas.box(246 - wide / 8, _TOP, wide / 4, high, _GRADIENT)
    left = 396 - (wide + thin + 26) / 2
    canvas.box(left, _TOP, thin, high, _GRADIENT, thick=1)
    canvas.text(left + thin + 13, _TOP + high / 2, "·", size=24)
    canvas.box(left + thin + 26, _TOP + high / 2 - thin / 2, wide, thin, _GRADIENT, thick=1)
    canvas.box(548 - wide / every / 2, _TOP, wide / every, high, _GRADIENT)
    canvas.text(left + thin / 2, _TOP - 18, "P", size=20)
    canvas.text(left + thin + 26 + wide / 2, _TOP + high / 2 - 24, "Qᵀ", size=20)
    values_text = ", ".join(f"{name} {nbytes / 1e3:.3g} kB" for name, (_, nbytes, _) in ways.items())
    return Drawing(
        canvas,
        f"What is exchanged of a gradient M of {rows} × {columns} numbers in a step, areas to scale: {values_text}. "
        f"In 8 bits a number has one byte, not four; PowerSGD sends P, {directions} columns, and Qᵀ, {directions} "
        f"rows; the last way sends as much as M, but in one step of {every}.",
    )
