"""Fewer bits: what a number's bits are for, what shares a scale, and how an error comes back."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, OTHER, WHOLE
from pardemo.draw.parts import legend

#: Formats by name: bits of the exponent and of the fraction, and what their largest number is, in words.
LAYOUTS = {
    "fp32": (8, 23, "3·10³⁸"),
    "bf16": (8, 7, "largest 3·10³⁸"),
    "E5M2": (5, 2, "FP8: largest 57,344"),
    "E4M3": (4, 3, "FP8: largest 448"),
    "int8": (0, 7, "whole numbers up to 127"),
    "E2M1": (2, 1, "FP4: largest 6"),
}
SCALES = (
    (64, "one scale for the tensor: FP8", "fp32"),
    (32, "one for each 32 numbers, a power of two: MXFP8", "2ᵏ"),
    (16, "one for each 16, and one for the tensor: NVFP4", "E4M3"),
)


@drawing(282)
def bits_of_a_number(canvas: Canvas) -> None:
    """The bits of a number, one box each. fp32: 1 for the sign, 8 for the exponent, 23 for the fraction. bf16: 1, 8 and
    7. E5M2: 1, 5 and 2. E4M3: 1, 4 and 3. int8: a sign and 7 bits. E2M1: 1, 2 and 1."""
    for row, (name, (exponent, fraction, words)) in enumerate(LAYOUTS.items()):
        x, y, wide = 84, 12 + 38 * row, 15
        canvas.text(x - 12, y + 13, name, "end", bold=True, size=20)
        for count, colour in ((1, DONE["idle"]), (exponent, OTHER), (fraction, WHOLE)):
            canvas.boxes([(x + wide * bit, y, wide, 26) for bit in range(count)], colour)
            x += wide * count
        canvas.text(x + 10, y + 13, words, "start")
    kinds = {"sign": DONE["idle"], "exponent: the range": OTHER, "fraction: how fine": WHOLE}
    legend(canvas, 84, 255, kinds, gap=12)


@drawing(332)
def scale_of_blocks(canvas: Canvas) -> None:
    """The same 64 numbers three times, one of them an outlier. With one scale for the tensor all 64 share the
    outlier's; with a scale for each 32 numbers half of them; with a scale for each 16 numbers a quarter."""
    left, each, numbers, outlier = 32, 9, 64, 21
    for row, (block, words, scale) in enumerate(SCALES):
        y = 14 + 100 * row
        canvas.text(left, y, words, "start")
        for first in range(0, numbers, block):
            shares = first <= outlier < first + block
            places = [(left + each * number, y + 48, each, 24) for number in range(first, first + block)]
            canvas.boxes(places, OTHER if shares else WHOLE, thick=0.6)
            canvas.box(left + each * first + 2, y + 18, each * block - 4, 26, KEPT["parameters"], scale)
        canvas.boxes([(left + each * outlier, y + 44, each, 32)], DONE["communication"])
    legend(canvas, left, 313, {"an outlier": DONE["communication"], "what shares its scale": OTHER})


@drawing(232)
def error_kept(canvas: Canvas) -> None:
    """On one rank: the gradients and what was lost so far are added; the sum is rounded to codes, which travel. The sum
    less what the codes say is what was lost, and is kept for the next step."""
    gradient, talk = KEPT["gradients"], DONE["communication"]
    canvas.box(14, 40, 132, 52, gradient, "gradients", size=20)
    canvas.box(196, 40, 132, 52, gradient, "sum", size=20)
    canvas.box(392, 40, 96, 52, WHOLE, "codes", size=20)
    canvas.box(546, 40, 84, 52, talk, "travel", size=20)
    canvas.arrow([(146, 66), (196, 66)])
    canvas.arrow([(328, 66), (392, 66)])
    canvas.arrow([(488, 66), (546, 66)], talk)
    canvas.text(360, 22, "rounded")
    canvas.box(196, 160, 132, 52, OTHER, "lost so far", size=20)
    canvas.arrow([(440, 92), (440, 186), (328, 186)])
    canvas.arrow([(262, 160), (262, 92)])
    canvas.text(282, 126, "added", "start")
    canvas.lines(456, 150, ("sum − codes:", "kept for the", "next step"), "start")
