"""From a configuration file to what runs, and two dimensions of four ranks: Megatron's layers, DeepSpeed's shards."""

from collections.abc import Mapping

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import DONE, KEPT, RANKS, WHOLE, ink_on
from pardemo.draw.parts import legend

_CLASS = "FSDP_TRANSFORMER_CLS_TO_WRAP"


def file_to_ranks(variables: Mapping[str, str]) -> Drawing:
    """What FSDP2's file says, the variables that a launcher makes of it (as it made them), and what they do."""
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
    canvas = Canvas(640, 446)
    for number, (title, fill, lines) in enumerate(stations):
        y = 6 + 154 * number
        canvas.text(8, y + 10, title, size=18, anchor="start", bold=True)
        canvas.box(8, y + 26, 560, 92, fill)
        canvas.lines(24, y + 48, lines, anchor="start", fill=ink_on(fill))
        if number:
            canvas.text(520, y + 10, ("accelerate launch", "Accelerator()")[number - 1], size=18, anchor="end")
            canvas.arrow([(544, y - 34), (544, y + 24)], DONE["communication"], 4)
    return Drawing(
        canvas,
        "Three lines of fsdp2.yaml, the environment variables that accelerate launch makes of them for each rank, and "
        "what prepare does for each: fully_shard in place of DDP, half of each batch for a rank, a unit for a layer.",
    )


def tensor_parallel_with_zero() -> Drawing:
    """Four ranks: side by side the two parts of each layer, one below the other the two replicas of a part."""
    canvas = Canvas(640, 412)
    wide, high, left, top = 190, 118, 48, 34
    for rank in range(4):
        part, replica = rank % 2, rank // 2
        x, y = left + part * (wide + 130), top + replica * (high + 64)
        canvas.box(x, y, wide, high, thick=1.5)
        canvas.text(x + wide / 2, y + 16, f"rank {rank}", size=18)
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
    canvas.text(left + wide + 65, top + high / 2 - 24, "tensor", size=18)
    canvas.text(left + wide + 65, top + high + 32, "ZeRO-1", size=18)
    legend(canvas, 8, 366, {"parameters": KEPT["parameters"], "Adam's states": KEPT["optimizer states"]})
    canvas.text(8, 398, "dashed: the whole of it; filled: what the rank has", size=18, anchor="start")
    return Drawing(
        canvas,
        "Four ranks in two rows and two columns. Ranks side by side have the left and the right half of the parameters "
        "and all-reduce activations. Ranks one below the other have the same half, and each keeps a half of its Adam's "
        "states, a quarter of all: they all-reduce gradients.",
    )
