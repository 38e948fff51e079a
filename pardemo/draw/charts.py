"""The kinds of chart that the chapters share: bars, curves, and boxes over time, from tables of numbers.

A table is ``name in the legend -> place on the axis -> number``, as mappings or as a pandas DataFrame with a column for
each name. What is predicted is an outline around a bar, or a line through points.
"""

import textwrap
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from pardemo import extras
from pardemo.cluster import Cluster
from pardemo.draw import palette
from pardemo.draw.style import COLOURS, HATCHES, Picture, new, save

with extras.needed_by(__name__):
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.colors import is_color_like
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle
    from matplotlib.ticker import NullLocator

#: A kind of thing, or a colour; with a hatch, both.
Fill = Any
#: Name in the legend -> place on the axis -> number: mappings, or a DataFrame.
Table = Any
Text = str | Callable[[float], str] | Sequence[str]

WAYS = (*palette.WAYS.values(), palette.OTHER)
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
MARKS = "os^Dv"
#: Behind a number, so that no line runs through it.
PLATE: dict[str, Any] = {"facecolor": palette.PAPER, "edgecolor": "none", "pad": 1}
OUTLINE: dict[str, Any] = {"fill": False, "edgecolor": palette.PREDICTED, "linewidth": 1.2, "zorder": 3}


def fill(kind: Fill) -> dict[str, Any]:
    """Colour and hatch of a kind of thing; of one that a reader has named, always the same colour.

    Args:
        kind: a kind with a meaning (of :data:`COLOURS` or the palette), a colour, a sequence of colours, or one of
            these with a hatch.
    """
    kind, hatch = kind if isinstance(kind, tuple) else (kind, HATCHES.get(kind, "") if isinstance(kind, str) else "")
    if not isinstance(kind, str):
        return {"color": [fill(name)["color"] for name in kind], "hatch": hatch, "edgecolor": "white"}
    named = COLOURS.get(kind) or palette.MEANINGS.get(kind) or (kind if is_color_like(kind) else None)
    if named is None:
        named = WAYS[zlib.crc32(kind.encode()) % len(palette.WAYS)]
    return {"color": named, "hatch": hatch, "edgecolor": "black" if named == "white" else "white"}


def patch(label: str, kind: Fill) -> Patch:
    """An entry of a legend."""
    style = fill(kind)
    return Patch(facecolor=style.pop("color"), label=label, **style)


def key(fig: Figure, *more: Artist, ncols: int = 2, loc: str = "outside lower center", **kwargs) -> None:
    """One legend of all axes of a figure and of ``more``, with each label once; none for a single label."""
    handles: dict[str, Artist] = {}
    for ax in fig.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    handles |= {str(handle.get_label()): handle for handle in more}
    if len(handles) > 1:
        fig.legend(handles=[*handles.values()], labels=[*handles], loc=loc, ncols=ncols, **kwargs)


def words(values: Table, text: Text = "{:.3g}", per: float = 1.0) -> str:
    """Numbers in words, for alternative text: "a 1, b 2"; over numbers "3 at 8, 4 at 16"; of a table "x: …; y: …"."""
    parts, joint = [], ", "
    for name, value in values.items():
        called = " ".join(str(name).split())
        if isinstance(value, Mapping | pd.Series):
            parts.append(f"{called}: {words(value, text, per)}")
            joint = "; "
        elif isinstance(value, str):
            parts.append(f"{called} {value}")
        elif isinstance(value, Sequence | np.ndarray):
            parts.append(f"{called} {', '.join(_text(text, number / per) for number in value)}")
            joint = "; "
        elif isinstance(name, int | float):
            parts.append(f"{_text(text, value / per)} at {name:,}")
        else:
            parts.append(f"{called} {_text(text, value / per)}")
    return joint.join(parts)


def _text(text: Text, value: float) -> str:
    return text.format(value) if isinstance(text, str) else text(value) if callable(text) else str(value)


