"""What fills memory beside the model states: activations over a step, and segments in which holes come to be."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Protocol

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES
from pardemo.draw.parts import legend, parts
from pardemo.draw.player import Player


class Filled(Protocol):
    """A memory with tensors in it, in MiB: ``pardemo.planner.fragments.Replay`` is one."""

    failed: Hashable
    wanted: int
    taken: int
    reserved: int
    segments: tuple[tuple[int, tuple[tuple[Hashable, int, int], ...]], ...]


_LAYERS, _LEFT, _EACH, _PILE, _INPUT = 4, 10, 58, 30, 7  # layers; widths of a pass; heights of what is kept


@drawing(392)
def kept_over_a_step(canvas: Canvas) -> None:
    """Four blocks over a step, time to the right, above it what is kept. Without checkpoints it grows with each forward
    pass and shrinks with each backward pass. With checkpoints only inputs pile up, and before its backward pass each
    block runs again, with its own activations alone."""
    for y, high, again in ((8, 160, False), (226, 90, True)):
        title = "inputs are kept, blocks run again" if again else "everything is kept"
        canvas.text(_LEFT, y + 12, title, "start", bold=True, size=20)
        floor, x, waiting = y + high, _LEFT, 0
        for layer in range(1, _LAYERS + 1):
            waiting += 1
            _pile(canvas, x, floor, _EACH, waiting, 0 if again else waiting)
            _runs(canvas, x, floor, _EACH, "forward", layer)
            x += _EACH
        for layer in range(_LAYERS, 0, -1):
            passes = ("forward", "backward") if again else ("backward",)
            each = _EACH * 0.78 if again else _EACH
            for does in passes:
                _pile(canvas, x, floor, each, waiting, 1 if again else waiting)
                if does == "forward":  # once more: outlined
                    canvas.box(x + 2, floor + 8, each - 4, 26, "none", f"{layer}", border=DONE["forward"], thick=4)
                else:
                    _runs(canvas, x, floor, each, does, layer)
                x += each
            waiting -= 1
        canvas.line([(_LEFT, floor), (x, floor)], thick=2)
    legend(canvas, _LEFT, 376, {"kept": KEPT["activations"], "forward": DONE["forward"], "backward": DONE["backward"]})
    canvas.box(448, 367, 18, 18, "none", border=DONE["forward"], thick=4)
    canvas.text(474, 376, "forward again", "start")


def _pile(canvas: Canvas, x: float, floor: float, wide: float, inputs: int, whole: int) -> None:
    """``whole`` blocks' activations; of the rest of ``inputs``, only those."""
    thin = inputs - whole
    colour = KEPT["activations"]
    canvas.boxes([(x, floor - _INPUT * (k + 1), wide, _INPUT) for k in range(thin)], colour, thick=0.8)
    base = floor - _INPUT * thin
    canvas.boxes([(x, base - _PILE * (k + 1), wide, _PILE) for k in range(whole)], colour, thick=0.8)


def _runs(canvas: Canvas, x: float, floor: float, wide: float, does: str, layer: int) -> None:
    canvas.box(x, floor + 6, wide, 30, DONE[does], str(layer))


@drawing(288)
def waiting_places(canvas: Canvas) -> None:
    """The GPU computes forward and backward. Checkpoints and Adam's states can wait in the host's memory, where Adam
    then runs, over PCIe with 64 GB/s each way; on its disks, at some GB/s, Adam's states and parameters."""
    places = (
        (8, "GPU", (("forward", DONE["forward"]), ("backward", DONE["backward"]))),
        (232, "host", (("checkpoints", KEPT["activations"]), ("Adam's states", KEPT["optimizer states"]),
                       ("the update", KEPT["optimizer states"]))),
        (472, "disk (NVMe)", (("Adam's states", KEPT["optimizer states"]), ("parameters", KEPT["parameters"]))),
    )  # fmt: skip
    for x, name, waits in places:
        canvas.box(x, 40, 160, 176, thick=1.5)
        canvas.text(x + 80, 20, name, bold=True, size=20)
        for row, (label, colour) in enumerate(waits):
            canvas.box(x + 10, 52 + 54 * row, 140, 44, colour, label)
    for x in (170, 394):
        canvas.arrow([(x, 128), (x + 60 + 16 * (x > 200), 128)], DONE["communication"], 4, both=True)
    canvas.text(200, 238, "PCIe, 64 GB/s each way", fill=DONE["communication"], bold=True)
    canvas.text(432, 238, "some GB/s", fill=DONE["communication"], bold=True)
    canvas.text(8, 272, "fast and small on the left, slow and large on the right", "start")


