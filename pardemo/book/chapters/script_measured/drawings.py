"""Drawings of *A script, measured*: where a byte can be counted, and what each version of the script sends when."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES
from pardemo.draw.parts import legend

_LEFT, _WIDE, _HIGH, _GAP = 44, 392, 46, 32  # of the boxes; the gap is between two rows
_HALF = 186  # of a box beside another one


@drawing(378)
def where_a_byte_is_counted(canvas: Canvas) -> None:
    """The way of a collective. What the script calls goes through torch.distributed to torch's dispatcher; what DDP
    sends in the backward pass comes from C++ and meets it at the dispatcher. Below are gloo or nccl, and the kernel. At
    the dispatcher all calls and bytes can be counted, and the stack says which line of the script was running."""
    tops = [10 + row * (_HIGH + _GAP) for row in range(5)]
    right, notes = _LEFT + _WIDE, _LEFT + _WIDE + 14
    second = right - _HALF
    for row, words in ((0, "train.py"), (2, "torch's dispatcher"), (3, "gloo, or nccl"), (4, "the kernel: TCP")):
        canvas.box(_LEFT, tops[row], _WIDE, _HIGH, "none", words, size=20)
    canvas.box(_LEFT, tops[1], _HALF, _HIGH, "none", "torch.distributed")
    canvas.box(second, tops[1], _HALF, _HIGH, "none", "DDP, in C++")
    for x in (_LEFT + _HALF / 2, second + _HALF / 2):
        for row in (0, 1):
            canvas.arrow([(x, tops[row] + _HIGH + 2), (x, tops[row + 1] - 2)], DONE["communication"])
    for row in (2, 3):
        middle = _LEFT + _WIDE / 2
        canvas.arrow([(middle, tops[row] + _HIGH + 2), (middle, tops[row + 1] - 2)], DONE["communication"], 5)
    for row, lines in (
        (0, ("the stack has", "the line")),
        (1, ("patched here:", "not DDP's calls")),
        (2, ("counted here:", "all calls, bytes")),
        (4, ("counted here:", "bytes alone")),
    ):
        canvas.lines(notes, tops[row] + _HIGH / 2 - 12, lines, "start")
    level, margin = tops[2] + _HIGH / 2, 16
    back = [(_LEFT - 2, level), (margin, level), (margin, tops[0] + _HIGH / 2), (_LEFT - 3, tops[0] + _HIGH / 2)]
    canvas.arrow(back, thick=2, dashed=True)


@drawing(404)
def sums_of_a_step(canvas: Canvas) -> None:
    """A step of two micro-batches. As the script came, it sums all gradients and gathers all logits after each of the
    two: four times it sends. With the first line mended the gradients are summed once, after the second micro-batch.
    With both mended nothing else is sent."""
    forward, backward, sends = 44, 78, 66
    colours = {"Σ": KEPT["gradients"], "L": SHADES["logits"]}
    rows = {"as it came": ("ΣL", "ΣL"), "the first line mended": ("L", "ΣL"), "both mended": ("", "Σ")}
    for number, (name, sent) in enumerate(rows.items()):
        y, x = 8 + 112 * number, 10.0
        canvas.text(10, y + 12, name, "start", bold=True, size=20)
        for after in sent:
            canvas.box(x, y + 30, forward, 32, DONE["forward"], "F", size=20)
            canvas.box(x + forward, y + 30, backward, 32, DONE["backward"], "B", size=20)
            x += forward + backward + 4
            for what in after:
                canvas.box(x, y + 66, sends, 32, colours[what], what, bold=True, size=20)
                x += sends + 4
        canvas.box(x, y + 30, 86, 32, "none", "update")
    legend(canvas, 10, 362, {"gradients, summed": colours["Σ"], "logits, gathered": colours["L"]})
    canvas.text(10, 391, "F forward, B backward; order, not seconds", "start")
