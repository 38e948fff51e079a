"""Attention cut by heads, and where to cut a fused projection of query, key and value."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, RANKS, WHOLE
from pardemo.draw.parts import SUBSCRIPTS, legend

_TALK = DONE["communication"]
_HEADS, _RANKS = 4, 2
_SHARED = {
    4: "each query head has a head of keys and values of its own",
    2: "two query heads share a head of keys and values",
    1: "one head of keys and values for all: both ranks keep it",
}


def attention_heads(query_groups: int = 4) -> Drawing:
    """Attention with four heads on two ranks: each computes whole heads, without the other.

    Args:
        query_groups: heads of key and value. 4: one for each query head; 2: one for two of them; 1: one for all.

    Raises:
        ValueError: another number of heads of key and value.
    """
    if query_groups not in _SHARED:
        raise ValueError(f"four query heads share 1, 2 or 4 heads of key and value, not {query_groups}")
    canvas = Canvas(640, 536)
    f, g, line = 100, 532, 202
    canvas.box(10, line - 42, 50, 84, WHOLE, "X", size=24)
    canvas.arrow([(62, line), (f - 22, line)])
    for rank in range(_RANKS):
        middle, way = line + (94 if rank else -86), 24 if rank else -24
        canvas.text(320, 20 if rank == 0 else 382, f"rank {rank}", size=22, bold=True)
        canvas.arrow([(f, line + way), (f, middle), (134, middle)])
        _projections(canvas, 184, middle, rank, query_groups)
        canvas.box(138, middle - 73, 122, 146, thick=1)
        canvas.arrow([(262, middle), (284, middle)])
        for place, head in enumerate(heads_of(rank)):
            canvas.box(286, middle - 50 + 54 * place, 92, 46, RANKS[rank], f"head {head}")
        canvas.arrow([(380, middle), (408, middle)])
        canvas.box(410, middle - 45, 66, 90, RANKS[rank], "W_o", size=22)
        canvas.arrow([(478, middle), (g, middle), (g, line + way)])
    for x, name in ((f, "f"), (g, "g")):
        canvas.box(x - 20, line - 22, 40, 44, "none", name, size=26, border=_TALK, thick=3)
    canvas.arrow([(g + 22, line), (g + 46, line)])
    canvas.box(g + 48, line - 42, 50, 84, WHOLE, "Z", size=24)
    for x, caption in (
        (199, ("W_q, W_k, W_v:", "columns cut")),
        (334, ("attention", "by head")),
        (446, ("W_o:", "rows cut")),
    ):
        canvas.lines(x, 418, caption)
    canvas.text(10, 482, "f: backward an all-reduce", size=18, anchor="start", fill=_TALK, bold=True)
    canvas.text(630, 482, "g: forward an all-reduce", size=18, anchor="end", fill=_TALK, bold=True)
    canvas.text(320, 518, _SHARED[query_groups], size=18)
    return Drawing(
        canvas,
        "Attention with four heads on two ranks. X goes through f to both; each has the columns of query, key and "
        f"value for two heads, computes these heads whole and multiplies by its rows of W_o; g adds the results. Here "
        f"{_SHARED[query_groups]}.",
    )


def heads_of(rank: int) -> list[int]:
    """The query heads that a rank computes."""
    each = _HEADS // _RANKS
    return list(range(rank * each, (rank + 1) * each))


def _projections(canvas: Canvas, left: float, middle: float, rank: int, query_groups: int) -> None:
    shared = sorted({head * query_groups // _HEADS for head in heads_of(rank)})
    for row, letter in enumerate("qkv"):
        y = middle - 68 + 48 * row
        canvas.text(left - 22, y + 20, f"W_{letter}", size=18)
        heads = heads_of(rank) if letter == "q" else shared
        wide = 72 / len(heads)
        on_both = letter != "q" and query_groups < _RANKS
        for place, head in enumerate(heads):
            canvas.box(left + place * wide, y, wide, 40, WHOLE if on_both else RANKS[rank], str(head))


def fused_qkv() -> Drawing:
    """Where to cut a fused query, key and value matrix: stored in three blocks, and stored head by head."""
    canvas = Canvas(640, 462)
    canvas.text(32, 20, "Stored in three blocks", anchor="start", bold=True)
    canvas.text(608, 20, "GPT-2, Baichuan2", size=18, anchor="end")
    _strip(canvas, 32, 44, in_blocks(_HEADS))
    _cut(canvas, 34, 98)
    canvas.text(176, 110, "first half: no values", size=18)
    canvas.text(464, 110, "second half: no queries", size=18)
    canvas.text(32, 158, "So cut each block:", size=18, anchor="start")
    for rank in range(_RANKS):
        x = 32 if rank == 0 else 328
        own = [(letter, head) for letter, head in in_blocks(_HEADS) if head in heads_of(rank)]
        _strip(canvas, x, 178, own, wide=46.7)
        canvas.text(x + 140, 236, f"rank {rank}: its heads, whole", size=18)
    canvas.line([(0, 270), (640, 270)], thick=0.8, dashed=True)
    canvas.text(32, 300, "Stored head by head", anchor="start", bold=True)
    canvas.text(608, 300, "Megatron, GPT-NeoX, BLOOM", size=18, anchor="end")
    _strip(canvas, 32, 324, head_by_head(_HEADS))
    _cut(canvas, 314, 378)
    for rank in range(_RANKS):
        canvas.text(176 + 288 * rank, 390, f"rank {rank}: its heads, whole", size=18)
    legend(canvas, 32, 434, {"rank 0 needs it": RANKS[0], "rank 1 needs it": RANKS[1]})
    canvas.line([(478, 422), (478, 446)], thick=5)
    canvas.text(492, 434, "equal pieces", size=18, anchor="start")
    return Drawing(
        canvas,
        "The rows of a fused query, key and value matrix for four heads, in the colour of the rank that needs each; a "
        "black bar cuts them in equal pieces. Stored as all queries, all keys, all values, "
        "a cut in the middle gives one rank no values and the other no queries, so each block is cut by heads. Stored "
        "head by head, the cut in the middle is right.",
    )


def in_blocks(heads: int) -> list[tuple[str, int]]:
    """(letter, head) of each row: all queries, then all keys, then all values."""
    return [(letter, head) for letter in "qkv" for head in range(heads)]


def head_by_head(heads: int) -> list[tuple[str, int]]:
    """(letter, head) of each row: query, key and value of the first head, then of the next."""
    return [(letter, head) for head in range(heads) for letter in "qkv"]


def _strip(canvas: Canvas, x: float, y: float, rows: list[tuple[str, int]], wide: float = 48) -> None:
    for place, (letter, head) in enumerate(rows):
        owner = RANKS[head * _RANKS // _HEADS]
        canvas.box(x + place * wide, y, wide, 40, owner, letter + SUBSCRIPTS[head], thick=1)


def _cut(canvas: Canvas, top: float, bottom: float) -> None:
    """A bar that cuts the rows into two equal pieces."""
    canvas.line([(320, top), (320, bottom)], thick=5)
