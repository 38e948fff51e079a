"""A forward and a backward whose messages take time: one after the other, and together as a pair."""

from itertools import accumulate

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE
from pardemo.draw.parts import legend

_LEFT, _SCALE = 100, 1.38
_COMPUTE, _MESSAGE = {"forward": 44, "backward": 66}, 40  # how long one part of each takes
#: The halves of a forward and of a backward, behind each of which a message travels.
_IN_TURN, _TOGETHER = ("forward", "forward", "backward", "backward"), ("forward", "backward") * 2


def a_pair() -> Drawing:
    """What a GPU and its network do during a forward of one micro-batch and a backward of another, of a layer that
    sends tokens away and gets them back: one after the other the GPU waits for each message, together for none."""
    canvas = Canvas(640, 318)
    in_turn = list(accumulate((_COMPUTE[kind] + _MESSAGE for kind in _IN_TURN), initial=0))
    at_once = list(accumulate((_COMPUTE[kind] for kind in _TOGETHER), initial=0))
    _case(canvas, 14, "one after the other: the GPU waits for each message", _IN_TURN, in_turn)
    _case(canvas, 154, "together: while one sends, the other computes", _TOGETHER, at_once)
    legend(canvas, 20, 296, {name: DONE[name] for name in ("forward", "backward", "communication", "idle")})
    return Drawing(
        canvas,
        "A forward and a backward, each of two parts with a message behind each part. One after the other the GPU is "
        "idle during all four messages. Together it computes a part of one while the message of the other travels, and "
        "is done sooner.",
    )


def _case(canvas: Canvas, y: float, title: str, kinds: tuple[str, ...], begins: list[float]) -> None:
    canvas.text(4, y, title, size=18, anchor="start", bold=True)
    for lane, name in ((y + 22, "GPU"), (y + 72, "network")):
        canvas.text(4, lane + 20, name, size=18, anchor="start")
    ends = [begin + _COMPUTE[kind] for begin, kind in zip(begins, kinds, strict=False)]
    for end, following in zip(ends, begins[1:], strict=True):
        if following > end:
            canvas.box(_LEFT + end * _SCALE, y + 22, (following - end) * _SCALE, 40, DONE["idle"], border=DONE["idle"])
    for kind, begin, end in zip(kinds, begins, ends, strict=False):
        of = {"forward": "F", "backward": "B"}[kind]
        canvas.box(_LEFT + begin * _SCALE, y + 22, (end - begin) * _SCALE, 40, DONE[kind], of, size=18)
        canvas.box(_LEFT + end * _SCALE, y + 74, _MESSAGE * _SCALE, 36, DONE["communication"], f"{of}'s", size=18)
