"""One way of drawing: a colour for each kind of thing, the prediction a line, the measurement points.

>>> from pardemo.collection import figures
>>> fig, ax = figures.new()                                  # doctest: +SKIP
>>> figures.predicted(ax, sizes, theory); figures.measured(ax, sizes, seconds)   # doctest: +SKIP
>>> figures.save(fig, "01_time", "alternative text")          # doctest: +SKIP
"""

from pardemo.collection.figures.charts import bars, gantt, holdings, kind_legend, measured, predicted, ring_states
from pardemo.collection.figures.explore import states_chart, states_explorer
from pardemo.collection.figures.pipeline import pipeline
from pardemo.collection.figures.ratios import ratios
from pardemo.collection.figures.scores import scores
from pardemo.collection.figures.style import COLOURS, draw, new, save, write
from pardemo.collection.figures.tensor import sent_by_order, sum_of_gelus, two_backward_passes

__all__ = [
    "COLOURS",
    "bars",
    "draw",
    "gantt",
    "holdings",
    "kind_legend",
    "measured",
    "new",
    "pipeline",
    "predicted",
    "ratios",
    "ring_states",
    "save",
    "scores",
    "sent_by_order",
    "states_chart",
    "states_explorer",
    "sum_of_gelus",
    "two_backward_passes",
    "write",
]
