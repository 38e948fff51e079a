"""Plan a training job before renting its GPUs: memory by a dry run of the real thing, time, money, files.

>>> from pardemo.planner import RankJob, dry_run                              # doctest: +SKIP
"""

from importlib import import_module

_HOME = {
    "RankJob": "job",
    "dry_run": "dryrun",
    "Footprint": "footprint",
    "Request": "table",
    "plan": "table",
}
__all__ = [*_HOME]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
