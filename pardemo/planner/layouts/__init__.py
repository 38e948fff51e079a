"""Predicts a step's time and memory for every way to cut a model over GPUs, and searches for the best one.

>>> from pardemo.planner.layouts import Job, Layout, Machine, Shape, find_program  # doctest: +SKIP
>>> from pardemo.planner.layouts.step import step  # doctest: +SKIP
"""

from importlib import import_module

_HOME = {
    "PROGRAMS": "programs", "SearchResult": "search", "Job": "job", "Layout": "layout", "Machine": "machines",
    "Memory": "memory", "Shape": "shape", "Program": "programs", "PredictedStep": "step", "find_program": "programs",
    "fine_tune": "job",
}  # fmt: skip
__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
