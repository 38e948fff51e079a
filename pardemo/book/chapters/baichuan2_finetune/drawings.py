"""LoRA beside a weight, and the way of a fine-tune's data."""

from collections.abc import Sequence

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import DONE, KEPT, SHADES, WHOLE
from pardemo.draw.parts import legend
from pardemo.formulas import memory

#: W_pack of Baichuan2-13B, and the article's rank.
OUT, IN, RANK = 15_360, 5_120, 8
_FROZEN, _TRAINED, _TALK = SHADES["frozen parameters"], KEPT["parameters"], DONE["communication"]


@drawing(606)
def lora(canvas: Canvas) -> None:
    """LoRA: x goes through the frozen weight W and, beside it, through lora_A and lora_B, two thin matrices of inner
    width r; the results are added. Only lora_A and lora_B have gradients and optimizer states."""
    canvas.box(14, 142, 46, 120, KEPT["activations"], "x", size=24)
    canvas.arrow([(62, 184), (92, 184), (92, 112), (154, 112)])
    canvas.arrow([(62, 220), (92, 220), (92, 292), (124, 292)])
    canvas.text(237, 14, "out × in, frozen")
    canvas.box(157, 32, 160, 160, _FROZEN, "W", size=30)
    canvas.box(127, 276, 160, 32, _TRAINED, "lora_A", size=22)
    canvas.text(207, 328, "r × in")
    canvas.arrow([(290, 292), (348, 292)])
    canvas.box(351, 212, 32, 160, _TRAINED)
    canvas.text(393, 322, "lora_B", "start", size=22)
    canvas.lines(393, 346, ["out × r,", "zero at the start"], "start")
    canvas.arrow([(320, 112), (482, 112)])
    canvas.arrow([(386, 292), (505, 292), (505, 136)])
    canvas.lines(515, 214, ["times", "lora_alpha/r"], "start")
    canvas.box(485, 92, 40, 40, "none", "+", size=26)
    canvas.arrow([(528, 112), (568, 112)])
    canvas.box(571, 52, 46, 120, KEPT["activations"], "y", size=24)
    canvas.text(14, 404, "Kept for each parameter, in bytes:", "start")
    canvas.text(14, 440, "W", "start", bold=True, size=20)
    canvas.box(180, 424, 44, 32, _FROZEN, "2", thick=1, size=20)
    canvas.text(234, 440, "no gradient, no optimizer states", "start")
    canvas.text(14, 480, "lora_A, lora_B", "start", bold=True, size=20)
    x, kinds = 180, ("parameters", "gradients", "optimizer states")
    for kind, nbytes in zip(kinds, memory.ADAM, strict=True):
        canvas.box(x, 464, 22 * nbytes, 32, KEPT[kind], str(nbytes), thick=1, size=20)
        x += 22 * nbytes
    legend(canvas, 14, 528, {name: KEPT[name] for name in kinds})
    sizes = f"On Baichuan2-13B's W_pack: out is {OUT:,}, in is {IN:,},"
    canvas.lines(14, 562, [sizes, f"and r is {RANK}. The boxes are not to scale."], "start")


#: A sample as the fine-tune encodes it: the user's piece, the text, the assistant's piece, the headline, the end.
TOKENS = ("195", "n₁", "n₂", "n₃", "196", "h₁", "h₂", "h₃", "2")
PROMPT = 5  # so many of them have no label


@drawing(662)
def finetune_flow(canvas: Canvas) -> None:
    """The fine-tune's data: a row of news and headline becomes tokens; the prompt's labels are −100, so only the
    headline and its end count in the loss. Gradients exist for LoRA's matrices alone; ZeRO-2 leaves each rank its part
    of their average, the optimizer updates them, and they are gathered for the next batch. In the end they are the
    adapter, merged into W or loaded beside it for predictions."""
    for y, name in ((32, "row"), (90, "tokens"), (148, "labels")):
        canvas.text(76, y, name, "end")
    canvas.box(145, 12, 178, 40, "none", "task and news")
    canvas.box(389, 12, 178, 40, "none", "headline")
    for index, token in enumerate(TOKENS):
        x, counts = 84 + 61 * index, index >= PROMPT
        canvas.box(x, 70, 56, 40, "none", token)
        canvas.box(x, 128, 56, 40, "none", token if counts else "−100", thick=3 if counts else 1, bold=counts)
    canvas.text(236.5, 188, "the prompt: no labels")
    canvas.text(511, 188, "learned from")
    y = 258  # of the training loop
    canvas.arrow([(112, y - 86), (112, y - 3)])
    canvas.text(124, y - 26, "model with LoRA", "start")
    canvas.text(248, y + 18, "forward")
    canvas.text(411, y - 8, "backward")
    canvas.box(14, y, 196, 76)
    canvas.box(24, y + 10, 96, 56, _FROZEN, "W", size=24)
    canvas.box(130, y + 10, 70, 56, _TRAINED, "LoRA", size=20)
    canvas.arrow([(213, y + 38), (286, y + 38)], DONE["forward"])
    canvas.box(289, y + 13, 90, 50, "none", "loss", size=20)
    canvas.arrow([(382, y + 38), (440, y + 38)], DONE["backward"])
    canvas.box(443, y + 13, 187, 50, KEPT["gradients"], "LoRA's gradients", size=19)
    canvas.arrow([(536, y + 66), (536, y + 145)], _TALK)
    canvas.text(526, y + 106, "ZeRO-2: averaged", "end", fill=_TALK, bold=True)
    canvas.box(443, y + 148, 187, 50, KEPT["gradients"], "each rank's part", size=19)
    canvas.arrow([(440, y + 173), (400, y + 173)])
    canvas.box(277, y + 148, 120, 50, KEPT["optimizer states"], "optimizer", size=19)
    canvas.arrow([(274, y + 173), (141, y + 173)], _TALK)
    canvas.text(207, y + 152, "all-gather", fill=_TALK, bold=True)
    canvas.box(50, y + 148, 88, 50, _TRAINED, "LoRA", size=20)
    canvas.arrow([(94, y + 145), (94, y + 79)])
    canvas.text(106, y + 106, "next batch", "start")
    y = 520  # of the adapter
    canvas.arrow([(94, y - 61), (94, y - 3)])
    canvas.text(106, y - 32, "at the end: the adapter, a small file", "start")
    canvas.box(50, y, 88, 50, _TRAINED, "LoRA", size=20)
    canvas.arrow([(141, y + 25), (246, y + 25)])
    canvas.text(194, y + 8, "merge")
    canvas.box(249, y, 170, 50, _FROZEN, "W, LoRA added")
    canvas.arrow([(94, y + 53), (94, y + 109), (246, y + 109)])
    canvas.text(172, y + 92, "or load")
    canvas.box(249, y + 84, 80, 50, _FROZEN, "W", size=24)
    canvas.box(339, y + 84, 80, 50, _TRAINED, "LoRA", size=20)
    canvas.arrow([(422, y + 25), (460, y + 25), (460, y + 56), (496, y + 56)])
    canvas.arrow([(422, y + 109), (460, y + 109), (460, y + 78), (496, y + 78)])
    canvas.box(499, y + 42, 131, 50, "none", "prediction", size=19)


