"""Measures anybody's training script on real ranks: what its median step sends, holds and waits for.

>>> from pardemo import measure
>>> measure.script("train.py", ["--batch", "8"], ranks=4).findings        # doctest: +SKIP

On the command line: ``pardemo measure --ranks 4 -- train.py --batch 8``. How it is done: :mod:`pardemo.script`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.script.runtime.runner import ScriptError as ScriptError
    from pardemo.script.step.measurement import script as script
    from pardemo.script.step.summary import StepFinding as StepFinding
    from pardemo.script.step.summary import Summary as Summary

#: Public names, and their modules in :mod:`pardemo.script`, which load torch and are imported when asked for.
_HOME = {
    "ScriptError": "runtime.runner",
    "script": "step.measurement",
    "StepFinding": "step.summary",
    "Summary": "step.summary",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"pardemo.script.{_HOME[name]}"), name)