def bars(
    ax: Axes, series: Table, outline: Table | None = None, *, text: Text = "", per: float = 1.0, across: bool = False,
    stacked: bool = False, fills: Mapping[Any, Fill] | None = None, at: Sequence[float] | None = None,
    outlined: str = "predicted", room: float = 1.15, wide: float = 0.0,
    points: tuple[str, Mapping[Any, float]] | None = None,
) -> str:  # fmt: skip
    """Bars of a table, side by side or stacked, with their numbers at the ends; returns the numbers in words.

    Args:
        series: name -> group -> value. outline: group -> what is predicted for the bar (or the stack); for bars side by
            side a table as ``series``.
        text: a number's format, or the texts of the groups in their order; without it no numbers are drawn.
        per: what a unit of the axis is. across: bars run to the right, the first group is on top.
        fills: name -> its :func:`fill`; its names alone are drawn, in its order. The names' own by default.
        at: the groups' places, 0, 1, … by default. room: where the axis ends, over the longest bar. wide: of a bar.
        points: label, and group -> value, of diamonds upon the bars.
    """
    table = pd.DataFrame(series).astype(float).fillna(0.0) / per  # [groups, names]
    table = table.reindex(columns=[*fills], fill_value=0.0) if fills else table
    groups, side_by_side = list(table.index), 1 if stacked else len(table.columns)
    places = np.arange(len(groups)) if at is None else np.asarray(at)
    share = wide or (0.6 if side_by_side == 1 else 0.84 / side_by_side)
    predicted = pd.DataFrame() if outline is None else _predicted(outline, table, stacked) / per
    ends, marked = np.zeros(len(groups)), []
    draw: Any = ax.barh if across else ax.bar
    begin = "left" if across else "bottom"
    largest = table.sum(axis=1).max() if stacked else table.max(axis=None)
    for number, name in enumerate(table):
        values = table[name].to_numpy()
        x = places if stacked else places + (number - (side_by_side - 1) / 2) * share
        style = fill((fills or {}).get(name, name))
        style["label"] = str(name) if values.any() else None
        if values.max() < 0.004 * largest and stacked:  # it is narrower than its white edge
            style = {"color": style["color"]}
        draw(x, values, (0.86 if side_by_side > 1 else 1) * share, **{begin: ends if stacked else 0}, zorder=2, **style)
        ends = ends + values if stacked else values
        reach = ends
        if name in predicted:
            label = None if number else outlined
            draw(x, predicted[name], (0.98 if side_by_side > 1 else 1.18) * share, label=label, **OUTLINE)
            reach = np.fmax(ends, predicted[name])
        if not stacked:
            marked.append((x, ends, reach))
    if stacked:
        reach = ends
        if len(predicted.columns):
            draw(places, predicted.iloc[:, 0], 1.18 * share, label=outlined, **OUTLINE)
            reach = np.fmax(ends, predicted.iloc[:, 0])
        marked = [(places, ends, reach)]
    if points is not None:
        values = pd.Series(dict(points[1]), dtype=float).reindex(table.index).to_numpy() / per
        x, y = (values, places) if across else (places, values)
        ax.scatter(x, y, s=52, marker="D", color=palette.PREDICTED, edgecolors="white", label=points[0], zorder=4)
        top = max(float(np.nanmax(values)), *(float(np.max(reach)) for *_, reach in marked))
        near = values < ends + 0.14 * top  # a number stands beside a diamond that is near, and before one that is far
        corner = values + 0.008 * top
        marked = [(x, ends, np.where(near, np.fmax(reach, corner), reach)) for x, ends, reach in marked]
    else:
        top = max((float(np.max(reach)) for *_, reach in marked), default=0.0)
    for x, values, reach in marked if text else ():
        numbers(ax, x, reach, [_label(text, value, k) for k, value in enumerate(values)], across)
    _name_groups(ax, groups, places, across)
    ax.set(**{"xlim" if across else "ylim": (0, room * top or 1)})
    ax.grid(axis="y" if across else "x", visible=False)
    shown = text if (isinstance(text, str) and text) or callable(text) else "{:.3g}"
    if side_by_side > 1:
        return words({name: dict(zip(map(str, groups), table[name], strict=True)) for name in table}, shown)
    return words(dict(zip(map(str, groups), ends, strict=True)), shown)


