"""Draws what ``prepare`` does, what a launcher hands over, what each file makes of one script, and seven mistakes."""

from collections.abc import Mapping

from pardemo.book.chapters.zero_memory.drawings import KEPT_OF_MODEL, SINCE, states
from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, KEPT, OTHER, RANKS, WHOLE, ink_on
from pardemo.draw.parts import legend, parts
from pardemo.formulas import memory

_TALK = DONE["communication"]


@drawing(380)
def prepare(canvas: Canvas) -> None:
    """prepare takes the model, the optimizer and the batches of the script. Under FSDP2 each of two ranks then has half
    of the parameters, half of the optimizer states, and four of the eight samples of each batch."""
    canvas.text(84, 16, "your script", bold=True, size=20)
    for rank in range(2):
        canvas.text(344 + 206 * rank, 16, f"rank {rank}", bold=True, size=20)
    for y, middle, name in ((40, 76, "model"), (136, 172, "optimizer"), (232, 280, "batch")):
        canvas.arrow([(172, middle), (248, middle)])
        canvas.text(210, middle - 18, name)
        for x, ranks in ((8, [0, 1]), (268, [0]), (474, [1])):
            if name != "batch":
                fill = KEPT["parameters"] if name == "model" else KEPT["optimizer states"]
                parts(canvas, x, y, 152, 72, 2, ranks, fill)
                continue
            for rank in ranks:
                canvas.boxes([(x, y + 48 * rank + 12 * k, 152, 12) for k in range(4)], RANKS[rank], thick=0.8)
            if len(ranks) < 2:
                canvas.box(x, y, 152, 96, thick=1, dashed=True)
    canvas.text(8, 360, "half of the numbers, of Adam's states, of the samples", "start")


@drawing(400)
def launchers(canvas: Canvas) -> None:
    """Started by python, one process runs alone and three GPUs idle. Started by torchrun with four processes, DDP runs.
    Only accelerate launch reads fsdp2.yaml and tells the four processes what it says: FSDP2."""
    rows = (
        ("python train.py", ("tells", "nothing"), "alone"),
        ("torchrun --nproc-per-node 4 train.py", ("tells", "each its rank"), "DDP"),
        ("accelerate launch --config_file fsdp2.yaml train.py", ("tells", "ranks and file"), "FSDP2"),
    )
    for number, (command, handed_over, runs) in enumerate(rows):
        y = 8 + 132 * number
        canvas.text(8, y + 12, command, "start", bold=True)
        canvas.lines(8, y + 56, handed_over, "start")
        for index in range(4):
            if index and runs == "alone":
                canvas.box(214 + 106 * index, y + 40, 96, 54, dashed=True)
            else:
                canvas.box(214 + 106 * index, y + 40, 96, 54, RANKS[index], runs, size=20)


@drawing(330)
def replicas_of_shards(canvas: Canvas) -> None:
    """Two nodes, each with a replica of the parameters in two shards. Inside a node a rank sends one and a half times
    the parameters to gather and reduce. Between nodes equal shards are all-reduced: half the parameters a rank."""
    for node in range(2):
        left = 8 + 356 * node
        canvas.box(left, 40, 268, 206)
        canvas.text(left + 134, 20, f"node {node}: one replica", bold=True, size=20)
        for rank in range(2):
            x = left + 22 + 130 * rank
            canvas.text(x + 47, 62, f"rank {2 * node + rank}")
            parts(canvas, x, 80, 94, 84, 2, [rank], KEPT["parameters"])
        canvas.arrow([(left + 70, 184), (left + 198, 184)], _TALK, 6, both=True)
        canvas.text(left + 134, 216, "dp_shard 2: 1½ Ψ")
    canvas.arrow([(280, 122), (360, 122)], _TALK, 3, both=True)
    canvas.text(320, 270, "between the nodes, dp_replicate 2: ½ Ψ a rank")
    legend(canvas, 8, 306, {"parameters": KEPT["parameters"], "sent by a rank in a step": _TALK})


