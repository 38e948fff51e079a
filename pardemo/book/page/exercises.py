"""Exercises that check themselves on real ranks: ``check(name, my_function)``.

A check never raises because of an answer: it shows what is right or what is missing, so that a notebook with open
exercises still runs from top to bottom. A stub that nobody has touched gets one quiet line, and starts no rank. Below
each line a hint and a solution (:mod:`.solutions`) are folded.

A chapter's ``exercises.py`` has its EXERCISES by name, for each a function ``check_NAME``, and the function that the
stub stands for. Everywhere else an exercise is called ``chapter.name``.
"""

import secrets
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from pardemo.book.chapters import CHAPTERS
from pardemo.book.page.exercise_shown import ExerciseShown, is_stub
from pardemo.world.errors import RankDied, RankError, RankFailed


class Exercise(NamedTuple):
    """What the notebook's stub is called, and what leads on who is stuck.

    A hint is what a teacher says over the shoulder: one or two sentences that say where to look, and leave the code to
    the reader.
    """

    stub: str
    hint: str


def exercise_of(id: str) -> Exercise:
    """The exercise ``chapter.name``.

    Raises:
        ValueError: no exercise of that name.
    """
    chapter, _, name = id.partition(".")
    if chapter in CHAPTERS:
        exercises = import_module(f"pardemo.book.chapters.{chapter}.exercises").EXERCISES
        if name in exercises:
            return exercises[name]
        raise ValueError(f"no exercise {name!r} in chapter {chapter}; there are: {', '.join(exercises)}")
    raise ValueError(f"no exercise {id!r}: exercises are called chapter.name, as data_parallel.all_reduce")


class Mistake(Exception):
    """What is wrong with a solution, in words that teach."""


def call(function: Callable, *args: object) -> object:
    """Calls a solution in this process; what it raises becomes a Mistake."""
    try:
        return function(*args)
    except Exception as error:
        raise Mistake(f"Your function raised {type(error).__name__}: {_first_line(error)}") from None


#: What an exercise that asks for sends and receives allows.
POINT_TO_POINT = {"send", "recv"}


def fresh_seed() -> int:
    """For the numbers of one check: what a solution can neither know nor remember has to travel between the ranks."""
    return secrets.randbits(31)


def check(chapter: str, name: str, function: Callable) -> None:
    """Runs ``function`` against an exercise of a chapter and shows the verdict; a hint and a solution are folded below.

    Raises:
        ValueError: no exercise of that name.
    """
    from IPython.display import display

    display(judge(f"{chapter}.{name}", function))  # outside a notebook this prints the line


def judge(id: str, function: Callable) -> ExerciseShown:
    """What :func:`check` shows of the exercise ``chapter.name``, as a value.

    Raises:
        ValueError: no exercise of that name.
    """
    from pardemo.book.page import solutions

    stub, hint = exercise_of(id)
    name = id.partition(".")[2]
    attempted, solved = not is_stub(function), False
    if not attempted:
        line = f"Not attempted yet: write {stub} above, then run this cell again."
    else:
        solved, words = _tried(id, function)
        line = f"{name}: {'solved' if solved else 'not yet'}. {words}"
    return ExerciseShown(id, attempted, solved, line, hint, solutions.text(id.partition(".")[0], stub))


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
        words = f"Your function raised on rank {rank}: {_first_line(failure.headline)}"
    except RankError as error:
        died = isinstance(error, RankDied)
        ask = "" if died else " Does every rank receive exactly what another one sends?"
        words = f"{_first_line(error)}.{ask}"
    except Exception as error:  # it cannot be sent to the ranks, or is so odd that the checker stumbles over it
        words = str(error)
        if not words.startswith("cannot send"):
            stumbled = f"{type(error).__name__}: {_first_line(error)}"
            words = f"What it returned cannot be compared with the answer ({stumbled})."
    return False, _short(words)


def _first_line(error: BaseException | str) -> str:
    """What an exception says first: torch's go on with a stack of C++."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _short(words: str) -> str:
    """One line of bearable length: arrays write themselves over several, and numbers may have a thousand digits."""
    line = " ".join(word if len(word) <= 100 else word[:100] + "…" for word in words.split())
    return line if len(line) <= 800 else f"{line[:500]} … {line[-250:]}"