def _name_groups(ax: Axes, groups: Sequence[Any], places: np.ndarray, across: bool) -> None:
    """Writes the groups' names on their axis, in several lines where one has no room."""
    figure: Any = ax.get_figure(root=True)
    spec = ax.get_subplotspec()
    rows, columns = spec.get_gridspec().get_geometry() if spec else (1, 1)
    width, height = figure.get_size_inches()
    if across:
        roomy = height / rows / len(groups) > 0.4
        names = _broken(groups, 28, break_on_hyphens=False) if roomy else [str(group) for group in groups]
        ax.set_yticks(places, names)
        ax.set_ylim(places[-1] + 0.6, places[0] - 0.6)
    else:
        ax.set_xticks(places, _broken(groups, max(6, int(8.2 * width / columns / len(groups)))))


def _predicted(outline: Table, table: pd.DataFrame, stacked: bool) -> pd.DataFrame:
    """What is predicted as a table with the names of the measured one; of stacks in one column."""
    if any(isinstance(values, Mapping | pd.Series) for values in dict(outline).values()):
        return pd.DataFrame(outline).reindex(table.index)
    sums = pd.Series(dict(outline), dtype=float).reindex(table.index)
    return pd.DataFrame({None if stacked else table.columns[0]: sums})


def _broken(groups: Iterable[Any], letters: int, **how: Any) -> list[str]:
    """The groups' names, long ones in several lines."""
    names = map(str, groups)
    return [name if "\n" in name else textwrap.fill(name, letters, break_long_words=False, **how) for name in names]


def _label(text: Text, value: float, number: int) -> str:
    return _text(text, value) if isinstance(text, str) or callable(text) else text[number]


def numbers(
    ax: Axes, places: Iterable[float], ends: Iterable[float], texts: Iterable[str], across: bool = False
) -> None:
    """A text at the end of each bar."""
    for place, end, text in zip(places, ends, texts, strict=True):
        if across:
            ax.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center", bbox=PLATE)
        else:
            ax.annotate(text, (place, end), (0, 3), textcoords="offset points", ha="center")


def bar_chart(
    name: str, alt: str, panels: Mapping[str, Mapping[str, Any]], *, size: Sequence[float] | None = None,
    beside: bool | None = None, shared: bool = False, line: tuple[str, float] | None = None, axis: str = "",
    title: str = "", unit: str = "", log_limits: tuple[float, float] | None = None, ncols: int = 2, **common: Any,
) -> Picture:  # fmt: skip
    """A picture of :func:`bars`, with one legend below.

    Args:
        name: the picture's. alt: its alternative text, with ``{}`` for the numbers in words.
        panels: title -> arguments of :func:`bars`; of a single panel the title is the label of its axis of values.
        size: of the figure, in inches. beside: panels lie side by side (so they do where bars stand), or one below
            the other. shared: all panels have one scale.
        line: label and value of a line across all bars.
        axis: the label of the other axis. title: of a single panel. unit: of all panels' values.
        log_limits: makes the axis of values logarithmic, between these.
        common: arguments of :func:`bars` for all panels.
    """
    across = common.get("across", False)
    beside = not across if beside is None else beside
    rows = [len(pd.DataFrame(panel["series"]).index) for panel in panels.values()]
    down, along = (1, len(panels)) if beside else (len(panels), 1)
    if size is None:
        size = (6.4, 1.3 + 0.5 * (max(rows) if beside else sum(rows)) + 0.3 * len(panels)) if across else (6.4, 3.5)
    ratios: dict[str, Any] = (
        {"height_ratios": rows} if across and not beside else {"width_ratios": rows} if beside and shared else {}
    )
    same = {"sharey" if beside else "sharex": True} if shared or (across and beside) else {}
    fig, axes = new(down, along, size=size, squeeze=False, **ratios, **same)
    texts, top = {}, 0.0
    for ax, (label, panel) in zip(axes.flat, panels.items(), strict=True):
        texts[label] = bars(ax, **{**common, **panel})
        top = max(top if shared else 0.0, (ax.get_xlim() if across else ax.get_ylim())[1])
        if line is not None:
            (ax.axvline if across else ax.axhline)(line[1], color=palette.PREDICTED, linestyle="--", label=line[0])
            top = max(top, 1.05 * line[1])
        ax.set_title(label if len(panels) > 1 else title)
        if len(panels) == 1:
            (ax.set_xlabel if across else ax.set_ylabel)(label)
        if axis:
            (ax.set_ylabel if across else ax.set_xlabel)(axis)
        if line is not None or shared:
            (ax.set_xlim if across else ax.set_ylim)(0, top)
        if log_limits:
            ax.set(**({"xscale": "log", "xlim": log_limits} if across else {"yscale": "log", "ylim": log_limits}))
    if unit:
        axes.flat[-1 if across else 0].set(**{"xlabel" if across else "ylabel": unit})
    key(fig, ncols=ncols)
    values = "; ".join(f"{label}: {alt}" for label, alt in texts.items()) if len(texts) > 1 else texts[label]
    return save(fig, name, " ".join(alt.replace("{}", values).split()))