@drawing(446)
def file_to_ranks(canvas: Canvas, variables: Mapping[str, str]) -> None:
    """Three lines of fsdp2.yaml, the environment variables that accelerate launch makes of them for each rank, and what
    prepare does for each: fully_shard in place of DDP, half of each batch for a rank, a unit for a layer."""
    layer = variables["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    stations = (
        ("fsdp2.yaml, for the launcher", WHOLE, (
            "distributed_type: FSDP", "num_processes: 2", f"fsdp_transformer_layer_cls_to_wrap: {layer}")),
        ("environment of each rank", RANKS[0], (
            f"ACCELERATE_USE_FSDP={variables['ACCELERATE_USE_FSDP']}", "WORLD_SIZE=2, RANK=0 or 1",
            f"FSDP_TRANSFORMER_CLS_TO_WRAP={layer}")),
        ("what prepare does", RANKS[2], (
            "the model: fully_shard, not DDP", "the loader: half of each batch for a rank",
            f"each {layer}: a unit of its own")),
    )  # fmt: skip
    for number, (title, fill, lines) in enumerate(stations):
        y = 6 + 154 * number
        canvas.text(8, y + 10, title, "start", bold=True)
        canvas.box(8, y + 26, 560, 92, fill)
        canvas.lines(24, y + 48, lines, "start", fill=ink_on(fill))
        if number:
            canvas.text(520, y + 10, ("accelerate launch", "Accelerator()")[number - 1], "end")
            canvas.arrow([(544, y - 34), (544, y + 24)], _TALK, 4)


@drawing(412)
def tensor_parallel_with_zero(canvas: Canvas) -> None:
    """Four ranks in two rows and two columns. Ranks side by side have the left and the right half of the parameters and
    all-reduce activations. Ranks one below the other have the same half, and each keeps a half of its Adam's states, a
    quarter of all: they all-reduce gradients."""
    for rank in range(4):
        part, replica = rank % 2, rank // 2
        x, y = 48 + 320 * part, 34 + 182 * replica
        canvas.box(x, y, 190, 118, thick=1.5)
        canvas.text(x + 95, y + 16, f"rank {rank}")
        for at, kind, rows in ((10, "parameters", (0, 1)), (100, "optimizer states", (replica,))):
            canvas.box(x + at, y + 34, 80, 70, thick=1, dashed=True)
            squares = [(x + at + 40 * part, y + 34 + 35 * row, 40, 35) for row in rows]
            canvas.boxes(squares, KEPT[kind], thick=0.8)
    for y in (93, 275):
        canvas.arrow([(244, y), (362, y)], _TALK, 6, both=True)
    for x in (143, 463):
        canvas.arrow([(x, 156), (x, 212)], _TALK, 3, both=True)
    canvas.text(303, 69, "tensor")
    canvas.text(303, 184, "ZeRO-1")
    legend(canvas, 8, 366, {"parameters": KEPT["parameters"], "Adam's states": KEPT["optimizer states"]})
    canvas.text(8, 398, "dashed: the whole of it; filled: what the rank has", "start")


_MISTAKES = (
    ("python train.py", ("start it with a launcher",)),
    ("torchrun, and no file", ("accelerate launch", "--config_file")),
    ("FSDP2 without the layers' class", ("name the class",)),
    ("split_batches left at its default", ("set it, or divide", "the batch size")),
    ("a schedule that counts steps", ("count one GPU's batches,", "or split_batches=True")),
    ("clip_grad_norm_ under DeepSpeed", ("gradient_clipping", "in DeepSpeed's file")),
    ("the loss from model.module", ("call the model that", "prepare returned")),
)


