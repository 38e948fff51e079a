"""An exercise as a reader sees it: one line, with the hint and a solution folded below it."""

import dis
import html
from collections.abc import Callable
from dataclasses import dataclass

#: What the bytecode of a function without a body is made of.
_NOTHING = {"RESUME", "NOP", "LOAD_CONST", "RETURN_CONST", "RETURN_VALUE"}


@dataclass(frozen=True)
class ExerciseShown:
    """How an exercise went; shown as ``message``, in notebooks and pages with what is folded below it.

    ``attempted`` is False for a stub, and ``solved`` True for a right answer only.
    """

    name: str
    attempted: bool
    solved: bool
    message: str
    hint: str
    solution: str

    def __repr__(self) -> str:
        return self.message

    def _repr_html_(self) -> str:
        line = html.escape(self.message, quote=False)
        if self.solved:
            folded = _folded("One way to write it", _code(self.solution))
        else:
            hint = f'<p style="margin:.2em 1.2em">{html.escape(self.hint, quote=False)}</p>'
            folded = _folded("Hint", hint) + _folded("Solution", _code(self.solution))
        quiet = "" if self.attempted else ' style="opacity:.75"'
        return f'<div class="exercise"><div{quiet}>{line}</div>{folded}</div>'


def is_stub(function: Callable | None) -> bool:
    """Whether there is nothing in ``function`` yet: ``...``, ``pass``, a docstring, or ``return None``.

    It is read off the bytecode and not tried: a function that computes something and forgets to return it has been
    attempted, and deserves an answer.
    """
    if function is None or function is ...:
        return True
    if not hasattr(function, "__code__"):
        return False
    steps = list(dis.get_instructions(function))
    constants = (step.argval for step in steps if step.opname in ("LOAD_CONST", "RETURN_CONST"))
    return all(step.opname in _NOTHING for step in steps) and all(c is None or c is ... for c in constants)


def _folded(summary: str, content: str) -> str:
    return f'<details><summary style="cursor:pointer">{summary}</summary>{content}</details>'


def _code(text: str) -> str:
    return f"<pre><code>{html.escape(text, quote=False)}</code></pre>"
