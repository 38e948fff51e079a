"""One script, several files: what each of two ranks keeps under each configuration."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, WHOLE
from pardemo.draw.parts import legend, parts
from pardemo.formulas import memory

_FILES = (("no file", 0), ("ddp.yaml", 0), ("zero1.yaml", 1), ("zero2.yaml", 2), ("zero3.yaml", 3), ("fsdp2.yaml", 3))
_SINCE = {"parameters": 3, "gradients": 2, "optimizer states": 1}  # kind -> the first stage that shards it
_LEFT, _EACH, _HIGH, _STEP = 236, 186, 40, 62


def one_script() -> Drawing:
    """The same script under each file, on two ranks: which parts of the model states a rank keeps (fp32 Adam)."""
    canvas = Canvas(640, 176 + _STEP * len(_FILES))
    canvas.box(8, 8, 130, 46, WHOLE, "train.py", bold=True)
    canvas.text(152, 31, "the same in every row; the file decides", size=18, anchor="start")
    for rank in range(2):
        canvas.text(_LEFT + rank * (_EACH + 26) + _EACH / 2, 84, f"rank {rank}", size=18)
    unit = _EACH / memory.STATES["Adam, fp32"].total
    for number, (name, stage) in enumerate(_FILES):
        y = 104 + _STEP * number
        canvas.box(8, y, 150, _HIGH, "none", name, size=18)
        canvas.arrow([(158, y + _HIGH / 2), (_LEFT - 8, y + _HIGH / 2)])
        for rank in range(1 if name == "no file" else 2):
            x = _LEFT + rank * (_EACH + 26)
            for kind, nbytes in zip(_SINCE, memory.STATES["Adam, fp32"], strict=True):
                shown_parts = [rank] if stage >= _SINCE[kind] else range(2)
                parts(canvas, x, y, nbytes * unit, _HIGH, 2, shown_parts, KEPT[kind])
                x += nbytes * unit
    y = 126 + _STEP * len(_FILES)
    legend(canvas, 8, y, {kind: KEPT[kind] for kind in _SINCE})
    canvas.text(8, y + 32, "dashed: what the other rank keeps", size=18, anchor="start")
    return Drawing(
        canvas,
        "One script under five files and under none. Without a file one rank keeps everything. With ddp.yaml both "
        "ranks keep everything. zero1.yaml halves the optimizer states, zero2.yaml the gradients too, zero3.yaml and "
        "fsdp2.yaml everything.",
    )