#: After so many changes of *ZeRO-R*'s forward pass: what has happened.
MOMENTS = {
    1: "Layer 1: attention asks for 300 MiB. There is none, so CUDA gives a segment of that size.",
    4: "Attention is freed, its segment stays. The MLP takes 200 MiB of it, and the checkpoint 20 of the rest.",
    6: "Layer 2: of the 300 MiB only 200 in one piece are free. Attention gets a second segment.",
    25: "After five layers: the checkpoints have filled what the MLP leaves. Both large places are free again.",
    29: "Layer 6: the MLP is in its old place. The smallest free block is now attention's, and the checkpoint cuts it.",
    31: "Layer 7: attention finds 280 MiB where it was. It gets a third segment.",
    100: "After 20 layers: the second segment is full of checkpoints.",
    104: "Layer 21: the MLP is in its old place, so the checkpoint cuts the third segment.",
    105: "Layer 22: attention wants 300 MiB. The holes have 200 and 280. A fourth segment is more than there is.",
}
_SCALE, _HIGH = 1.66, 56


def fragments(moments: Mapping[int, Filled], room: int = 1000) -> Player:
    """Segments of torch's caching allocator at the moments of a forward pass that matter: those of :data:`MOMENTS`."""
    frames = []
    for count, filled in moments.items():
        canvas = Canvas(640, 326)
        for row in range(3):
            y = 8 + 84 * row
            canvas.text(8, y + _HIGH / 2, f"segment {row + 1}", "start")
            if row < len(filled.segments):
                _segment(canvas, 114, y, *filled.segments[row])
        in_holes = filled.reserved - filled.taken
        caption = f"taken {filled.taken}, free in segments {in_holes}, never asked for {room - filled.reserved} MiB"
        canvas.text(8, 268, caption, "start")
        colours = {"checkpoints": KEPT["activations"], "comes and goes": SHADES["temporaries"]}
        legend(canvas, 8, 304, colours)
        frames.append((canvas, MOMENTS[count]))
    return Player(frames, "segments of GPU memory during a forward pass, and the holes in them")


def _segment(canvas: Canvas, x: float, y: float, size: int, taken: Iterable[tuple[Hashable, int, int]]) -> None:
    canvas.box(x, y, _SCALE * size, _HIGH, thick=1.5, dashed=True)
    small = []
    for who, place, length in taken:
        at, wide = x + _SCALE * place, _SCALE * length
        if str(who).startswith("checkpoint"):
            small.append((at, y, wide, _HIGH))
        else:
            canvas.box(at, y, wide, _HIGH, SHADES["temporaries"], f"{who}, {length}")
    canvas.boxes(small, KEPT["activations"], thick=0.8)


_RANKS, _BLOCKS = 4, 3
_TALK, _KEPT = DONE["communication"], KEPT["activations"]


@drawing(468)
def checkpoints_in_parts(canvas: Canvas) -> str:
    """Block inputs that are kept for the recomputation: the same on all ranks, or a part on each (P_a)."""
    for block in range(_BLOCKS):
        canvas.text(8, 96 + 56 * block, f"block {block + 1}", "start")
    _draw_checkpoints(canvas, 90, "whole on every rank", in_parts=False)
    _draw_checkpoints(canvas, 372, "in parts (P_a)", in_parts=True)
    y = 270
    canvas.text(8, y, "Then, with P_a, backward of block 3:", "start", bold=True, size=20)
    for rank in range(_RANKS):
        parts(canvas, 8 + 40 * rank, y + 34, 34, 60, _RANKS, [rank], _KEPT)
    canvas.arrow([(170, y + 64), (284, y + 64)], _TALK, 4)
    canvas.text(226, y + 42, "all-gather", fill=_TALK, bold=True)
    parts(canvas, 289, y + 34, 44, 60, _RANKS, range(_RANKS), _KEPT)
    canvas.text(311, y + 114, "input")
    canvas.arrow([(337, y + 64), (361, y + 64)])
    canvas.box(364, y + 39, 136, 50, DONE["forward"], "block 3 again")
    canvas.arrow([(503, y + 64), (527, y + 64)])
    canvas.box(530, y + 39, 102, 50, DONE["backward"], "backward")
    canvas.text(8, y + 150, f"Kept on each rank: 1/{_RANKS} of the checkpoints.", "start")
    canvas.text(8, y + 176, "Sent: one all-gather more, φ for each block.", "start")
    return (
        f"Inputs of three blocks, kept for the recomputation on {_RANKS} tensor-parallel ranks: whole on every rank, "
        f"or a quarter on each. Before a block is run again its input is gathered."
    )


def _draw_checkpoints(canvas: Canvas, left: float, title: str, in_parts: bool) -> None:
    canvas.text(left + 2 * 66, 20, title, bold=True, size=20)
    for rank in range(_RANKS):
        x = left + 66 * rank
        canvas.text(x + 33, 52, f"rank {rank}")
        for block in range(_BLOCKS):
            parts(canvas, x + 5, 74 + 56 * block, 56, 44, _RANKS, [rank] if in_parts else range(_RANKS), _KEPT)
