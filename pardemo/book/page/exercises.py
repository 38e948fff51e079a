"""Checks answers to exercises on real ranks: ``check(name, my_function)``.

A check never raises because of an answer: it shows what is right or what is missing, so that a notebook with open
exercises still runs from top to bottom. A stub that nobody has touched gets one quiet line, and starts no rank. Below
each line a hint and a solution are folded (:mod:`.exercise_shown`).

In a chapter's ``exercises.py`` the solution of an exercise stands under :func:`exercise`, with the hint as its
docstring, and ``check_NAME`` checks an answer. Where an answer is a formula, :func:`formula` makes the check of what is
right and of typical mistakes; where it runs on ranks, the check calls :func:`on_ranks`. Everywhere else an exercise is
called ``chapter.name``.
"""

import copy
import inspect
import math
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Real
from typing import Any, NamedTuple

from pardemo.book.contents import CHAPTERS
from pardemo.book.page.exercise_shown import ExerciseShown, is_stub, solution_of
from pardemo.claims import short
from pardemo.project import first_line, one_line
from pardemo.world import World
from pardemo.world.errors import RankDied, RankError, RankFailed

#: What an exercise that asks for sends and receives allows.
POINT_TO_POINT = {"send", "recv"}
TIMEOUT_S = 30


class Exercise(NamedTuple):
    """An exercise: the name of the notebook's stub, and a hint for a reader who is stuck.

    A hint is what a teacher says over the shoulder: one or two sentences that say where to look, and leave the code to
    the reader.
    """

    stub: str
    hint: str


def exercise(name: str) -> Callable[[Callable], Callable]:
    """Marks the solution of an exercise: a function of the stub's name and parameters, its docstring the hint."""

    def marked(solution: Callable) -> Callable:
        solution.exercise = name  # type: ignore[attr-defined]
        return solution

    return marked


def exercises_of(chapter: str) -> dict[str, Exercise]:
    """The exercises of a chapter, by name."""
    members = vars(import_module(f"pardemo.book.chapters.{chapter}.exercises")).items()
    marked = ((stub, solution) for stub, solution in members if hasattr(solution, "exercise"))
    return {solution.exercise: Exercise(stub, one_line(solution.__doc__)) for stub, solution in marked}


def exercise_of(id: str) -> Exercise:
    """The exercise ``chapter.name``.

    Raises:
        ValueError: no exercise of that name.
    """
    chapter, _, name = id.partition(".")
    if chapter not in CHAPTERS:
        raise ValueError(f"no exercise {id!r}: exercises are called chapter.name, as data_parallel.all_reduce")
    exercises = exercises_of(chapter)
    if name not in exercises:
        raise ValueError(f"no exercise {name!r} in chapter {chapter}; there are: {', '.join(exercises)}")
    return exercises[name]


class Mistake(Exception):
    """Raised for a wrong solution; the text explains the mistake."""


def call(function: Callable, *args: object) -> object:
    """Calls a solution in this process; what it raises becomes a Mistake."""
    try:
        return function(*args)
    except Exception as error:
        raise Mistake(f"Your function raised {type(error).__name__}: {first_line(error)}") from None


def fresh_seed() -> int:
    """For the numbers of one check: what a solution can neither know nor remember has to travel between the ranks."""
    return secrets.randbits(31)


