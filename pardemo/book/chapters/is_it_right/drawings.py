"""The drawing of *Is it right?*: one step in one process and on ranks, and where the two can be compared."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, WHOLE

_BOX, _HIGH, _LEFT, _STEP = 126, 44, 4, 168
_PLACES = ("samples", "outputs", "gradients", "parameters")


@drawing(346)
def one_step_twice(canvas: Canvas) -> None:
    """One step of training in one process and on four ranks. Samples give outputs in the forward pass, outputs give
    gradients in the backward pass, and gradients change the parameters. Each of the four can be compared with the
    ranks' parts, put together. A curve of losses looks at the outputs alone, and at one number of them."""
    colours = (WHOLE, KEPT["activations"], KEPT["gradients"], KEPT["parameters"])
    above, below = 72, 228
    canvas.text(_LEFT, 18, "one process", "start", bold=True, size=20)
    canvas.text(_LEFT, below + _HIGH + 22, "four ranks", "start", bold=True, size=20)
    for number, (place, colour) in enumerate(zip(_PLACES, colours, strict=True)):
        x = _LEFT + number * _STEP
        canvas.box(x, above, _BOX, _HIGH, colour, place, size=20)
        for rank in range(4):
            part = _BOX / 4
            canvas.box(x + rank * part, below, part, _HIGH, RANKS[rank], str(rank))
        canvas.line([(x + _BOX / 2, above + _HIGH + 4), (x + _BOX / 2, below - 4)], dashed=True)
        canvas.box(x + _BOX / 2 - 19, 156, 38, 32, WHOLE, "=?", bold=True, size=20)
    for number, (words, colour) in enumerate(
        (("forward", DONE["forward"]), ("backward", DONE["backward"]), ("update", "currentColor"))
    ):
        begin, end = _LEFT + _BOX + number * _STEP + 2, _LEFT + (number + 1) * _STEP - 3
        for y in (above, below):
            canvas.arrow([(begin, y + _HIGH / 2), (end, y + _HIGH / 2)], colour, 4)
        canvas.text((begin + end) / 2, above - 12, words)
    seen = _LEFT + _STEP + _BOX / 2
    canvas.arrow([(seen, below + _HIGH + 36), (seen, below + _HIGH + 4)], thick=2)
    canvas.text(seen - 16, below + _HIGH + 54, "a curve of losses looks here alone", "start")
