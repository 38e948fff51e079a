"""Pictures of *Long sequences*: memory by tokens, work by rank, bytes by number of ranks, seconds by link."""

from collections.abc import Mapping, Sequence

from pardemo.draw import palette
from pardemo.draw.charts import bar_chart, curves, key, line_chart, log, words
from pardemo.draw.style import Picture, new, save

_WAYS = (palette.WAYS["ring"], palette.WAYS["torch"])


def _in_thousands(tokens: Sequence[int]) -> dict[int, str]:
    return {n: f"{n // 1024}K" if n < 2**20 else f"{n // 2**20}M" for n in tokens}


def tokens_in_memory(per_token: Mapping[str, float], room_bytes: float) -> Picture:
    """GB over the tokens of one sequence, a line for each thing that is kept, and what a GPU has.

    Args:
        per_token: name -> bytes for each token.
    """
    fig, ax = new(size=(6.4, 3.8))
    tokens = [2**k for k in range(12, 21)]
    lines = {name: {n: n * each for n in tokens} for name, each in per_token.items()}
    logits = palette.SHADES["logits"]
    curves(ax, lines, per=1e9, colours=("activations", logits, "activations"), linewidth=2)
    room = room_bytes / 1e9
    ax.axhline(room, color=palette.INK, linewidth=1)
    ax.annotate(f"{room:.0f} GB", (tokens[0], room), (0, 4), textcoords="offset points")
    log(ax, x=_in_thousands(tokens[::2]), y=())
    ax.set(xlabel="tokens of one sequence", ylabel="GB")
    key(fig, ncols=1)
    summary = words({name: room_bytes / each for name, each in per_token.items()}, "{:,.0f} tokens")
    return save(fig, "long_sequences_tokens", f"What fills {room:.0f} GB alone: {summary}.")


def blocks_by_rank(measured: Mapping[str, Sequence[float]], predicted: Mapping[str, Sequence[float]]) -> Picture:
    """Blocks that each rank multiplied over a whole ring, for each order; outlines are predicted."""
    means = {sum(values) / len(values) for values in measured.values()}
    panels = {
        order: {"series": {"computed": values}, "outline": dict(enumerate(predicted[order]))}
        for order, values in measured.items()
    }
    return bar_chart(
        "long_sequences_blocks", f"Blocks computed by each rank: {words(measured, '{:.0f}')}.", panels, shared=True,
        fills={"computed": "compute"}, text="{:.0f}", line=("mean", max(means)), axis="rank", unit="blocks computed",
        ncols=3, size=(6.4, 3.2),
    )  # fmt: skip


def sent_by_ranks(
    lines: Mapping[str, Mapping[str, Mapping[int, float]]], measured: Mapping[str, Mapping[str, float]], ranks: int
) -> Picture:
    """Plots what a rank sends in a layer over the number of ranks: a panel for each kind of heads, a line for each way.

    Args:
        lines: heads -> way -> {ranks: A}. measured: heads -> way -> A at ``ranks``.
    """
    fig, axes = new(1, len(lines), size=(6.4, 3.6), sharey=True)
    for ax, (heads, ways) in zip(axes, lines.items(), strict=True):
        curves(ax, {f"{way}, formula": line for way, line in ways.items()}, colours=_WAYS)
        counted = {f"{way}, counted": {ranks: measured[heads][way]} for way in ways}
        curves(ax, counted, colours=_WAYS, dashes=["none"], marks="os", markersize=7.5)
        most = max(max(values) for values in ways.values())
        log(ax, x=[n for n in (2, 4, 8, 16, 32) if n <= most])
        ax.set(title=heads, xlabel="ranks", ylim=(0, None))
    axes[0].set_ylabel("sent by a rank, A")
    key(fig)
    summary = words({f"{heads}, {way}": line for heads, ways in lines.items() for way, line in ways.items()}, "{:.2f}")
    return save(fig, "long_sequences_sent", f"Activations that a rank sends, forward and backward: {summary}.")


