"""Seven mistakes of a script under a launcher that stop nothing: what was asked for, what runs, what to do."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import COMPUTED, DONE, KEPT, OTHER, RANKS
from pardemo.draw.parts import parts

_ASKED, _RUNS, _CURE, _EACH, _HIGH = 8, 196, 384, 72, 48
_MISTAKES = (
    ("python train.py", ("start it with a launcher",)),
    ("torchrun, and no file", ("accelerate launch", "--config_file")),
    ("FSDP2 without the layers' class", ("name the class",)),
    ("split_batches left at its default", ("set it, or divide", "the batch size")),
    ("a schedule that counts steps", ("count one GPU's batches,", "or split_batches=True")),
    ("clip_grad_norm_ under DeepSpeed", ("gradient_clipping", "in DeepSpeed's file")),
    ("the loss from model.module", ("call the model that", "prepare returned")),
)


def seven_mistakes() -> Drawing:
    """A row for each mistake, on two ranks: the picture that was meant, the picture that came, the cure."""
    step = 106
    canvas = Canvas(640, 30 + step * len(_MISTAKES))
    for x, heading in ((_ASKED, "asked for"), (_RUNS, "what runs"), (_CURE, "what to do")):
        canvas.text(x, 12, heading, size=18, anchor="start", bold=True)
    draw = (_ranks, _wrapped, _units, _batches, _rates, _clips, _drifting)
    for number, ((mistake, cure), picture) in enumerate(zip(_MISTAKES, draw, strict=True)):
        y = 44 + step * number
        canvas.text(_ASKED, y, f"{number + 1}  {mistake}", size=18, anchor="start")
        for x, wrong in ((_ASKED, False), (_RUNS, True)):
            picture(canvas, x, y + 20, wrong)
        canvas.lines(_CURE, y + 44 - 12 * (len(cure) - 1), cure, anchor="start")
    return Drawing(
        canvas,
        "Seven mistakes on two ranks. Started by python one process runs. By torchrun without the file each rank keeps "
        "a whole model. Without the layers' class the model is one unit. With split_batches at its default each rank "
        "takes a whole batch. A schedule that counts steps is over too soon. DeepSpeed clips at 1.0 and not at 0.5. "
        "With model.module no gradients are all-reduced.",
    )


def _ranks(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        started = not (wrong and rank)
        fill = RANKS[rank] if started else "none"
        label = f"rank {rank}" if started else ""
        canvas.box(x + 80 * rank, y, _EACH, _HIGH, fill, label, size=18, dashed=not started)


def _wrapped(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        parts(canvas, x + 80 * rank, y, _EACH, _HIGH, 2, range(2) if wrong else [rank], KEPT["parameters"])


def _units(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    count = 1 if wrong else 4
    canvas.boxes([(x + 38 * k, y, 152 if wrong else 32, _HIGH) for k in range(count)], KEPT["parameters"])


def _batches(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    each = 8 if wrong else 4
    for rank in range(2):
        canvas.boxes([(x + 80 * rank + 9 * k, y, 9, _HIGH) for k in range(each)], RANKS[rank], thick=0.8)


def _rates(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    end = 76 if wrong else 152
    canvas.line([(x, y), (x, y + _HIGH), (x + 152, y + _HIGH)], thick=1.5)
    canvas.line([(x + 2, y + 4), (x + end, y + _HIGH - 2)], COMPUTED, 4)


def _clips(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    canvas.box(x, y, 24, _HIGH, KEPT["gradients"], thick=1)
    at = y + (4 if wrong else 24)
    canvas.line([(x + 26, at), (x + 84, at)], OTHER, 3, dashed=True)
    canvas.text(x + 92, at, "1.0" if wrong else "0.5", size=18, anchor="start")


def _drifting(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        canvas.box(x + 104 * rank, y, 48, _HIGH, KEPT["gradients"], thick=1)
    if not wrong:
        canvas.arrow([(x + 52, y + 24), (x + 100, y + 24)], DONE["communication"], 4, both=True)
