"""Model states in numbers: the sixteen bytes of one parameter, and GB on a GPU for more and more of them."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT, VERDICTS
from pardemo.draw.parts import legend
from pardemo.draw.player import Player
from pardemo.formulas import memory

#: name, bytes, kind, who reads it
_SIXTEEN = (
    ("parameter, bf16", 2, "parameters", "forward and backward"),
    ("gradient, bf16", 2, "gradients", "backward, then Adam"),
    ("parameter, fp32", 4, "optimizer states", "Adam, once a step"),
    ("momentum, fp32", 4, "optimizer states", "Adam, once a step"),
    ("variance, fp32", 4, "optimizer states", "Adam, once a step"),
)
KEPT_OF_MODEL = {kind: KEPT[kind] for kind in ("parameters", "gradients", "optimizer states")}
_STAGES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_RANKS = tuple(2**k for k in range(11))


def sixteen_bytes() -> Drawing:
    """One parameter in mixed precision: a box for each byte, a row for each tensor, and who reads it when."""
    canvas = Canvas(640, 312)
    byte, left, row = 44, 186, 52
    for number, (name, nbytes, kind, read) in enumerate(_SIXTEEN):
        y = 10 + row * number
        canvas.text(left - 12, y + 19, name, size=18, anchor="end")
        canvas.boxes([(left + byte * k, y, byte, 38) for k in range(nbytes)], KEPT[kind])
        canvas.text(left + byte * nbytes + 14, y + 19, read, size=18, anchor="start")
    y = 10 + row * len(_SIXTEEN) + 14
    total = sum(nbytes for _, nbytes, _, _ in _SIXTEEN)
    canvas.text(left - 12, y, f"all: {total} bytes", size=20, anchor="end", bold=True)
    canvas.text(left, y, "12 of them are Adam's alone: K = 12", size=18, anchor="start")
    tensors_text = "; ".join(f"{name}: {nbytes} bytes, read by {read}" for name, nbytes, _, read in _SIXTEEN)
    return Drawing(canvas, f"The {total} bytes of one parameter. {tensors_text}.")


def states_by_ranks(billions: float = 7.5, room: float = 85, start: int = 64) -> Player:
    """Bars of GB on a GPU, plain and under ZeRO-1, 2 and 3; each frame has twice as many GPUs as the one before.

    Args:
        billions: Ψ, in 10⁹ parameters. room: GB of a GPU, red marks. start: the number of GPUs shown first.

    Raises:
        ValueError: a number of GPUs that is none of the frames.
    """
    if start not in _RANKS:
        raise ValueError(f"the frames have 1, 2, 4, … {_RANKS[-1]} GPUs, not {start}")
    frames = [_frame(billions, room, ranks) for ranks in _RANKS]
    return Player(
        frames,
        f"model states of {billions:g}·10⁹ parameters by GPUs, plain and under ZeRO-1, 2 and 3",
        _RANKS.index(start),
    )


def _frame(billions: float, room: float, ranks: int) -> tuple[Canvas, str]:
    canvas = Canvas(640, 290)
    left, most = 108, memory.ADAM.total * billions
    scale = 430 / most
    params = round(billions * 1e9)
    canvas.text(8, 18, f"Ψ = {billions:g}·10⁹, N = {ranks:,}", anchor="start", bold=True)
    totals = []
    for stage in memory.STAGES:
        y, x = 46 + 50 * stage, left
        kinds = {kind: nbytes / 1e9 for kind, nbytes in memory.model_states(params, ranks, stage).items()}
        canvas.text(left - 10, y + 18, _STAGES[stage], size=18, anchor="end")
        for kind, gigabytes in kinds.items():
            canvas.box(x, y, gigabytes * scale, 36, KEPT[kind], thick=1)
            x += gigabytes * scale
        totals.append(sum(kinds.values()))
        label = f"{totals[-1]:.1f} GB" if totals[-1] >= 10 else f"{totals[-1]:.3g} GB"
        canvas.text(x + 8, y + 18, label, size=18, anchor="start", bold=totals[-1] <= room)
        if room <= most:  # between the bars, where no text is
            canvas.line([(left + room * scale, y - 12), (left + room * scale, y - 2)], VERDICTS["fails"], 3)
    if room <= most:
        canvas.line([(left + room * scale, 234), (left + room * scale, 244)], VERDICTS["fails"], 3)
        canvas.line([(556, 260), (556, 276)], VERDICTS["fails"], 3)
        canvas.text(564, 268, f"{room:g} GB", size=18, anchor="start")
    legend(canvas, 8, 268, KEPT_OF_MODEL, gap=16)
    fits = [name for name, total in zip(_STAGES, totals, strict=True) if total <= room]
    gigabytes_by_stage = ", ".join(f"{total:.3g}" for total in totals)
    ways = "plain data parallelism, ZeRO-1, ZeRO-2 and ZeRO-3"
    caption = f"On {ranks:,} GPU{'s' * (ranks > 1)}, {ways} keep {gigabytes_by_stage} GB on each. "
    return canvas, caption + (
        f"These fit into {room:g} GB: {', '.join(fits)}." if fits else f"None of them fits into {room:g} GB."
    )
