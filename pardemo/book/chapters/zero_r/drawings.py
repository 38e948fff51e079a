"""Draws what fills memory beside the model states: activations over a step, and segments in which holes come to be."""

from collections.abc import Hashable, Mapping
from typing import Protocol

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES
from pardemo.draw.parts import legend, parts
from pardemo.draw.player import Player


class Filled(Protocol):
    """A memory with tensors in it, in MiB: ``pardemo.planner.dry_run.allocator.Replay`` is one."""

    failed: Hashable
    wanted: int
    taken: int
    reserved: int
    segments: tuple[tuple[int, tuple[tuple[Hashable, int, int], ...]], ...]


@drawing(392)
def kept_over_a_step(canvas: Canvas) -> None:
    """Four blocks over a step, time to the right, above it what is kept. Without checkpoints it grows with each forward
    pass and shrinks with each backward pass. With checkpoints only inputs pile up, and before its backward pass each
    block runs again, with its own activations alone."""
    left, kept = 10, KEPT["activations"]
    for floor, again in ((168, False), (316, True)):
        title = "inputs are kept, blocks run again" if again else "everything is kept"
        canvas.text(left, 238 if again else 20, title, "start", bold=True, size=20)
        # what runs, of which block, how wide, and of how many blocks inputs alone and all activations are kept
        passes = [("forward", k, 58, k * again, k * (not again)) for k in (1, 2, 3, 4)]
        for k in (4, 3, 2, 1):
            if again:
                passes += [(does, k, 58 * 0.78, k - 1, 1) for does in ("again", "backward")]
            else:
                passes.append(("backward", k, 58, 0, k))
        x = float(left)
        for does, layer, wide, inputs, all_kept in passes:
            base = floor - 7 * inputs
            canvas.boxes([(x, floor - 7 * (k + 1), wide, 7) for k in range(inputs)], kept, thick=0.8)
            canvas.boxes([(x, base - 30 * (k + 1), wide, 30) for k in range(all_kept)], kept, thick=0.8)
            if does == "again":  # outlined
                canvas.box(x + 2, floor + 8, wide - 4, 26, "none", f"{layer}", border=DONE["forward"], thick=4)
            else:
                canvas.box(x, floor + 6, wide, 30, DONE[does], str(layer))
            x += wide
        canvas.line([(left, floor), (x, floor)], thick=2)
    legend(canvas, left, 376, {"kept": kept, "forward": DONE["forward"], "backward": DONE["backward"]})
    canvas.box(448, 367, 18, 18, "none", border=DONE["forward"], thick=4)
    canvas.text(474, 376, "forward again", "start")


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


def fragments(moments: Mapping[int, Filled], room: int = 1000) -> Player:
    """Segments of torch's caching allocator at the moments of a forward pass that matter: those of :data:`MOMENTS`."""
    frames, scale, high = [], 1.66, 56
    for count, filled in moments.items():
        canvas = Canvas(640, 326)
        for row in range(3):
            canvas.text(8, 36 + 84 * row, f"segment {row + 1}", "start")
        for row, (size, taken) in enumerate(filled.segments[:3]):
            y, small = 8 + 84 * row, []
            canvas.box(114, y, scale * size, high, thick=1.5, dashed=True)
            for who, place, length in taken:
                at, wide = 114 + scale * place, scale * length
                if str(who).startswith("checkpoint"):
                    small.append((at, y, wide, high))
                else:
                    canvas.box(at, y, wide, high, SHADES["temporaries"], f"{who}, {length}")
            canvas.boxes(small, KEPT["activations"], thick=0.8)
        in_holes = filled.reserved - filled.taken
        caption = f"taken {filled.taken}, free in segments {in_holes}, never asked for {room - filled.reserved} MiB"
        canvas.text(8, 268, caption, "start")
        legend(canvas, 8, 304, {"checkpoints": KEPT["activations"], "comes and goes": SHADES["temporaries"]})
        frames.append((canvas, MOMENTS[count]))
    return Player(frames, "segments of GPU memory during a forward pass, and the holes in them")


@drawing(468)
def checkpoints_in_parts(canvas: Canvas) -> None:
    """Inputs of three blocks, kept for the recomputation on 4 tensor-parallel ranks: whole on every rank, or a quarter
    on each. Before a block is run again its input is gathered."""
    talk, kept = DONE["communication"], KEPT["activations"]
    for block in range(3):
        canvas.text(8, 96 + 56 * block, f"block {block + 1}", "start")
    for left, title, in_parts in ((90, "whole on every rank", False), (372, "in parts (P_a)", True)):
        canvas.text(left + 132, 20, title, bold=True, size=20)
        for rank in range(4):
            x = left + 66 * rank
            canvas.text(x + 33, 52, f"rank {rank}")
            for block in range(3):
                parts(canvas, x + 5, 74 + 56 * block, 56, 44, 4, [rank] if in_parts else range(4), kept)
    canvas.text(8, 270, "Then, with P_a, backward of block 3:", "start", bold=True, size=20)
    for rank in range(4):
        parts(canvas, 8 + 40 * rank, 304, 34, 60, 4, [rank], kept)
    canvas.arrow([(170, 334), (284, 334)], talk, 4)
    canvas.text(226, 312, "all-gather", fill=talk, bold=True)
    parts(canvas, 289, 304, 44, 60, 4, range(4), kept)
    canvas.text(311, 384, "input")
    canvas.arrow([(337, 334), (361, 334)])
    canvas.box(364, 309, 136, 50, DONE["forward"], "block 3 again")
    canvas.arrow([(503, 334), (527, 334)])
    canvas.box(530, 309, 102, 50, DONE["backward"], "backward")
    canvas.text(8, 420, "Kept on each rank: 1/4 of the checkpoints.", "start")
    canvas.text(8, 446, "Sent: one all-gather more, φ for each block.", "start")
