"""ZeRO-1, ZeRO-2 and ZeRO-3: of 16 bytes for each parameter, which does a rank keep?"""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import KEPT
from pardemo.draw.parts import legend, parts
from pardemo.formulas import memory

#: From which of ZeRO-1, ZeRO-2 and ZeRO-3 on a kind of state is in shards.
SINCE = {"parameters": 3, "gradients": 2, "optimizer states": 1}
_FORMULAS = ("2 + 2 + 12", "2 + 2 + 12/N", "2 + (2 + 12)/N", "(2 + 2 + 12)/N")
_NAMES = ("plain", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_HIGH = 60


def zero_stages(ranks: int = 4, totals: bool = True) -> Drawing:
    """The model states of mixed-precision Adam on each rank: areas are bytes, rows are the model's N parts.

    Args:
        ranks: N, from 2 to 6.
        totals: with the bytes of each rank as numbers beside the boxes; without, they are left to the reader's guess.

    Raises:
        ValueError: another number of ranks: the drawing would not be readable.
    """
    if not 2 <= ranks <= 6:
        raise ValueError(f"ZeRO on 2 to 6 ranks can be drawn, not on {ranks}")
    canvas = Canvas(640, 520)
    left, gap = 16, 10
    each = ((434 if totals else 608) - gap * (ranks - 1)) / ranks
    unit = each / memory.ADAM.total  # of a byte
    for rank in range(ranks):
        canvas.text(left + rank * (each + gap) + each / 2, 20, f"rank {rank}", size=18)
    if totals:
        canvas.text(470, 20, "bytes each", size=18, anchor="start")
    bytes_each = []
    for stage in memory.STAGES:
        y = 66 + 98 * stage
        canvas.text(left, y - 17, _NAMES[stage], anchor="start", bold=True)
        canvas.text(left + 94, y - 17, _caption(stage), size=18, anchor="start")
        for rank in range(ranks):
            x = left + rank * (each + gap)
            for kind, nbytes in zip(SINCE, memory.ADAM, strict=True):
                shown_parts = range(ranks) if stage < SINCE[kind] else [rank]
                parts(canvas, x, y, nbytes * unit, _HIGH, ranks, shown_parts, KEPT[kind])
                x += nbytes * unit
        # of as many parameters as ranks: shares are whole
        bytes_each.append(memory.model_states_bytes(ranks, ranks, stage) / ranks)
        if totals:
            canvas.text(470, y + 15, _FORMULAS[stage], size=18, anchor="start")
            canvas.text(470, y + 43, f"= {bytes_each[-1]:.3g}", size=22, anchor="start", bold=True)
    legend(canvas, left, 462, {name: KEPT[name] for name in ("parameters", "gradients", "optimizer states")})
    canvas.text(left, 496, f"widths are bytes; rows are the model's {ranks} parts", size=18, anchor="start")
    numbers = f": {', '.join(f'{nbytes:.3g}' for nbytes in bytes_each)}" if totals else ""
    return Drawing(
        canvas,
        f"Bytes for each parameter on each of {ranks} ranks, in plain data parallelism and under ZeRO-1, ZeRO-2 and "
        f"ZeRO-3{numbers}. ZeRO-1 cuts the optimizer states, ZeRO-2 the gradients too, ZeRO-3 the parameters too.",
    )


def _caption(stage: int) -> str:
    return (
        "every rank keeps all",
        "optimizer states are cut",
        "gradients too",
        "parameters too",
    )[stage]
