"""Attention and a block under tensor parallelism: by heads, fused, grouped, and where gradients are summed."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, WHOLE
from pardemo.draw.parts import SUBSCRIPTS, half_of, legend

_TALK = DONE["communication"]
_HEADS, _RANKS = 4, 2


@drawing(506)
def attention_heads(canvas: Canvas) -> str:
    """Attention with four heads on two ranks: each computes whole heads, without the other."""
    f, g, line = 100, 532, 202
    canvas.box(10, line - 42, 50, 84, WHOLE, "X", size=24)
    canvas.arrow([(62, line), (f - 22, line)])
    for rank in range(_RANKS):
        middle, way = line + (94 if rank else -86), 24 if rank else -24
        canvas.text(320, 20 if rank == 0 else 382, f"rank {rank}", size=22, bold=True)
        canvas.arrow([(f, line + way), (f, middle), (134, middle)])
        for row, letter in enumerate("qkv"):
            y = middle - 68 + 48 * row
            canvas.text(162, y + 20, f"W_{letter}")
            for index, head in enumerate(heads_of(rank)):
                canvas.box(184 + index * 36, y, 36, 40, RANKS[rank], str(head), size=20)
        canvas.box(138, middle - 73, 122, 146, thick=1)
        canvas.arrow([(262, middle), (284, middle)])
        for index, head in enumerate(heads_of(rank)):
            canvas.box(286, middle - 50 + 54 * index, 92, 46, RANKS[rank], f"head {head}", size=20)
        canvas.arrow([(380, middle), (408, middle)])
        canvas.box(410, middle - 45, 66, 90, RANKS[rank], "W_o", size=22)
        canvas.arrow([(478, middle), (g, middle), (g, line + way)])
    for x, name in ((f, "f"), (g, "g")):
        canvas.box(x - 20, line - 22, 40, 44, "none", name, size=26, border=_TALK, thick=3)
    canvas.arrow([(g + 22, line), (g + 46, line)])
    canvas.box(g + 48, line - 42, 50, 84, WHOLE, "Z", size=24)
    canvas.lines(199, 418, ("W_q, W_k, W_v:", "columns cut"))
    canvas.lines(334, 418, ("attention", "by head"))
    canvas.lines(446, 418, ("W_o:", "rows cut"))
    canvas.text(10, 482, "f: backward an all-reduce", "start", fill=_TALK, bold=True)
    canvas.text(630, 482, "g: forward an all-reduce", "end", fill=_TALK, bold=True)
    return (
        "Attention with four heads on two ranks. X goes through f to both; each has the columns of query, key and "
        "value for two heads, computes these heads whole and multiplies by its rows of W_o; g adds the results."
    )


def heads_of(rank: int) -> list[int]:
    """The query heads that a rank computes: two, of 4 on 2 ranks or of 8 on 4."""
    return [2 * rank, 2 * rank + 1]


@drawing(462)
def fused_qkv(canvas: Canvas) -> None:
    """The rows of a fused query, key and value matrix for four heads, in the colour of the rank that needs each; a
    black bar cuts them in equal pieces. Stored as all queries, all keys, all values, a cut in the middle gives one rank
    no values and the other no queries, so each block is cut by heads. Stored head by head, the cut in the middle is
    right."""
    canvas.text(32, 20, "Stored in three blocks", "start", bold=True, size=20)
    canvas.text(608, 20, "GPT-2, Baichuan2", "end")
    _strip(canvas, 32, 44, in_blocks(_HEADS))
    for top in (34, 314):  # a bar that cuts the rows into two equal pieces
        canvas.line([(320, top), (320, top + 64)], thick=5)
    canvas.text(176, 110, "first half: no values")
    canvas.text(464, 110, "second half: no queries")
    canvas.text(32, 158, "So cut each block:", "start")
    for rank in range(_RANKS):
        x = 32 if rank == 0 else 328
        held = [(letter, head) for letter, head in in_blocks(_HEADS) if head in heads_of(rank)]
        _strip(canvas, x, 178, held, wide=46.7)
        canvas.text(x + 140, 236, f"rank {rank}: its heads, whole")
    canvas.line([(0, 270), (640, 270)], thick=0.8, dashed=True)
    canvas.text(32, 300, "Stored head by head", "start", bold=True, size=20)
    canvas.text(608, 300, "Megatron, GPT-NeoX, BLOOM", "end")
    _strip(canvas, 32, 324, head_by_head(_HEADS))
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
    for index, (letter, head) in enumerate(rows):
        owner = RANKS[head * _RANKS // _HEADS]
        canvas.box(x + index * wide, y, wide, 40, owner, letter + SUBSCRIPTS[head], thick=1, size=20)


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


@drawing(614)
def block_cut(canvas: Canvas) -> None:
    """A transformer block on two ranks. Norms, biases after g, dropout and the additions are whole on both; attention
    is cut by heads and the MLP by features, each between f, which all-reduces backward, and g, which all-reduces
    forward. Dropout outside the cut parts takes the same random numbers on both ranks, inside them a rank's own."""
    lefts, wide, high = (300, 478), 146, 52
    for rank, x in enumerate(lefts):
        canvas.text(x + wide / 2, 20, f"rank {rank}", size=22, bold=True)
    y = 44.0
    for step in BLOCK:
        if isinstance(step, str):
            label = {"f": "f: backward an all-reduce", "g": "g: forward an all-reduce"}[step]
            canvas.box(lefts[0], y, 324, 34, "none", label, border=_TALK, thick=3, size=20)
            y += 44
            continue
        cut, name, note = step
        canvas.text(16, y + (16 if note else high / 2), name, "start", size=19, bold=True)
        if note:
            canvas.text(16, y + 40, note, "start")
        for rank, x in enumerate(lefts):
            if cut:
                half_of(canvas, x, y, wide, high, rank, str(rank))
            else:
                canvas.box(x, y, wide, high, WHOLE)
        y += high + 10
    canvas.text(16, y + 18, "White: all tokens, all features, on both ranks.", "start")
    canvas.text(16, y + 42, "Coloured: all tokens, and this rank's heads or features.", "start")
    canvas.text(16, y + 66, "Dashed: what the other rank has.", "start")


