"""What ``prepare`` does, what a launcher hands over, what each file makes of one script, and seven mistakes."""

from collections.abc import Mapping

from pardemo.book.chapters.zero_memory.drawings import KEPT_OF_MODEL, SINCE, states
from pardemo.draw.canvas import Canvas, Drawing, drawing
from pardemo.draw.palette import COMPUTED, DONE, GRID, KEPT, OTHER, RANKS, WHOLE, ink_on
from pardemo.draw.parts import legend, parts
from pardemo.draw.rule import rule
from pardemo.formulas import memory

_TALK = DONE["communication"]


@drawing(380)
def prepare(canvas: Canvas) -> None:
    """prepare takes the model, the optimizer and the batches of the script. Under FSDP2 each of two ranks then has half
    of the parameters, half of the optimizer states, and four of the eight samples of each batch."""
    canvas.text(84, 16, "your script", bold=True, size=20)
    for rank in range(2):
        canvas.text(344 + 206 * rank, 16, f"rank {rank}", bold=True, size=20)
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
        canvas.text(210, middle - 18, name)
        y += high + 24
    canvas.text(8, y + 8, "half of the numbers, of Adam's states, of the samples", "start")


@drawing(400)
def launchers(canvas: Canvas) -> None:
    """Started by python, one process runs alone and three GPUs idle. Started by torchrun with four processes, DDP runs.
    Only accelerate launch reads fsdp2.yaml and tells the four processes what it says: FSDP2."""
    rows = (
        ("python train.py", "tells nothing", ("alone",)),
        ("torchrun --nproc-per-node 4 train.py", "tells each its rank", ("DDP",) * 4),
        ("accelerate launch --config_file fsdp2.yaml train.py", "tells ranks and file", ("FSDP2",) * 4),
    )
    for number, (command, handed_over, runs) in enumerate(rows):
        y = 8 + 132 * number
        canvas.text(8, y + 12, command, "start", bold=True)
        for line, word in enumerate(handed_over.split(" ", 1)):
            canvas.text(8, y + 56 + 24 * line, word, "start")
        for place in range(4):
            x = 214 + 106 * place
            canvas.box(x, y + 40, 96, 54, RANKS[place] if place < len(runs) else "none", dashed=place >= len(runs))
            if place < len(runs):
                canvas.text(x + 48, y + 67, runs[place], fill=ink_on(RANKS[place]), size=20)


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