def attention_on_links(tokens: Sequence[int], slower: Mapping[str, Mapping[str, Sequence[float]]]) -> Picture:
    """Plots how many times as long attention takes as its computing alone, over the sequence's length, for each link.

    Args:
        slower: link -> way -> a factor for each of ``tokens``.
    """
    fig, axes = new(1, len(slower), size=(6.4, 3.6), sharey=True)
    summaries = []
    for ax, (link, ways) in zip(axes, slower.items(), strict=True):
        lines = {way: dict(zip(tokens, factors, strict=True)) for way, factors in ways.items()}
        summaries.append(f"{link}: {curves(ax, lines, colours=_WAYS, marks='os', text='{:.2f}')}")
        log(ax, x=_in_thousands([n for n in tokens if n.bit_length() % 2 == tokens[0].bit_length() % 2]))
        ax.set(title=link, xlabel="tokens of the sequence")
    axes[0].set(ylabel="time / computing alone", ylim=(0.9, None))
    key(fig)
    alt = f"Attention's time over that of its computing, from {tokens[0]:,} to {tokens[-1]:,} tokens"
    return save(fig, "long_sequences_links", f"{alt}: {'; '.join(summaries)}.")


def wrong_at_cuts(errors: Mapping[str, float], losses: Mapping[str, float]) -> Picture:
    """The gradient's relative error with each mistake, on a logarithmic scale, and the loss that it reports."""
    least = 1e-8
    summary = words({name: f"{error:.1e} (loss {losses[name]:.3f})" for name, error in errors.items()}, "{}")
    return bar_chart(
        "long_sequences_wrong", f"Relative error of the gradient: {summary}.",
        {"relative error of the gradient": {"series": {"error": {n: max(gap, least) for n, gap in errors.items()}}}},
        across=True, text=[f"loss {losses[name]:.3f}" for name in errors], log_limits=(least, 90),
        fills={"error": ["holds" if error < 1e-4 else "fails" for error in errors.values()]},
    )  # fmt: skip


def loss_in_chunks(measured: Mapping[str, Mapping[int, float]], predicted: Mapping[int, float]) -> Picture:
    """Peak memory of a loss over the number of its chunks, ours and DeepSpeed's; the line is predicted. In bytes."""
    summary = words(measured, "{:.0f} MB", per=1e6)
    return line_chart(
        "long_sequences_loss", f"Peak memory of the loss by its chunks. {summary}.",
        {"predicted": predicted, **measured}, per=1e6, size=(6.4, 3.4), x="chunks", y="peak, MB",
        colours=("predicted", palette.SHADES["logits"], palette.WAYS["torch"]), dashes=("-", "none", "none"),
        marks=("", "o", "s"), markersize=8, fillstyle="none", markeredgewidth=1.8, ncols=3,
        log_x=list(predicted), log_y=[round(value / 1e6) for value in predicted.values()],
    )  # fmt: skip


def remedies_for_length(steps: Mapping[str, tuple[float, float, float]], room_bytes: float) -> Picture:
    """GB on one GPU after one remedy and the next, by what takes them.

    Args:
        steps: remedy -> bytes of the logits at the loss's peak, of checkpoints, of one layer computed again. The loss
            is over when a layer is computed again, so of these two only the larger one counts.
    """
    series: dict[str, dict[str, float]] = {"logits, their gradient": {}, "checkpoints": {}, "one layer, again": {}}
    for name, (logits, checkpoints, layer) in steps.items():
        counted = logits * (logits > layer), checkpoints, layer * (layer >= logits)
        for by_name, nbytes in zip(series.values(), counted, strict=True):
            by_name[name] = nbytes
    fills = dict(zip(series, ("logits", "activations", ("activations", "///")), strict=True))
    return bar_chart(
        "long_sequences_remedies", "GB on one GPU after one remedy and the next: {}.",
        {"GB on the GPU": {"series": series}}, across=True, stacked=True, per=1e9, fills=fills, text="{:,.0f}",
        line=("a GPU's memory", room_bytes / 1e9),
    )  # fmt: skip
