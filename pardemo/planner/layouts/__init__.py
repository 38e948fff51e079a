"""Which layout? A step's time and memory for every way to cut a model over GPUs, and the search for the best one.

>>> from pardemo.planner.layouts import Job, Layout, Machine, Shape, stack                     # doctest: +SKIP
>>> from pardemo.planner.layouts.price.step import step                                              # doctest: +SKIP
"""

from importlib import import_module

_HOME = {
    "STACKS": "job.stacks", "SearchResult": "choice.search", "Job": "job.job", "Layout": "job.layout",
    "Machine": "job.machines", "Memory": "price.memory", "Shape": "model.shape", "Stack": "job.stacks",
    "PredictedStep": "price.step", "stack": "job.stacks",
    "fine_tune": "job.engines",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