def _samples(canvas: Canvas, x: float, y: float, numbers: range, fill: str) -> None:
    for number in range(8):
        at = (x, y + 12 * number, 152, 12)
        if number in numbers:
            canvas.boxes([at], RANKS[number // 4] if fill == "both" else fill, thick=0.8)
    if len(numbers) < 8:
        canvas.box(x, y, 152, 96, thick=1, dashed=True)


#: A configuration and its colour, here and in the map.
CONFIGURATIONS = {
    "one GPU": WHOLE,
    "DDP": RANKS[0],
    "ZeRO-1": RANKS[6],
    "ZeRO-2": RANKS[5],
    "FSDP2": RANKS[2],
    "HSDP": RANKS[3],
    "offload": RANKS[1],
    "TP": RANKS[7],
    "TP PP": RANKS[4],
    "more GPUs": GRID,
}


def layout_rule() -> Drawing:
    """The whole rule, no line of it marked."""
    return rule()


_CLASS = "FSDP_TRANSFORMER_CLS_TO_WRAP"


@drawing(446)
def file_to_ranks(canvas: Canvas, variables: Mapping[str, str]) -> None:
    """Three lines of fsdp2.yaml, the environment variables that accelerate launch makes of them for each rank, and what
    prepare does for each: fully_shard in place of DDP, half of each batch for a rank, a unit for a layer."""
    layer = variables[_CLASS]
    stations = (
        ("fsdp2.yaml, for the launcher", WHOLE, (
            "distributed_type: FSDP", "num_processes: 2", f"fsdp_transformer_layer_cls_to_wrap: {layer}")),
        ("environment of each rank", RANKS[0], (
            f"ACCELERATE_USE_FSDP={variables['ACCELERATE_USE_FSDP']}", "WORLD_SIZE=2, RANK=0 or 1",
            f"{_CLASS}={layer}")),
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
            canvas.arrow([(544, y - 34), (544, y + 24)], DONE["communication"], 4)


@drawing(412)
def tensor_parallel_with_zero(canvas: Canvas) -> None:
    """Four ranks in two rows and two columns. Ranks side by side have the left and the right half of the parameters and
    all-reduce activations. Ranks one below the other have the same half, and each keeps a half of its Adam's states, a
    quarter of all: they all-reduce gradients."""
    wide, high, left, top = 190, 118, 48, 34
    for rank in range(4):
        part, replica = rank % 2, rank // 2
        x, y = left + part * (wide + 130), top + replica * (high + 64)
        canvas.box(x, y, wide, high, thick=1.5)
        canvas.text(x + wide / 2, y + 16, f"rank {rank}")
        for at, kind, rows in ((10, "parameters", (0, 1)), (100, "optimizer states", (replica,))):
            canvas.box(x + at, y + 34, 80, 70, thick=1, dashed=True)
            squares = [(x + at + 40 * part, y + 34 + 35 * row, 40, 35) for row in rows]
            canvas.boxes(squares, KEPT[kind], thick=0.8)
    sent = DONE["communication"]
    for replica in range(2):
        y = top + replica * (high + 64) + high / 2
        canvas.arrow([(left + wide + 6, y), (left + wide + 124, y)], sent, 6, both=True)
    for part in range(2):
        x = left + part * (wide + 130) + wide / 2
        canvas.arrow([(x, top + high + 4), (x, top + high + 60)], sent, 3, both=True)
    canvas.text(left + wide + 65, top + high / 2 - 24, "tensor")
    canvas.text(left + wide + 65, top + high + 32, "ZeRO-1")
    legend(canvas, 8, 366, {"parameters": KEPT["parameters"], "Adam's states": KEPT["optimizer states"]})
    canvas.text(8, 398, "dashed: the whole of it; filled: what the rank has", "start")


_ASKED, _RUNS, _CURE, _EACH, _HIGH = 8, 196, 384, 72, 48
_MISTAKES = (
    ("python train.py", ("start it with a launcher",)),
    ("torchrun, and no file", ("accelerate launch", "--config_file")),
    ("FSDP2 without the layers' class", ("name the class",)),
    ("split_batches left at its default", ("set it, or divide", "the batch size")),
    ("a schedule that counts steps", ("count one GPU's batches,", "or split_batches=True")),
    ("clip_grad_norm_ under DeepSpeed", ("gradient_clipping", "in DeepSpeed's file")),
    ("the loss from model.module", ("call the model that", "prepare returned")),
)


@drawing()
def seven_mistakes(canvas: Canvas) -> None:
    """Seven mistakes on two ranks. Started by python one process runs. By torchrun without the file each rank keeps a
    whole model. Without the layers' class the model is one unit. With split_batches at its default each rank takes a
    whole batch. A schedule that counts steps is over too soon. DeepSpeed clips at 1.0 and not at 0.5. With model.module
    no gradients are all-reduced."""
    step = 106
    canvas.height = 30 + step * len(_MISTAKES)
    for x, heading in ((_ASKED, "asked for"), (_RUNS, "what runs"), (_CURE, "what to do")):
        canvas.text(x, 12, heading, "start", bold=True)
    draw = (_ranks, _wrapped, _units, _batches, _rates, _clips, _drifting)
    for number, ((mistake, cure), picture) in enumerate(zip(_MISTAKES, draw, strict=True)):
        y = 44 + step * number
        canvas.text(_ASKED, y, f"{number + 1}  {mistake}", "start")
        for x, wrong in ((_ASKED, False), (_RUNS, True)):
            picture(canvas, x, y + 20, wrong)
        canvas.lines(_CURE, y + 44 - 12 * (len(cure) - 1), cure, "start")


def _ranks(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        started = not (wrong and rank)
        fill = RANKS[rank] if started else "none"
        label = f"rank {rank}" if started else ""
        canvas.box(x + 80 * rank, y, _EACH, _HIGH, fill, label, dashed=not started)


def _wrapped(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        parts(canvas, x + 80 * rank, y, _EACH, _HIGH, 2, range(2) if wrong else [rank], KEPT["parameters"])


def _units(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    count = 1 if wrong else 4
    canvas.boxes([(x + 38 * k, y, 152 if wrong else 32, _HIGH) for k in range(count)], KEPT["parameters"])


def _batches(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    each = 8 if wrong else 4
    for rank in range(2):
        canvas.boxes([(x + 80 * rank + 9 * k, y, 9, _HIGH) for k in range(each)], RANKS[rank], thick=0.8)


def _rates(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    end = 76 if wrong else 152
    canvas.line([(x, y), (x, y + _HIGH), (x + 152, y + _HIGH)], thick=1.5)
    canvas.line([(x + 2, y + 4), (x + end, y + _HIGH - 2)], COMPUTED, 4)


def _clips(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    canvas.box(x, y, 24, _HIGH, KEPT["gradients"], thick=1)
    at = y + (4 if wrong else 24)
    canvas.line([(x + 26, at), (x + 84, at)], OTHER, 3, dashed=True)
    canvas.text(x + 92, at, "1.0" if wrong else "0.5", "start")


def _drifting(canvas: Canvas, x: float, y: float, wrong: bool) -> None:
    for rank in range(2):
        canvas.box(x + 104 * rank, y, 48, _HIGH, KEPT["gradients"], thick=1)
    if not wrong:
        canvas.arrow([(x + 52, y + 24), (x + 100, y + 24)], DONE["communication"], 4, both=True)


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
