"""Anybody's training script, proven: run in layouts that must train alike, and told where they do not, and why.

On the command line: ``pardemo prove --layout "ranks=1 batch=8" --layout "ranks=4 batch=2" -- train.py --batch
{batch}``. In Python: :func:`script`, and for an engine :func:`prove`. ``pardemo prove --stop``, here :func:`stopped`:
stopped at random steps, resumed, and told what was lost.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.prove.api import Parallel as Parallel
    from pardemo.prove.api import prove as prove
    from pardemo.prove.api import script as script
    from pardemo.prove.proof import Proof as Proof
    from pardemo.prove.proof import scripts as scripts
    from pardemo.prove.runner import ProveError as ProveError
    from pardemo.prove.stopping.api import stopped as stopped

#: Names of this door, and their homes: torch is loaded by those who ask.
_HOME = {
    "Parallel": "api",
    "prove": "api",
    "script": "api",
    "Proof": "proof",
    "scripts": "proof",
    "ProveError": "runner",
    "stopped": "stopping.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
