"""Attention and a block under tensor parallelism: by heads, fused, grouped, and where gradients are summed."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, WHOLE
from pardemo.draw.parts import SUBSCRIPTS, legend

_TALK = DONE["communication"]
_HEADS, _RANKS = 4, 2
_SHARED = {
    4: "each query head has a head of keys and values of its own",
    2: "two query heads share a head of keys and values",
    1: "one head of keys and values for all: both ranks keep it",
}


@drawing(536)
def attention_heads(canvas: Canvas, query_groups: int = 4) -> str:
    """Attention with four heads on two ranks: each computes whole heads, without the other.

    Args:
        query_groups: heads of key and value. 4: one for each query head; 2: one for two of them; 1: one for all.

    Raises:
        ValueError: another number of heads of key and value.
    """
    if query_groups not in _SHARED:
        raise ValueError(f"four query heads share 1, 2 or 4 heads of key and value, not {query_groups}")
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
            canvas.box(286, middle - 50 + 54 * place, 92, 46, RANKS[rank], f"head {head}", size=20)
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
    canvas.text(10, 482, "f: backward an all-reduce", "start", fill=_TALK, bold=True)
    canvas.text(630, 482, "g: forward an all-reduce", "end", fill=_TALK, bold=True)
    canvas.text(320, 518, _SHARED[query_groups])
    return (
        "Attention with four heads on two ranks. X goes through f to both; each has the columns of query, key and "
        f"value for two heads, computes these heads whole and multiplies by its rows of W_o; g adds the results. Here "
        f"{_SHARED[query_groups]}."
    )


def heads_of(rank: int) -> list[int]:
    """The query heads that a rank computes."""
    each = _HEADS // _RANKS
    return list(range(rank * each, (rank + 1) * each))


def _projections(canvas: Canvas, left: float, middle: float, rank: int, query_groups: int) -> None:
    shared = sorted({head * query_groups // _HEADS for head in heads_of(rank)})
    for row, letter in enumerate("qkv"):
        y = middle - 68 + 48 * row
        canvas.text(left - 22, y + 20, f"W_{letter}")
        heads = heads_of(rank) if letter == "q" else shared
        wide = 72 / len(heads)
        on_both = letter != "q" and query_groups < _RANKS
        for place, head in enumerate(heads):
            canvas.box(left + place * wide, y, wide, 40, WHOLE if on_both else RANKS[rank], str(head), size=20)


@drawing(462)
def fused_qkv(canvas: Canvas) -> None:
    """The rows of a fused query, key and value matrix for four heads, in the colour of the rank that needs each; a
    black bar cuts them in equal pieces. Stored as all queries, all keys, all values, a cut in the middle gives one rank
    no values and the other no queries, so each block is cut by heads. Stored head by head, the cut in the middle is
    right."""
    canvas.text(32, 20, "Stored in three blocks", "start", bold=True, size=20)
    canvas.text(608, 20, "GPT-2, Baichuan2", "end")
    _strip(canvas, 32, 44, in_blocks(_HEADS))
    _cut(canvas, 34, 98)
    canvas.text(176, 110, "first half: no values")
    canvas.text(464, 110, "second half: no queries")
    canvas.text(32, 158, "So cut each block:", "start")
    for rank in range(_RANKS):
        x = 32 if rank == 0 else 328
        own = [(letter, head) for letter, head in in_blocks(_HEADS) if head in heads_of(rank)]
        _strip(canvas, x, 178, own, wide=46.7)
        canvas.text(x + 140, 236, f"rank {rank}: its heads, whole")
    canvas.line([(0, 270), (640, 270)], thick=0.8, dashed=True)
    canvas.text(32, 300, "Stored head by head", "start", bold=True, size=20)
    canvas.text(608, 300, "Megatron, GPT-NeoX, BLOOM", "end")
    _strip(canvas, 32, 324, head_by_head(_HEADS))
    _cut(canvas, 314, 378)
    for rank in range(_RANKS):
        canvas.text(176 + 288 * rank, 390, f"rank {rank}: its heads, whole")
    legend(canvas, 32, 434, {"rank 0 needs it": RANKS[0], "rank 1 needs it": RANKS[1]})
    canvas.line([(478, 422), (478, 446)], thick=5)
    canvas.text(492, 434, "equal pieces", "start")


def in_blocks(heads: int) -> list[tuple[str, int]]:
    """(letter, head) of each row: all queries, then all keys, then all values."""
    return [(letter, head) for letter in "qkv" for head in range(heads)]


def head_by_head(heads: int) -> list[tuple[str, int]]:
    """(letter, head) of each row: query, key and value of the first head, then of the next."""
    return [(letter, head) for head in range(heads) for letter in "qkv"]


def _strip(canvas: Canvas, x: float, y: float, rows: list[tuple[str, int]], wide: float = 48) -> None:
    for place, (letter, head) in enumerate(rows):
        owner = RANKS[head * _RANKS // _HEADS]
        canvas.box(x + place * wide, y, wide, 40, owner, letter + SUBSCRIPTS[head], thick=1, size=20)


def _cut(canvas: Canvas, top: float, bottom: float) -> None:
    """A bar that cuts the rows into two equal pieces."""
    canvas.line([(320, top), (320, bottom)], thick=5)


#: From the input on: a part (whether it is cut, its name, a note on dropout), or one of the operators f and g.
BLOCK = (
    (False, "norm", ""),
    "f",
    (True, "attention, by heads", "its own random numbers"),
    "g",
    (False, "bias, dropout, add, norm", "the same random numbers"),
    "f",
    (True, "MLP, by features", ""),
    "g",
    (False, "bias, dropout, add", "the same random numbers"),
)
_LEFT, _WIDE, _HIGH = (300, 478), 146, 52
_OPERATOR_LABELS = {"f": "f: backward an all-reduce", "g": "g: forward an all-reduce"}


@drawing(614)
def block_cut(canvas: Canvas) -> None:
    """A transformer block on two ranks. Norms, biases after g, dropout and the additions are whole on both; attention
    is cut by heads and the MLP by features, each between f, which all-reduces backward, and g, which all-reduces
    forward. Dropout outside the cut parts takes the same random numbers on both ranks, inside them a rank's own."""
    for rank, x in enumerate(_LEFT):
        canvas.text(x + _WIDE / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for step in BLOCK:
        if isinstance(step, str):
            canvas.box(
                _LEFT[0],
                y,
                _LEFT[1] + _WIDE - _LEFT[0],
                34,
                "none",
                _OPERATOR_LABELS[step],
                border=_TALK,
                thick=3,
                size=20,
            )
            y += 44
            continue
        cut, name, note = step
        canvas.text(16, y + (16 if note else _HIGH / 2), name, "start", size=19, bold=True)
        if note:
            canvas.text(16, y + 40, note, "start")
        for rank, x in enumerate(_LEFT):
            _part(canvas, x, y, cut, rank)
        y += _HIGH + 10
    canvas.lines(
        16,
        y + 18,
        (
            "White: all tokens, all features, on both ranks.",
            "Coloured: all tokens, and this rank's heads or features.",
            "Dashed: what the other rank has.",
        ),
        "start",
    )


def _part(canvas: Canvas, x: float, y: float, cut: bool, rank: int) -> None:
    if not cut:
        canvas.box(x, y, _WIDE, _HIGH, WHOLE)
        return
    half = _WIDE / 2
    canvas.box(x, y, _WIDE, _HIGH, thick=1, dashed=True)
    canvas.box(x + rank * half, y, half, _HIGH, RANKS[rank], str(rank), size=20)


_GROUP_RANKS, _QUERIES, _GROUP_SHARED, _GROUP_WIDE = 4, 8, 2, 66


@drawing(320)
def shared_heads(canvas: Canvas) -> None:
    """Eight query heads and two key and value heads on four ranks. Each rank has two query heads; ranks 0 and 1 hold
    the same key and value head, ranks 2 and 3 the other, and each pair adds the gradients of its replicas."""
    canvas.text(320, 62, "each rank its own query heads")
    canvas.text(320, 154, "and a replica of the head of keys and values that they ask")
    for rank in range(_GROUP_RANKS):
        x = 10 + 160 * rank
        canvas.text(x + _GROUP_WIDE, 20, f"rank {rank}", size=22, bold=True)
        for place, head in enumerate(queries_of(rank)):
            canvas.box(x + place * _GROUP_WIDE, 80, _GROUP_WIDE, 44, RANKS[rank], "q" + SUBSCRIPTS[head], size=20)
        _replica(canvas, x, rank)
    for first in range(0, _GROUP_RANKS, _GROUP_RANKS // _GROUP_SHARED):
        left, right = (10 + 160 * rank + _GROUP_WIDE for rank in (first, first + 1))
        canvas.arrow([(left, 234), (left, 264), (right, 264), (right, 234)], _TALK, both=True)
        canvas.text((left + right) / 2, 294, "sum of the gradients", size=19, fill=_TALK, bold=True)


def _replica(canvas: Canvas, x: float, rank: int) -> None:
    """A rank's replica of a head of keys and values, and a band that names the other rank that holds it."""
    for place, letter in enumerate("kv"):
        canvas.box(
            x + place * _GROUP_WIDE,
            172,
            _GROUP_WIDE,
            32,
            RANKS[rank],
            letter + SUBSCRIPTS[shared_of(rank)],
            size=20,
        )
    (other,) = (other for other in range(_GROUP_RANKS) if shared_of(other) == shared_of(rank) and other != rank)
    canvas.box(x, 204, 2 * _GROUP_WIDE, 26, RANKS[other], f"also rank {other}")


def queries_of(rank: int) -> list[int]:
    """The query heads that a rank computes."""
    each = _QUERIES // _GROUP_RANKS
    return list(range(rank * each, (rank + 1) * each))


def shared_of(rank: int) -> int:
    """The head of keys and values that a rank holds a replica of."""
    return rank * _GROUP_SHARED // _GROUP_RANKS


_GRADIENT = KEPT["gradients"]
#: Title, number of times f occurs.
WAYS = (("one f for all three", 1), ("an f for each", 3))
_ROW, _EACH, _LOW = 186, 48, 38  # a way's height; from one projection to the next; a box


@drawing()
def one_sum_or_three(canvas: Canvas) -> None:
    """Backward, each rank has three gradients of X, through W_q, W_k and W_v. With one f it adds them first and
    all-reduces the result: 2φ. With an f for each, it all-reduces all three and adds them then: 6φ."""
    canvas.height = 2 * _ROW + 34
    for number, (title, all_reduces) in enumerate(WAYS):
        top = 14 + number * _ROW
        canvas.text(10, top, title, "start", size=20, bold=True)
        canvas.text(630, top, f"backward {2 * all_reduces}φ", "end", size=20, fill=_TALK, bold=True)
        _way(canvas, top + 22, all_reduces)
    caption = "f, backward: an all-reduce of b·s·h numbers"
    canvas.text(10, 2 * _ROW + 16, caption, "start")


def _way(canvas: Canvas, top: float, all_reduces: int) -> None:
    middle = top + _EACH + _LOW / 2
    plus, f, end = (250, 390, 496) if all_reduces == 1 else (400, 250, 496)
    for row, letter in enumerate("qkv"):
        y = top + row * _EACH
        canvas.box(10, y, 150, _LOW, _GRADIENT, f"through W_{letter}")
        if all_reduces == 3:
            _f(canvas, f, y)
        begin, level = (f + 64, y + _LOW / 2) if all_reduces == 3 else (160, y + _LOW / 2)
        if all_reduces == 3:
            canvas.arrow([(162, level), (f - 2, level)])
        canvas.arrow([(begin + 2, level), (plus - 2 - 8 * (row != 1), middle + (row - 1) * 14)])
    canvas.box(plus, middle - 22, 54, 44, "none", "+", size=26, thick=2)
    if all_reduces == 1:
        canvas.arrow([(plus + 56, middle), (f - 2, middle)])
        _f(canvas, f, middle - _LOW / 2)
    canvas.arrow([((f + 64 if all_reduces == 1 else plus + 54) + 2, middle), (end - 2, middle)])
    canvas.box(end, middle - _LOW / 2, 134, _LOW, _GRADIENT, "X's gradient")


def _f(canvas: Canvas, x: float, y: float) -> None:
    canvas.box(x, y, 64, _LOW, "none", "f: 2φ", border=_TALK, thick=3)