def curves(
    ax: Axes, lines: Table, points: Table | None = None, *, per: float = 1.0, text: str = "{:.3g}",
    colours: Sequence[str] = WAYS, dashes: Sequence[Any] = DASHES, marks: Sequence[str] = (), **style: Any,
) -> str:  # fmt: skip
    """A line for each name of a table, and points where it was measured; returns the lines' ends in words.

    Args:
        lines, points: name -> x -> y, or its numbers one after the other from 0 on. A name's points have its colour.
        per: what a unit of the axis is. colours, dashes, marks: of the names in their order; without ``points`` the
            marks lie on the lines.
    """
    for (name, line), colour, dash, mark in zip(
        lines.items(), cycle(colours), cycle(dashes), cycle(marks or MARKS), strict=False
    ):
        look = {"color": COLOURS.get(colour, colour), "linewidth": 1.8, "markersize": 5, **style}
        measured = None if points is None else points.get(name)
        on_line = mark if points is None and marks else ""
        ax.plot(*_xy(line, per), linestyle=dash, marker=on_line, label=None if measured is not None else name, **look)
        if measured is not None:
            look |= {"markersize": 7.5, "linestyle": "none", "zorder": 3}
            ax.plot(*_xy(measured, per), marker=mark, label=name, **look)
    ends = {name: _xy(line, per)[1] for name, line in lines.items()}
    return "; ".join(
        f"{' '.join(str(name).split())} {text.format(y[0])} to {text.format(y[-1])}" for name, y in ends.items()
    )


def _xy(line: Any, per: float) -> tuple[list[float], list[float]]:
    pairs = line.items() if isinstance(line, Mapping | pd.Series) else enumerate(line)
    x, y = zip(*pairs, strict=True)
    return list(x), [value / per for value in y]


def log(ax: Axes, x: Table | Sequence[float] | None = None, y: Table | Sequence[float] | None = None) -> None:
    """Makes axes logarithmic, with these ticks alone: numbers, or number -> its label; none: Matplotlib's own."""
    for axis, name, ticks in ((ax.xaxis, "x", x), (ax.yaxis, "y", y)):
        if ticks is None:
            continue
        ax.set(**{f"{name}scale": "log"})
        labels = ticks if isinstance(ticks, Mapping) else {tick: f"{tick:,g}" for tick in ticks}
        if labels:
            axis.set_ticks(list(labels), list(labels.values()))
            axis.set_minor_locator(NullLocator())


