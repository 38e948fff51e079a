"""The drawing of *Is it right?*: one step in one process and on ranks, and where the two can be compared."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, WHOLE


@drawing(346)
def one_step_twice(canvas: Canvas) -> None:
    """One step of training in one process and on four ranks. Samples give outputs in the forward pass, outputs give
    gradients in the backward pass, and gradients change the parameters. Each of the four can be compared with the
    ranks' parts, put together. A curve of losses looks at the outputs alone, and at one number of them."""
    states = {"samples": WHOLE, **{kind: KEPT[kind] for kind in ("activations", "gradients", "parameters")}}
    passes = {"forward": DONE["forward"], "backward": DONE["backward"], "update": "currentColor"}
    wide, high, above, below = 126, 44, 72, 228
    canvas.text(4, 18, "one process", "start", bold=True, size=20)
    canvas.text(4, 294, "four ranks", "start", bold=True, size=20)
    for number, (name, colour) in enumerate(states.items()):
        x = 4 + 168 * number
        middle = x + wide / 2
        canvas.box(x, above, wide, high, colour, "outputs" if name == "activations" else name, size=20)
        for rank in range(4):
            canvas.box(x + rank * wide / 4, below, wide / 4, high, RANKS[rank], str(rank))
        canvas.line([(middle, above + high + 4), (middle, below - 4)], dashed=True)
        canvas.box(middle - 19, 156, 38, 32, WHOLE, "=?", bold=True, size=20)
    for number, (name, colour) in enumerate(passes.items()):
        begin, end = 132 + 168 * number, 169 + 168 * number
        for y in (above, below):
            canvas.arrow([(begin, y + high / 2), (end, y + high / 2)], colour, 4)
        canvas.text((begin + end) / 2, above - 12, name)
    canvas.arrow([(235, 308), (235, 276)], thick=2)
    canvas.text(219, 326, "a curve of losses looks here alone", "start")
