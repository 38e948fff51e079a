"""Sliders over a formula: what model states take, as the reader moves size, ranks, K and which ZeRO."""

from typing import Any

from pardemo.book.chapters.zero_memory.drawings_bytes import states_by_ranks
from pardemo.draw.style import COLOURS, Picture, draw, new
from pardemo.formulas import memory
from pardemo.project import is_headless


def states_chart(billions: float, world_size: int, k: int, stage: int) -> Picture:
    """Bars of the model states for Ψ = ``billions``·10⁹, plain and under ZeRO-1, 2 and 3, the chosen one outlined."""
    fig, ax = new(size=(7.5, 3.2))
    bottom = [0.0] * 4
    states = memory.StateBytes(optimizer=k)
    rows = [memory.model_states(round(billions * 1e9), world_size, s, states) for s in memory.STAGES]
    for kind in ("parameters", "gradients", "optimizer states"):
        values = [row[kind] / 1e9 for row in rows]
        ax.bar(range(4), values, 0.6, bottom=bottom, color=COLOURS[kind], label=kind, edgecolor="white")
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    ax.bar([stage], [bottom[stage]], 0.68, fill=False, edgecolor="black", linewidth=1.8)
    for place, total in enumerate(bottom):
        ax.annotate(f"{total:,.1f}", (place, total), ha="center", va="bottom")
    ax.set_xticks(range(4), ["plain", "ZeRO-1", "ZeRO-2", "ZeRO-3"])
    ax.set(ylabel="GB per rank", ylim=(0, max(bottom) * 1.15), title=f"Ψ = {billions:.3g}B, N = {world_size}, K = {k}")
    ax.grid(axis="x", visible=False)
    ax.legend()
    values_text = ", ".join(f"{total:,.1f}" for total in bottom)
    return draw(
        fig,
        f"Model states of {billions:.3g}·10⁹ parameters on {world_size} ranks, plain and under ZeRO-1, 2 and 3: "
        f"{values_text} GB each.",
    )


def states_explorer(billions: float = 7.5, world_size: int = 64, k: int = 12, stage: int = 2) -> Any:
    """Sliders and a chart that follows them; where no Python runs to redraw it, in a page, a player over N."""
    if is_headless():
        return states_by_ranks(billions, start=world_size)
    import ipywidgets as widgets
    from IPython.display import display

    def redraw(**chosen: Any) -> None:
        display(states_chart(**chosen))  # interactive shows what is displayed, not what is returned

    return widgets.interactive(
        redraw,
        # 0.025 of a decade: a step lies on 10^0.875 = 7.499, the paper's 7.5
        billions=widgets.FloatLogSlider(
            billions, min=-1, max=3, step=0.025, description="Ψ, 10⁹", readout_format=".3g"
        ),
        world_size=widgets.IntSlider(world_size, min=1, max=1024, description="N"),
        k=widgets.Dropdown(options=[12, 8, 6, 4], value=k, description="K"),
        stage=widgets.IntSlider(stage, min=0, max=3, description="ZeRO stage"),
    )