def line_chart(
    name: str, alt: str, lines: Table, points: Table | None = None, *, size: Sequence[float] = (6.4, 3.7),
    x: str, y: str, log_x: Any = None, log_y: Any = None, bottom: float | None = 0, legend: str = "", ncols: int = 2,
    **kwargs: Any,
) -> Picture:  # fmt: skip
    """A picture of :func:`curves`, with their legend below.

    Args:
        name: the picture's. alt: its alternative text, with ``{}`` for the lines' ends in words.
        x, y: the axes' labels. log_x, log_y: the ticks of logarithmic axes, as in :func:`log`.
        bottom: where the axis of y begins. legend: where it is, if it lies inside. kwargs: arguments of :func:`curves`.
    """
    fig, ax = new(size=size)
    ends = curves(ax, lines, points, **kwargs)
    log(ax, log_x, log_y)
    if log_x is None:
        ax.locator_params(axis="x", integer=True)
    ax.set(xlabel=x, ylabel=y)
    if log_y is None:
        ax.set_ylim(bottom=bottom)
    if legend:
        ax.legend(loc=legend)
    else:
        key(fig, ncols=ncols)
    return save(fig, name, alt.replace("{}", ends))


def lanes(
    ax: Axes, rows: Mapping[str, Iterable[tuple[float, float, str]]], fills: Mapping[str, Fill] | None = None
) -> None:
    """Boxes over time, a row for each name: where each begins and ends, and of what kind it is.

    Args:
        fills: kind -> its :func:`fill`, the kind's own by default.
    """
    for row, boxes in enumerate(rows.values()):
        by_kind: dict[str, list[tuple[float, float]]] = {}
        for begin, end, kind in boxes:
            by_kind.setdefault(kind, []).append((begin, end - begin))
        for kind, spans in by_kind.items():
            style = fill((fills or {}).get(kind, kind))
            style["facecolor"] = style.pop("color")
            style["linewidth"] = 0.5 if len(spans) < 40 else 0  # edges would hide what is short
            ax.broken_barh(spans, (row - 0.38, 0.76), label=kind, zorder=2, **style)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.set_ylim(len(rows) - 0.45, -0.55)
    ax.grid(axis="y", visible=False)


def by_kind(spans: Iterable[Any], names: Mapping[str, Sequence[str]], begin_s: float) -> dict[str, list]:
    """Rows of :func:`lanes`, in milliseconds: name of the row -> spans of these kinds."""
    spans = list(spans)
    return {
        name: [(1e3 * (s.begin_s - begin_s), 1e3 * (s.end_s - begin_s), s.kind) for s in spans if s.kind in kinds]
        for name, kinds in names.items()
    }


def gantt(ax: Axes, spans: Sequence) -> None:
    """Spans of several ranks as bars over time: computation on the upper, communication on the lower half of a row.

    Times are milliseconds since the earliest span.
    """
    begin = min(s.begin_s for s in spans)
    ranks = sorted({s.rank for s in spans})
    for span in spans:
        row = ranks.index(span.rank)
        lower = span.kind not in ("compute", "forward", "backward")
        left, width = (span.begin_s - begin) * 1e3, (span.end_s - span.begin_s) * 1e3
        style = fill(span.kind)
        style["facecolor"] = style.pop("color")
        ax.broken_barh([(left, width)], (row + (0.02 if lower else -0.38), 0.36), linewidth=0.5, zorder=2, **style)
    ax.set_yticks(range(len(ranks)), [f"rank {r}" for r in ranks])
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)


def traffic_matrix(ax: Axes, values: np.ndarray, cluster: Cluster, most: float, size: float = 10) -> None:
    """Draws the traffic between ranks: a number for each pair of them on a shade up to ``most``; frames are nodes."""
    ax.imshow(values, cmap="Oranges", vmin=0, vmax=max(most, 1e-12))
    for sender, row in enumerate(values):
        for receiver, value in enumerate(row):
            if sender != receiver and value >= 0.005 * most:
                colour = "white" if value > 0.6 * most else "black"
                ax.text(receiver, sender, f"{value:.3g}", ha="center", va="center", color=colour, fontsize=size)
    for host in range(cluster.hosts):
        first, many = cluster.ranks_of(host)[0], cluster.ranks_per_host
        ax.add_patch(Rectangle((first - 0.5, first - 0.5), many, many, fill=False, edgecolor="black", linewidth=1.6))
    ax.set_xticks(range(len(values)))
    ax.set_yticks(range(len(values)))
    ax.grid(visible=False)