@drawing(320)
def shared_heads(canvas: Canvas) -> None:
    """Eight query heads and two key and value heads on four ranks. Each rank has two query heads; ranks 0 and 1 hold
    the same key and value head, ranks 2 and 3 the other, and each pair adds the gradients of its replicas."""
    canvas.text(320, 62, "each rank its own query heads")
    canvas.text(320, 154, "and a replica of the head of keys and values that they use")
    wide = 66
    for rank in range(4):
        x = 10 + 160 * rank
        canvas.text(x + wide, 20, f"rank {rank}", size=22, bold=True)
        for index, head in enumerate(heads_of(rank)):
            canvas.box(x + index * wide, 80, wide, 44, RANKS[rank], "q" + SUBSCRIPTS[head], size=20)
        for index, letter in enumerate("kv"):
            shared = letter + SUBSCRIPTS[shared_of(rank)]
            canvas.box(x + index * wide, 172, wide, 32, RANKS[rank], shared, size=20)
        (other,) = (other for other in range(4) if shared_of(other) == shared_of(rank) and other != rank)
        canvas.box(x, 204, 2 * wide, 26, RANKS[other], f"also rank {other}")
    for left in (76, 396):
        right = left + 160
        canvas.arrow([(left, 234), (left, 264), (right, 264), (right, 234)], _TALK, both=True)
        canvas.text((left + right) / 2, 294, "sum of the gradients", size=19, fill=_TALK, bold=True)


def shared_of(rank: int) -> int:
    """The head of keys and values, of 2, that a rank holds a replica of."""
    return rank // 2


#: Title, number of times f occurs.
WAYS = (("one f for all three", 1), ("an f for each", 3))


@drawing(406)
def one_sum_or_three(canvas: Canvas) -> None:
    """Backward, each rank has three gradients of X, through W_q, W_k and W_v. With one f it adds them first and
    all-reduces the result: 2φ. With an f for each, it all-reduces all three and adds them then: 6φ."""
    fill, high, end = KEPT["gradients"], 38, 496
    for number, (title, all_reduces) in enumerate(WAYS):
        top = 36 + 186 * number
        middle = top + 67
        canvas.text(10, top - 22, title, "start", size=20, bold=True)
        canvas.text(630, top - 22, f"backward {2 * all_reduces}φ", "end", size=20, fill=_TALK, bold=True)
        plus, f = (250, 390) if all_reduces == 1 else (400, 250)
        for row, letter in enumerate("qkv"):
            level = middle + 48 * (row - 1)
            canvas.box(10, level - high / 2, 150, high, fill, f"through W_{letter}")
            begin = 162
            if all_reduces == 3:
                canvas.box(f, level - high / 2, 64, high, "none", "f: 2φ", border=_TALK, thick=3)
                canvas.arrow([(162, level), (f - 2, level)])
                begin = f + 66
            canvas.arrow([(begin, level), (plus - 2 - 8 * (row != 1), middle + (row - 1) * 14)])
        canvas.box(plus, middle - 22, 54, 44, "none", "+", size=26, thick=2)
        begin = plus + 56
        if all_reduces == 1:
            canvas.arrow([(begin, middle), (f - 2, middle)])
            canvas.box(f, middle - high / 2, 64, high, "none", "f: 2φ", border=_TALK, thick=3)
            begin = f + 66
        canvas.arrow([(begin, middle), (end - 2, middle)])
        canvas.box(end, middle - high / 2, 134, high, fill, "X's gradient")
    canvas.text(10, 388, "f, backward: an all-reduce of b·s·h numbers", "start")
