"""The colours of all drawings and charts: each has one meaning, in every chapter.

The first eight are Okabe & Ito's, but for the purple: colour-blind readers tell them apart. What belongs to one of them
is a darker or lighter shade of it.
"""

#: Of what a rank keeps.
KEPT = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer states": "#009E73",
    "activations": "#CC79A7",
}
OTHER = "#8C8C8C"  # what has no colour of its own
#: Shades of these: what the planner tells apart, and what LoRA freezes.
SHADES = {
    "frozen parameters": "#5B7C99",
    "gathered parameters": "#003F63",
    "buckets": "#A36F00",
    "logits": "#8A4A70",
    "temporaries": OTHER,
    "held between steps": "#9DB17C",
}
#: Of what a rank does.
DONE = {
    "forward": "#56B4E9",
    "backward": "#7A68B3",
    "weight gradients": "#A99BDB",  # where that part of the backward is apart
    "communication": "#D55E00",
    "idle": "#C8C8C8",
}
#: Forward and backward together; what arrives, where it is told apart from what is sent.
COMPUTED, RECEIVED = "#6B8ECF", "#F2A679"
#: Whose something is: light, so that dark text can stand on them; the rank's number stands beside.
RANKS = ("#A6CEE3", "#FDBF6F", "#B2DF8A", "#CAB2D6", "#FB9A99", "#FFFF99", "#A9E2DA", "#E0B48C")
WHOLE = "#FFFFFF"  # what every rank has
#: Ways to do one thing that a chart compares, each with a marker of its own.
WAYS = {"ring": "#332288", "parameter server": "#882255", "torch": "#999933", "every few steps": "#661100"}
PREDICTED = "#000000"
KNOWN, NEW = ("#4D4D4D", "#949494"), "#DDCC77"  # scores on what was trained on, in greys; on what is new
#: A claim's verdict, as in the report.
VERDICTS = {"holds": "#00694C", "differs": "#B35900", "off": "#5C5C5C", "fails": "#B00020"}

INK, PAPER = "#1A1A1A", "#FFFFFF"  # text on a colour, in a dark page too
GRID = "#E6E6E6"  # of charts

#: Every colour that means something, by its meaning.
MEANINGS = {
    **KEPT,
    **SHADES,
    **DONE,
    "compute": COMPUTED,
    "receive": RECEIVED,
    **{f"rank {rank}": colour for rank, colour in enumerate(RANKS)},
    "on every rank": WHOLE,
    **WAYS,
    "predicted": PREDICTED,
    "new": NEW,
    **VERDICTS,
}


def rank_colour(rank: int) -> str:
    return RANKS[rank % len(RANKS)]


def ink_on(fill: str) -> str:
    """The colour of text on a box: dark or white, whichever contrasts more; the page's own where there is no fill."""
    if fill == "none":
        return "currentColor"
    return max((INK, PAPER), key=lambda ink: contrast(ink, fill))


def contrast(first: str, second: str) -> float:
    """The contrast of two colours, from 1 to 21, as WCAG 2 defines it."""
    dark, light = sorted(_luminance(colour) for colour in (first, second))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
