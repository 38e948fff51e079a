"""Drawings of *A script, measured*: where a byte can be counted, and what each version of the script sends when."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES
from pardemo.draw.parts import legend


@drawing(378)
def where_a_byte_is_counted(canvas: Canvas) -> None:
    """The way of a collective. What the script calls goes through torch.distributed to torch's dispatcher; what DDP
    sends in the backward pass comes from C++ and meets it at the dispatcher. Below are gloo or nccl, and the kernel. At
    the dispatcher all calls and bytes can be counted, and the stack says which line of the script was running."""
    rows = {10: "train.py", 166: "torch's dispatcher", 244: "gloo, or nccl", 322: "the kernel: TCP"}
    for y, words in rows.items():
        canvas.box(44, y, 392, 46, "none", words, size=20)
    canvas.box(44, 88, 186, 46, "none", "torch.distributed")
    canvas.box(250, 88, 186, 46, "none", "DDP, in C++")
    for x, y, thick in ((137, 10, 3), (137, 88, 3), (343, 10, 3), (343, 88, 3), (240, 166, 5), (240, 244, 5)):
        canvas.arrow([(x, y + 48), (x, y + 76)], DONE["communication"], thick)
    notes = {
        10: ("the stack has", "the line"),
        88: ("patched here:", "not DDP's calls"),
        166: ("counted here:", "all calls, bytes"),
        322: ("counted here:", "bytes alone"),
    }
    for y, lines in notes.items():
        canvas.lines(450, y + 11, lines, "start")
    canvas.arrow([(42, 189), (16, 189), (16, 33), (41, 33)], thick=2, dashed=True)


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
            for label in after:
                canvas.box(x, y + 66, sends, 32, colours[label], label, bold=True, size=20)
                x += sends + 4
        canvas.box(x, y + 30, 86, 32, "none", "update")
    legend(canvas, 10, 362, {"gradients, summed": colours["Σ"], "logits, gathered": colours["L"]})
    canvas.text(10, 391, "F forward, B backward; order, not seconds", "start")
