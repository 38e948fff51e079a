"""pardemo: parallel training, predicted, run on real processes, and compared.

The names below are loaded on first use, so that ``import pardemo`` costs milliseconds and loads no torch.

>>> from pardemo import World
>>> with World(4) as world:                 # doctest: +SKIP
...     world.run(my_function, 1024)        # -> [result of rank 0, 1, 2, 3]
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "World": "pardemo.world",
    "RankError": "pardemo.errors",
    "RankFailed": "pardemo.errors",
    "RankDied": "pardemo.errors",
    "RankTimeout": "pardemo.errors",
    "WireMeter": "pardemo.meters",
    "MemoryMeter": "pardemo.meters",
    "CallMeter": "pardemo.meters",
    "Timeline": "pardemo.meters",
    "Ledger": "pardemo.claims",
}
__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'pardemo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
