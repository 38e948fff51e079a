"""Activation checkpoints under tensor parallelism: whole on every rank, or in parts."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT
from pardemo.draw.parts import parts

_RANKS, _BLOCKS = 4, 3
_TALK, _KEPT = DONE["communication"], KEPT["activations"]


def checkpoints_in_parts() -> Drawing:
    """Block inputs that are kept for the recomputation: the same on all ranks, or a part on each (P_a)."""
    canvas = Canvas(640, 468)
    for block in range(_BLOCKS):
        canvas.text(8, 96 + 56 * block, f"block {block + 1}", size=18, anchor="start")
    _draw_checkpoints(canvas, 90, "whole on every rank", in_parts=False)
    _draw_checkpoints(canvas, 372, "in parts (P_a)", in_parts=True)
    y = 270
    canvas.text(8, y, "Then, with P_a, backward of block 3:", anchor="start", bold=True)
    for rank in range(_RANKS):
        parts(canvas, 8 + 40 * rank, y + 34, 34, 60, _RANKS, [rank], _KEPT)
    canvas.arrow([(170, y + 64), (284, y + 64)], _TALK, 4)
    canvas.text(226, y + 42, "all-gather", size=18, fill=_TALK, bold=True)
    parts(canvas, 289, y + 34, 44, 60, _RANKS, range(_RANKS), _KEPT)
    canvas.text(311, y + 114, "input", size=18)
    canvas.arrow([(337, y + 64), (361, y + 64)])
    canvas.box(364, y + 39, 136, 50, DONE["forward"], "block 3 again", size=18)
    canvas.arrow([(503, y + 64), (527, y + 64)])
    canvas.box(530, y + 39, 102, 50, DONE["backward"], "backward", size=18)
    canvas.text(8, y + 150, f"Kept on each rank: 1/{_RANKS} of the checkpoints.", size=18, anchor="start")
    canvas.text(8, y + 176, "Sent: one all-gather more, φ for each block.", size=18, anchor="start")
    return Drawing(
        canvas,
        f"Inputs of three blocks, kept for the recomputation on {_RANKS} tensor-parallel ranks: whole on every rank, "
        f"or a quarter on each. Before a block is run again its input is gathered.",
    )


def _draw_checkpoints(canvas: Canvas, left: float, title: str, in_parts: bool) -> None:
    canvas.text(left + 2 * 66, 20, title, bold=True)
    for rank in range(_RANKS):
        x = left + 66 * rank
        canvas.text(x + 33, 52, f"rank {rank}", size=18)
        for block in range(_BLOCKS):
            parts(canvas, x + 5, 74 + 56 * block, 56, 44, _RANKS, [rank] if in_parts else range(_RANKS), _KEPT)
