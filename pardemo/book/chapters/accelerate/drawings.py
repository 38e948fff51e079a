"""Drawings of *Accelerate*: what ``prepare`` does, what a launcher hands over, two replicas in shards."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, ink_on
from pardemo.draw.parts import legend, parts

_SENT = DONE["communication"]


def prepare() -> Drawing:
    """What goes into ``prepare`` and what two ranks have afterwards, with FSDP2: half of each thing."""
    canvas = Canvas(640, 380)
    canvas.text(84, 16, "your script", bold=True)
    for rank in range(2):
        canvas.text(344 + 206 * rank, 16, f"rank {rank}", bold=True)
    rows = (("model", KEPT["parameters"], 72), ("optimizer", KEPT["optimizer states"], 72), ("batch", RANKS[0], 96))
    y = 40.0
    for name, fill, high in rows:
        middle = y + high / 2
        if name == "batch":
            _samples(canvas, 8, y, range(8), fill="both")
        else:
            parts(canvas, 8, y, 152, high, 2, range(2), fill)
        canvas.arrow([(172, middle), (248, middle)])
        for rank in range(2):
            x = 268 + 206 * rank
            if name == "batch":
                _samples(canvas, x, y, range(4 * rank, 4 * rank + 4), fill=RANKS[rank])
            else:
                parts(canvas, x, y, 152, high, 2, [rank], fill)
        canvas.text(210, middle - 18, name, size=18)
        y += high + 24
    canvas.text(8, y + 8, "half of the numbers, of Adam's states, of the samples", size=18, anchor="start")
    return Drawing(
        canvas,
        "prepare takes the model, the optimizer and the batches of the script. Under FSDP2 each of two ranks then has "
        "half of the parameters, half of the optimizer states, and four of the eight samples of each batch.",
    )


def launchers() -> Drawing:
    """Three ways to start one script on a node, and what then runs: only one of them reads the file."""
    canvas = Canvas(640, 400)
    rows = (
        ("python train.py", "tells nothing", ("alone",)),
        ("torchrun --nproc-per-node 4 train.py", "tells each its rank", ("DDP",) * 4),
        ("accelerate launch --config_file fsdp2.yaml train.py", "tells ranks and file", ("FSDP2",) * 4),
    )
    for number, (command, handed_over, runs) in enumerate(rows):
        y = 8 + 132 * number
        canvas.text(8, y + 12, command, size=18, anchor="start", bold=True)
        for line, word in enumerate(handed_over.split(" ", 1)):
            canvas.text(8, y + 56 + 24 * line, word, size=18, anchor="start")
        for place in range(4):
            x = 214 + 106 * place
            canvas.box(x, y + 40, 96, 54, RANKS[place] if place < len(runs) else "none", dashed=place >= len(runs))
            if place < len(runs):
                canvas.text(x + 48, y + 67, runs[place], fill=ink_on(RANKS[place]))
    return Drawing(
        canvas,
        "Started by python, one process runs alone and three GPUs idle. Started by torchrun with four processes, DDP "
        "runs. Only accelerate launch reads fsdp2.yaml and tells the four processes what it says: FSDP2.",
    )


def replicas_of_shards() -> Drawing:
    """Two nodes of two ranks with ``dp_replicate`` 2 and ``dp_shard`` 2: a replica in each node, in two shards."""
    canvas = Canvas(640, 330)
    for node in range(2):
        left = 8 + 356 * node
        canvas.box(left, 40, 268, 206)
        canvas.text(left + 134, 20, f"node {node}: one replica", bold=True)
        for rank in range(2):
            x = left + 22 + 130 * rank
            canvas.text(x + 47, 62, f"rank {2 * node + rank}", size=18)
            parts(canvas, x, 80, 94, 84, 2, [rank], KEPT["parameters"])
        canvas.arrow([(left + 70, 184), (left + 198, 184)], _SENT, 6, both=True)
        canvas.text(left + 134, 216, "dp_shard 2: 1½ Ψ", size=18)
    canvas.arrow([(280, 122), (360, 122)], _SENT, 3, both=True)
    canvas.text(320, 270, "between the nodes, dp_replicate 2: ½ Ψ a rank", size=18)
    legend(canvas, 8, 306, {"parameters": KEPT["parameters"], "sent by a rank in a step": _SENT})
    return Drawing(
        canvas,
        "Two nodes, each with a replica of the parameters in two shards. Inside a node a rank sends one and a half "
        "times the parameters to gather and reduce. Between nodes equal shards are all-reduced: half the parameters a "
        "rank.",
    )


def _samples(canvas: Canvas, x: float, y: float, numbers: range, fill: str) -> None:
    for number in range(8):
        at = (x, y + 12 * number, 152, 12)
        if number in numbers:
            canvas.boxes([at], RANKS[number // 4] if fill == "both" else fill, thick=0.8)
    if len(numbers) < 8:
        canvas.box(x, y, 152, 96, thick=1, dashed=True)