@dataclass(frozen=True)
class Formula:
    """A check of answers that are formulas, made by :func:`formula`: ``check(function)`` returns the praise.

    Raises:
        Mistake: an answer that is off, with what is wrong about it where that is a typical mistake.
    """

    expected: Callable[..., tuple[Any, Sequence[tuple[Any, str]]]]
    cases: Iterable[tuple] | Callable[[random.Random], Iterable[tuple]]
    praise: str
    unit: str
    asked: str
    tolerance: dict[str, float]

    def __call__(self, function: Callable) -> str:
        for case in self.drawn():
            right, mistakes = self.expected(*case)
            answer = call(function, *copy.deepcopy(case))
            self._compare(_as_lists(answer) if _is_list(right) else answer, case, right, mistakes)
        return self.praise

    def drawn(self) -> Iterable[tuple]:
        """The arguments of each call."""
        return self.cases(random.Random(fresh_seed())) if callable(self.cases) else self.cases

    def _compare(self, answer: object, case: tuple, right: Any, mistakes: Sequence[tuple[Any, str]]) -> None:
        if _near(answer, right, **self.tolerance):
            return
        names = inspect.signature(self.expected).parameters
        given = ", ".join(f"{name} = {_shown(value)}" for name, value in zip(names, case, strict=True))
        if not _alike(answer, right):
            raise Mistake(f"For {given} it returned {_shown(answer)}; it should return {self.asked}.")
        hint = next((f": {why}" for wrong, why in mistakes if self._is(answer, wrong)), "")
        raise Mistake(f"For {given} it should be {_shown(right)}{self.unit}, not {_shown(answer)}{hint}.")

    def _is(self, answer: Any, wrong: Any) -> bool:
        return bool(wrong(answer)) if callable(wrong) else _near(answer, wrong, **self.tolerance)


def formula(
    cases: Iterable[tuple] | Callable[[random.Random], Iterable[tuple]],
    praise: str,
    unit: str = "",
    asked: str = "",
    rel: float = 1e-6,
    abs: float = 1e-9,
) -> Callable[[Callable], Formula]:
    """Makes the check of an exercise from a function that has, for a case, the right answer and typical wrong ones.

    The function's parameters are those of the stub. It returns the right answer (a number, a text, a tensor, or a list
    of them) and pairs of a mistake and what is wrong about it. A mistake is a wrong answer, or a function that
    recognises some; the first that fits is told.

    Args:
        cases: the arguments of each call, or a function that draws them.
        praise: what a right answer is told.
        unit: of a number. asked: what the answer should be, where this is not a number of that unit.
        rel, abs: how far an answer may be off.
    """
    asked = asked or (f"a number of {unit}" if unit else "a number")
    tolerance = {"rel_tol": rel, "abs_tol": abs}
    return lambda expected: Formula(expected, cases, praise, f" {unit}".rstrip(), asked, tolerance)


def _alike(answer: Any, right: Any) -> bool:
    """Whether both are numbers, texts, tensors of one shape, or lists of such."""
    if hasattr(right, "shape"):
        return getattr(answer, "shape", None) == right.shape
    if isinstance(right, tuple):
        return _is_list(answer) and len(answer) == len(right) and all(map(_alike, answer, right))
    if isinstance(right, list):
        return _is_list(answer) and (not right or all(_alike(item, right[0]) for item in answer))
    if isinstance(right, Real):
        return isinstance(answer, Real) and not isinstance(answer, bool)
    return right is None or isinstance(answer, type(right))


def _near(answer: Any, right: Any, rel_tol: float, abs_tol: float) -> bool:
    if not _alike(answer, right):
        return False
    if hasattr(right, "shape"):
        return _share_near(answer, right, rel_tol, abs_tol) == 1
    if _is_list(right):
        pairs = zip(answer, right, strict=True) if len(answer) == len(right) else ()
        return len(answer) == len(right) and all(_near(*pair, rel_tol, abs_tol) for pair in pairs)
    return math.isclose(answer, right, rel_tol=rel_tol, abs_tol=abs_tol) if isinstance(right, Real) else answer == right


def _share_near(answer: Any, right: Any, rel_tol: float, abs_tol: float) -> float:
    """Of a tensor's elements, the share that is near to the right ones."""
    off = (answer.detach().to(right.dtype) - right).abs()
    return (off <= rel_tol * right.abs() + abs_tol).double().mean().item()


def _as_lists(answer: Any) -> Any:
    """Lists of plain numbers for tensors, ranges, tuples and generators, also within one another."""
    if hasattr(answer, "tolist"):
        return answer.tolist()
    return [_as_lists(item) for item in answer] if isinstance(answer, (list, tuple, range, Iterator)) else answer


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def _shown(value: Any) -> str:
    """A value in short: a number with its thousands, anything else of bearable length."""
    if isinstance(value, (Real, str)) or value is None:
        return repr(value) if isinstance(value, (bool, str)) or value is None else short(value)
    text = str(value)
    return text if len(text) <= 200 else f"{text[:180]} …"


