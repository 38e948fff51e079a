"""Compares layouts of anybody's training script, which must train alike, and says where they do not, and why.

On the command line: ``pardemo prove --layout "ranks=1 batch=8" --layout "ranks=4 batch=2" -- train.py --batch
{batch}``. In Python: :func:`script`, and for an engine :func:`prove`. ``pardemo prove --stop``, here :func:`stopped`:
stopped at random steps, resumed, and told what was lost. How it is done: :mod:`pardemo.script`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.script.compare.proof import script as script
    from pardemo.script.compare.prove_function import Parallel as Parallel
    from pardemo.script.compare.prove_function import prove as prove
    from pardemo.script.compare.results import Proof as Proof
    from pardemo.script.compare.runs import ProveError as ProveError
    from pardemo.script.resume.trials import stopped as stopped

#: Public names, and their modules in :mod:`pardemo.script`, which load torch and are imported when asked for.
_HOME = {
    "Parallel": "compare.prove_function",
    "prove": "compare.prove_function",
    "script": "compare.proof",
    "Proof": "compare.results",
    "ProveError": "compare.runs",
    "stopped": "resume.trials",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pardemo.script.{_HOME[name]}"), name)
