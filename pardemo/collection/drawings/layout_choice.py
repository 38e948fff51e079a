"""Which layout for a model and a cluster: the questions in their order, and what each answer means."""

from collections.abc import Sequence

from pardemo.collection.drawings.key import GRID, KEPT, RANKS, WHOLE, ink_on
from pardemo.collection.drawings.svg import Canvas, Drawing

_ASKED = (  # n: GPUs, Ψ: parameters; the answer where it is yes
    (("16Ψ bytes fit a GPU?",), ("copies",)),
    (("4Ψ + 12Ψ/n bytes fit?",), ("copies,", "ZeRO-1")),
    (("16Ψ/n bytes fit, and a GPU", "has T ≥ rate/link tokens?"), ("ZeRO-3",)),
)
_WIDE, _RIGHT, _HIGH, _GAP = 340, 470, 58, 30
#: What chapter 09's rule and its map say -> the colour of the answer in both.
FORMS = {
    "one GPU": WHOLE,
    "DDP": RANKS[0],
    "FSDP2": RANKS[2],
    "HSDP": RANKS[3],
    "offload": RANKS[1],
    "TP PP CP": RANKS[4],
    "more GPUs": GRID,
}
_SHARDING = (
    (("4Ψ + 12Ψ/N bytes fit, beside", "micro-batches as large as wanted?"), ("ZeRO-1, and", "accumulate")),
    (("a micro-batch of T ≥ F/B", "tokens of a GPU?"), ("ZeRO-3",)),
    (("fast links inside a host, and", "16Ψ/G bytes fit?"), ("HSDP, and", "accumulate")),
)


def layout_choice() -> Drawing:
    """Three questions, each with the layout for a yes; and for a model that gets a no from all, how its copy is cut."""
    canvas = Canvas(640, 8 + 5 * (_HIGH + _GAP) + 24)
    y = 4.0
    for asked, answer in _ASKED:
        _box(canvas, 8, y, _WIDE, asked)
        _yes(canvas, y, answer)
        _down(canvas, y, "no")
        y += _HIGH + _GAP
    _box(canvas, 8, y, _WIDE, ("cut the copy in two, where it", "costs less: twice t or twice p"), RANKS[3])
    _down(canvas, y, "then")
    y += _HIGH + _GAP
    _box(canvas, 8, y, _WIDE, ("4Ψ/(t·p) + 12Ψ/n bytes fit?",))
    _yes(canvas, y, ("copies of", "t · p GPUs"))
    x, back = 8 + _WIDE / 2 + 60, y - _GAP
    canvas.arrow([(x, y), (x, back)])
    canvas.text(x + 16, (y + back) / 2, "no", size=18, anchor="start")
    canvas.text(8, y + _HIGH + 22, "n GPUs, Ψ parameters, T tokens of a GPU in a micro-batch", size=18, anchor="start")
    return Drawing(
        canvas,
        "Do 16 bytes a parameter fit a GPU: copies. Do 4, and 12 shared by all: copies with ZeRO-1. Do 16 shared by "
        "all, and are there enough tokens: ZeRO-3. Else each copy is cut in two again and again, into tensor-parallel "
        "ranks or into stages, whichever costs less, until it fits; the rest of the GPUs are copies, with ZeRO-1.",
    )


def form_choice() -> Drawing:
    """Chapter 09's rule as questions, in the order in which they are asked; an answer has its colour of the map."""
    rule = (
        (("more GPUs than samples", "in a batch?"), ("TP, PP, CP:", "Megatron-core"), "TP PP CP"),
        (("16Ψ bytes and a sample", "fit a GPU?"), ("DDP",), "DDP"),
        (("16Ψ/8 bytes and a sample fit?", "(shards in one host)"), ("FSDP2; HSDP", "on more hosts"), "HSDP"),
        (("16Ψ/N bytes and a sample fit?", "(shards over all hosts)"), ("FSDP2",), "FSDP2"),
        (("16Ψ/N bytes alone fit?", "(the sample does not)"), ("TP, PP, CP:", "Megatron-core"), "TP PP CP"),
        (("2Ψ/N fit, and the hosts hold", "gradients and Adam's states?"), ("offload",), "offload"),
    )
    canvas = Canvas(640, 12 + len(rule) * (_HIGH + _GAP) + 24)
    for number, (asked, answer, form) in enumerate(rule):
        y = 4.0 + number * (_HIGH + _GAP)
        _box(canvas, 8, y, _WIDE, asked)
        _yes(canvas, y, answer, FORMS[form])
        _down(canvas, y, "no")
    _box(canvas, 8, 4.0 + len(rule) * (_HIGH + _GAP), _WIDE, ("more GPUs",), high=28)
    return Drawing(
        canvas,
        "Six questions. More GPUs than samples: tensor and pipeline parallelism. The model states and a sample fit a "
        "GPU: DDP. Their shards in one host: FSDP2, and HSDP on more hosts. Shards over all hosts: FSDP2. The states "
        "alone: tensor and pipeline parallelism. The weights, with the rest on the hosts: offload. Else more GPUs.",
    )


def sharding_choice() -> Drawing:
    """Three questions, each with the way to shard for a yes; and what is left where all of them get a no."""
    canvas = Canvas(640, 8 + 4 * (_HIGH + _GAP) - _GAP)
    for number, (asked, answer) in enumerate(_SHARDING):
        y = 4.0 + number * (_HIGH + _GAP)
        _box(canvas, 8, y, _WIDE, asked)
        _yes(canvas, y, answer)
        _down(canvas, y, "no")
    _box(
        canvas, 8, 4 + 3 * (_HIGH + _GAP), _WIDE, ("hpZ or all of ZeRO++; or", "a pipeline between the hosts"), RANKS[3]
    )
    return Drawing(
        canvas,
        "Do ZeRO-1's states fit beside micro-batches as large as wanted: ZeRO-1, and accumulate. Has a micro-batch "
        "enough tokens to hide the traffic: ZeRO-3. Are links inside a host fast, and does a host hold all states: "
        "HSDP, and accumulate. Else hpZ or ZeRO++, or a pipeline between the hosts.",
    )


def _yes(canvas: Canvas, y: float, answer: Sequence[str], fill: str = RANKS[2]) -> None:
    _box(canvas, _RIGHT, y, 640 - _RIGHT - 8, answer, fill)
    canvas.arrow([(8 + _WIDE, y + _HIGH / 2 + 14), (_RIGHT, y + _HIGH / 2 + 14)])
    canvas.text((8 + _WIDE + _RIGHT) / 2 - 6, y + _HIGH / 2 - 4, "yes", size=18)


def _box(
    canvas: Canvas, x: float, y: float, wide: float, lines: Sequence[str], fill: str = "none", high: float = _HIGH
) -> None:
    border = "" if fill != "none" else KEPT["parameters"]
    canvas.box(x, y, wide, high, fill, border=border, thick=2)
    canvas.lines(x + wide / 2, y + high / 2 - 12 * (len(lines) - 1), lines, fill=ink_on(fill))


def _down(canvas: Canvas, y: float, word: str = "") -> None:
    canvas.arrow([(60, y + _HIGH), (60, y + _HIGH + _GAP)])
    if word:
        canvas.text(80, y + _HIGH + _GAP / 2, word, size=18, anchor="start")