@drawing(772)
def seven_mistakes(canvas: Canvas) -> None:
    """Seven mistakes on two ranks. Started by python one process runs. By torchrun without the file each rank keeps a
    whole model. Without the layers' class the model is one unit. With split_batches at its default each rank takes a
    whole batch. A schedule that counts steps is over too soon. DeepSpeed clips at 1.0 and not at 0.5. With model.module
    no gradients are all-reduced."""
    for x, heading in ((8, "asked for"), (196, "what runs"), (384, "what to do")):
        canvas.text(x, 12, heading, "start", bold=True)
    for number, (mistake, cure) in enumerate(_MISTAKES):
        y = 44 + 106 * number
        canvas.text(8, y, f"{number + 1}  {mistake}", "start")
        canvas.lines(384, y + 44 - 12 * (len(cure) - 1), cure, "start")
        _mistake(canvas, number, 8, y + 20, wrong=False)
        _mistake(canvas, number, 196, y + 20, wrong=True)


def _mistake(canvas: Canvas, number: int, x: float, y: float, wrong: bool) -> None:
    """What was asked for, or what runs instead, in 152 x 48 units."""
    high, parameters, gradients = 48, KEPT["parameters"], KEPT["gradients"]
    for rank, left in enumerate((x, x + 80)):
        if number == 0 and wrong and rank:
            canvas.box(left, y, 72, high, dashed=True)
        elif number == 0:
            canvas.box(left, y, 72, high, RANKS[rank], f"rank {rank}")
        elif number == 1:
            parts(canvas, left, y, 72, high, 2, range(2) if wrong else [rank], parameters)
        elif number == 3:
            samples = [(left + 9 * k, y, 9, high) for k in range(8 if wrong else 4)]
            canvas.boxes(samples, RANKS[rank], thick=0.8)
    if number == 2:
        canvas.boxes([(x, y, 152, high)] if wrong else [(x + 38 * k, y, 32, high) for k in range(4)], parameters)
    elif number == 4:
        canvas.line([(x, y), (x, y + high), (x + 152, y + high)], thick=1.5)
        canvas.line([(x + 2, y + 4), (x + (76 if wrong else 152), y + high - 2)], COMPUTED, 4)
    elif number == 5:
        limit = y + (4 if wrong else 24)
        canvas.box(x, y, 24, high, gradients, thick=1)
        canvas.line([(x + 26, limit), (x + 84, limit)], OTHER, 3, dashed=True)
        canvas.text(x + 92, limit, "1.0" if wrong else "0.5", "start")
    elif number == 6:
        canvas.box(x, y, 48, high, gradients, thick=1)
        canvas.box(x + 104, y, 48, high, gradients, thick=1)
        if not wrong:
            canvas.arrow([(x + 52, y + 24), (x + 100, y + 24)], _TALK, 4, both=True)


@drawing(548)
def one_script(canvas: Canvas) -> None:
    """One script under five files and under none. Without a file one rank keeps everything. With ddp.yaml both ranks
    keep everything. zero1.yaml halves the optimizer states, zero2.yaml the gradients too, zero3.yaml and fsdp2.yaml
    everything."""
    files = {"no file": 0, "ddp.yaml": 0, "zero1.yaml": 1, "zero2.yaml": 2, "zero3.yaml": 3, "fsdp2.yaml": 3}
    canvas.box(8, 8, 130, 46, WHOLE, "train.py", bold=True, size=20)
    canvas.text(152, 31, "the same in every row; the file decides", "start")
    for rank in range(2):
        canvas.text(329 + 212 * rank, 84, f"rank {rank}")
    adam = memory.STATES["Adam, fp32"]
    for number, (name, stage) in enumerate(files.items()):
        y = 104 + 62 * number
        canvas.box(8, y, 150, 40, "none", name)
        canvas.arrow([(158, y + 20), (228, y + 20)])
        for rank in range(1 if name == "no file" else 2):
            shown = {kind: range(2) if stage < since else [rank] for kind, since in SINCE.items()}
            states(canvas, 236 + 212 * rank, y, 186 / adam.total, 40, 2, shown, adam)
    legend(canvas, 8, 498, KEPT_OF_MODEL)
    canvas.text(8, 530, "dashed: what the other rank keeps", "start")
