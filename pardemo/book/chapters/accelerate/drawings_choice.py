"""Which configuration for a model and its GPUs: the questions in their order, and what each answer means."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.flowchart import GAP, HIGH, WIDE, box, down, yes
from pardemo.draw.palette import GRID, RANKS, WHOLE

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
    canvas = Canvas(640, 12 + len(rule) * (HIGH + GAP) + 24)
    for number, (asked, answer, form) in enumerate(rule):
        y = 4.0 + number * (HIGH + GAP)
        box(canvas, 8, y, WIDE, asked)
        yes(canvas, y, answer, FORMS[form])
        down(canvas, y, "no")
    box(canvas, 8, 4.0 + len(rule) * (HIGH + GAP), WIDE, ("more GPUs",), high=28)
    return Drawing(
        canvas,
        "Six questions. More GPUs than samples: tensor and pipeline parallelism. The model states and a sample fit a "
        "GPU: DDP. Their shards in one host: FSDP2, and HSDP on more hosts. Shards over all hosts: FSDP2. The states "
        "alone: tensor and pipeline parallelism. The weights, with the rest on the hosts: offload. Else more GPUs.",
    )