def on_ranks(count: int, attempt: Callable, *arguments: object) -> list:
    """Runs ``attempt(*arguments)`` on so many ranks and returns its results; a text says what is wrong with the answer.

    Raises:
        Mistake: on a rank something is wrong.
    """
    with World(count, timeout_s=TIMEOUT_S) as world:
        results = world.run(attempt, *arguments)
    for rank, result in enumerate(results):
        if isinstance(result, str) and result:
            raise Mistake(f"On rank {rank} {result}")
    return results


def compare_tensors(
    result: Any, right: Any, mistakes: Sequence[tuple[Any, str]] = (), otherwise: str = "", atol: float = 1e-5
) -> str:
    """Says what is wrong with the tensor that an answer returned; "" where it is the right one.

    Args:
        mistakes: typical wrong tensors, and what is wrong with each. otherwise: what is told of any other one.
    """
    if not _alike(result, right):
        got = tuple(result.shape) if hasattr(result, "shape") else type(result).__name__
        return f"it should return a tensor of shape {tuple(right.shape)}, not {got}."
    known = next((words for tensor, words in [(right, ""), *mistakes] if _near(result, tensor, 1e-5, atol)), None)
    return f"{otherwise} ({_share_near(result, right, 1e-5, atol):.0%} of it is right)." if known is None else known


def check(chapter: str, name: str, function: Callable) -> None:
    """Runs ``function`` against an exercise of a chapter and shows the verdict; a hint and a solution are folded below.

    Raises:
        ValueError: no exercise of that name.
    """
    from IPython.display import display

    display(judge(f"{chapter}.{name}", function))  # outside a notebook this prints the line


def judge(id: str, function: Callable) -> ExerciseShown:
    """Judges an answer to the exercise ``chapter.name`` and returns what :func:`check` shows.

    Raises:
        ValueError: no exercise of that name.
    """
    stub, hint = exercise_of(id)
    name = id.partition(".")[2]
    attempted, solved = not is_stub(function), False
    if not attempted:
        line = f"Not attempted yet: write {stub} above, then run this cell again."
    else:
        solved, words = _tried(id, function)
        line = f"{name}: {'solved' if solved else 'not yet'}. {words}"
    return ExerciseShown(id, attempted, solved, line, hint, solution_of(id.partition(".")[0], stub))


def _tried(id: str, function: Callable) -> tuple[bool, str]:
    """Whether it is right, and what the checker says to it, in one line."""
    chapter, _, name = id.partition(".")
    if not callable(function):
        return False, f'Hand over the function itself, without calling it: check("{name}", {exercise_of(id).stub}).'
    checker = getattr(import_module(f"pardemo.book.chapters.{chapter}.exercises"), f"check_{name}")
    try:
        return True, checker(function)
    except Mistake as mistake:
        words = str(mistake)
    except RankFailed as error:
        rank, failure = error.first
        words = f"Your function raised on rank {rank}: {first_line(failure.headline)}"
    except RankError as error:
        died = isinstance(error, RankDied)
        ask = "" if died else " Does every rank receive exactly what another one sends?"
        words = f"{first_line(error)}.{ask}"
    except Exception as error:  # it cannot be sent to the ranks, or is so odd that the checker stumbles over it
        words = str(error)
        if not words.startswith("cannot send"):
            stumbled = f"{type(error).__name__}: {first_line(error)}"
            words = f"What it returned cannot be compared with the answer ({stumbled})."
    return False, _verdict_line(words)


def _verdict_line(words: str) -> str:
    """One line of bearable length: arrays write themselves over several, and numbers may have a thousand digits."""
    line = " ".join(word if len(word) <= 100 else word[:100] + "…" for word in words.split())
    return line if len(line) <= 800 else f"{line[:500]} … {line[-250:]}"
