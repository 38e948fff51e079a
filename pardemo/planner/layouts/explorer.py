"""Sliders over a layout: GPUs, links, sequence, TP and PP, and where time and memory go then."""

from typing import Any

from pardemo import extras

with extras.needed_by(__name__):
    from matplotlib.figure import Figure

from pardemo.draw import palette
from pardemo.draw.style import Picture, draw, new
from pardemo.planner import hardware, models
from pardemo.planner.layouts import positions
from pardemo.planner.layouts.charts import LINES, PARTS, stacked
from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout, check
from pardemo.planner.layouts.job.machines import Machine
from pardemo.planner.layouts.job.stacks import MEGATRON
from pardemo.planner.layouts.model.configurations import of
from pardemo.planner.layouts.price.memory import memory
from pardemo.planner.layouts.price.step import step
from pardemo.planner.layouts.published.against import room
from pardemo.project import is_headless

TOKENS = 2**22  # of a step: 4M, whatever is moved
GPUS = tuple(2**k for k in range(3, 15))
LINKS = (25, 100, 200, 400, 800, 1600, 3200, 6400)  # Gbit/s of a host's adapters
SEQUENCES = tuple(2**k for k in range(11, 18))
DEGREES = (1, 2, 4, 8, 16, 32)
#: What a page without sliders shows: what is moved from the start, and to where.
TRIED: dict[str, dict[str, int]] = {
    "half of TP": {"tp": 4},
    "TP over two nodes": {"tp": 16},
    "no pipeline": {"pp": 1},
    "slow links": {"link": 200},
    "slow links, no pipeline": {"link": 200, "pp": 1},
    "slow links, a longer pipeline": {"link": 200, "tp": 4, "pp": 8},
}


def job_and_layout(model: str, gpus: int, link: int, sequence: int, tp: int, pp: int) -> tuple[Job, Layout]:
    """The sliders' job and layout: micro-batches of 1, ZeRO-1 in a pipeline, else ZeRO-3, recomputed if it must be.

    Raises:
        ValueError: it cannot be run, and why.
    """
    shape = of(models.find(model))
    job = Job(shape, Machine(hardware.gpu("H100"), gpus, 8, link * 1e9 / 8), MEGATRON, sequence)
    if gpus % (tp * pp):
        raise ValueError(f"TP {tp} × PP {pp} does not divide {gpus} GPUs")
    dp, samples = gpus // (tp * pp), TOKENS // sequence
    if samples % dp:
        raise ValueError(f"{samples} samples a step are too few for DP {dp}: share layers or stages, or more tokens")
    sharding = "zero3" if pp == 1 else "zero1"
    layout = Layout(
        tp=tp, pp=pp, dp=dp, accumulation=samples // dp, sequence_parallel=tp > 1,
        sharding=sharding if dp > 1 else "none",
    )  # fmt: skip
    check(layout, shape, gpus, sequence)
    if memory(job, layout).peak_bytes > room(job):
        layout = layout.but(recompute="full")
    return job, layout


def layout_chart(job: Job, layout: Layout) -> Figure:
    """Where a step's time and the fullest GPU's memory go, as two bars."""
    predicted, footprint = step(job, layout), memory(job, layout)
    fig, axes = new(2, 1, size=(6.4, 5.4))
    stacked(axes[0], {"time": predicted.parts}, PARTS)
    axes[0].set(xlabel="seconds a step", title=f"{predicted.tokens_per_s:,.0f} tokens/s a GPU, MFU {predicted.mfu:.0%}")
    capacity = job.machine.gpu.memory_bytes / 1e9
    lines = {line: value / 1e9 for line, value in footprint.lines.items()}
    (end,) = stacked(axes[1], {"memory": lines}, {line: (colour, "") for line, colour in LINES.items()})
    axes[1].axvline(capacity, color=palette.VERDICTS["fails"], linewidth=2, label="the GPU has")
    axes[1].set(xlabel="GB of the fullest GPU", xlim=(0, 1.1 * max(end, capacity)))
    for ax in axes:
        ax.legend(loc="upper center", bbox_to_anchor=(0.45, -0.28), ncols=3)
    return fig


def shown(**chosen: Any) -> Picture:
    """The two bars of what the sliders choose, or the sentence that says why there are none."""
    try:
        job, layout = job_and_layout(**chosen)
    except ValueError as error:
        fig, ax = new(size=(6.4, 1.0))
        ax.text(0, 0.5, str(error), va="center", wrap=True)
        ax.set_axis_off()
        return draw(fig, f"No such layout: {error}.")
    predicted, footprint = step(job, layout), memory(job, layout)
    fits = "fits" if footprint.peak_bytes <= room(job) else "does not fit"
    fig = layout_chart(job, layout)
    fig.suptitle(f"{layout}, {layout.gpus:,} GPUs: {predicted.seconds:.2f} s a step, {fits}", x=0.01, ha="left")
    return draw(
        fig,
        f"{layout} on {layout.gpus} GPUs: {predicted.seconds:.2f} s a step, {predicted.tokens_per_s:.0f} "
        f"tokens/s a GPU, {footprint.peak_bytes / 1e9:.0f} GB, {fits}.",
    )  # fmt: skip


def _position_text(gpus: int, link: int, sequence: int, tp: int, pp: int) -> str:
    return f"TP {tp}, PP {pp}, {link:,} Gbit/s"


def layout_explorer(
    model: str = "llama3-70b", gpus: int = 256, link: int = 3200, sequence: int = 8192, tp: int = 8, pp: int = 4
) -> Any:  # fmt: skip
    """Sliders and the bars that follow them; where nobody is there to move them, a player through some positions."""
    start = {"gpus": gpus, "link": link, "sequence": sequence, "tp": tp, "pp": pp}
    if is_headless():
        moved = {"the start": {}, **TRIED}
        named = {f"{change}: {_position_text(**start | to)}": start | to for change, to in moved.items()}
        return positions.player({name: job_and_layout(model, **values) for name, values in named.items()})
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(**chosen: int) -> None:
        display(shown(model=model, **chosen))  # interactive shows what is displayed, not what is returned

    choices = {"gpus": GPUS, "link": LINKS, "sequence": SEQUENCES, "tp": DEGREES, "pp": DEGREES}
    named = {"gpus": "GPUs", "link": "Gbit/s", "sequence": "sequence", "tp": "TP", "pp": "PP"}
    sliders = {
        name: widgets.SelectionSlider(options=options, value=start[name], description=named[name],
                                      continuous_update=False)
        for name, options in choices.items()
    }  # fmt: skip
    return widgets.interactive(redraw, **sliders)