LABELLED = KEPT["gradients"]
#: How tokens that are no characters of the text are shown: Baichuan2's pieces of the two roles, EOS, a line's end.
NAMES = {"<reserved_106>": "user:", "<reserved_107>": "assistant:", "</s>": "end", "\n": "↵"}


@drawing()
def labelled_tokens(canvas: Canvas, pieces: Sequence[str], labels: Sequence[bool]) -> str:
    """A sample's tokens in reading order, line by line; coloured are those that have a label.

    Args:
        pieces: each token, as the tokenizer names it. labels: whether it has a label.
    """
    pieces = [NAMES.get(piece, piece) for piece in pieces]
    places, x, y = [], 4, 30
    for piece in pieces:
        width = 37 if len(piece) == 1 else 12 * len(piece) + 8
        if x + width > 636:  # the next line
            x, y = 4, y + 46
        places.append((x, y, width - 4))
        x += width
    canvas.height = y + 46
    legend(canvas, 4, 12, {"the prompt: read only": WHOLE, "has a label: counts in the loss": LABELLED})
    for (x, y, width), piece, counts in zip(places, pieces, labels, strict=True):
        size = 22 if len(piece) == 1 else 18
        canvas.box(x, y, width, 38, LABELLED if counts else WHOLE, piece, size=size, thick=2.5 if counts else 1)
    counted = sum(labels)
    return (
        f"The {len(pieces)} tokens of a sample: {''.join(pieces)}. The last {counted} of them, "
        f"{''.join(pieces[-counted:])}, have a label and are coloured; the prompt before them has none."
    )


@drawing(212)
def cut_tails(canvas: Canvas, prompt: int, answer: int, limit: int) -> str:
    """A sample that is too long: prompt and answer each lose their tails, in proportion; the end token is lost."""
    total = prompt + answer
    unit = 620 / total
    first, second = (limit * count // total for count in (prompt, answer))
    canvas.text(10, 16, f"{total:,} tokens", "start")
    for x, count, kept, fill in ((10, prompt, first, WHOLE), (10 + prompt * unit, answer, second, LABELLED)):
        canvas.box(x, 34, kept * unit, 46, fill, f"{kept:,}", size=20)
        canvas.box(x + kept * unit, 34, (count - kept) * unit, 46, "none", "cut", dashed=True)
    canvas.text(10, 100, f"prompt: {prompt:,}", "start")
    canvas.text(630, 100, f"answer, with its end token: {answer:,}", "end")
    canvas.text(10, 136, f"cutoff_len {limit:,}", "start")
    canvas.box(10, 154, first * unit, 46, WHOLE, f"{first:,}", size=20)
    canvas.box(10 + first * unit, 154, second * unit, 46, LABELLED, f"{second:,}", size=20)
    canvas.text(20 + (first + second) * unit, 177, "no end token: nothing says stop", "start")
    return (
        f"A prompt of {prompt:,} tokens and an answer of {answer:,}, cut to {limit:,}: each keeps its head, {first:,} "
        f"and {second:,}, and the answer loses its end token."
    )


def common_in_order(first: Sequence[str], second: Sequence[str]) -> list[tuple[int, int]]:
    """A longest common subsequence of two lists of words, as pairs of their places."""
    best: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for i in range(len(first), -1, -1):
        for j in range(len(second), -1, -1):
            if i == len(first) or j == len(second):
                best[i, j] = []
            elif first[i] == second[j]:
                best[i, j] = [(i, j), *best[i + 1, j + 1]]
            else:
                best[i, j] = max(best[i + 1, j], best[i, j + 1], key=len)
    return best[0, 0]
