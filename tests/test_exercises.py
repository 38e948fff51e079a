"""The solutions that readers unfold solve the exercises, and typical wrong answers get the message that helps."""

import contextlib
import re
from collections import Counter
from importlib import import_module
from inspect import signature

import pytest
import torch
import torch.distributed as dist
from conftest import exercises_of_the_book, says
from wrong_answers import WRONG

from pardemo import World
from pardemo.book.chapters.host_fails.exercises import my_reads
from pardemo.book.chapters.long_sequences.exercises import my_positions
from pardemo.book.page import exercises
from pardemo.book.page.exercise_shown import solution_of
from pardemo.book.page.exercises import Formula, judge
from pardemo.tensor_parallel import copy_to, vocab_parallel_cross_entropy

EXERCISES = exercises_of_the_book()


def module_of(name):
    return import_module(f"pardemo.book.chapters.{name.partition('.')[0]}.exercises")


CHECKS = {name: getattr(module_of(name), f"check_{name.partition('.')[2]}") for name in EXERCISES}
FORMULAS = {name: check for name, check in CHECKS.items() if isinstance(check, Formula)}


@pytest.fixture(scope="module")
def warm():
    """``World`` for the checks: one that is warm already. An answer that broke its ranks costs new ranks only."""
    worlds = {}

    def take(size, preload=(), timeout_s=300):
        key = size, tuple(preload)
        if key not in worlds:
            worlds[key] = World(size, preload=preload)
        worlds[key].timeout_s = timeout_s if timeout_s < 30 else 120  # a machine that tests may be a busy one
        return contextlib.nullcontext(worlds[key])

    yield take
    for world in worlds.values():
        world.close()


@pytest.fixture(autouse=True)
def checks_take_warm_worlds(warm, monkeypatch):
    for module in {exercises, *map(module_of, EXERCISES)}:
        if hasattr(module, "World"):
            monkeypatch.setattr(module, "World", warm)


def all_receive_first(tensor):
    dist.recv(tensor, (dist.get_rank() - 1) % 4)
    return tensor


def returns_nothing(*arguments):
    tuple(arguments)


def pasted(name):
    """The solution as a reader gets it: unfolded, and pasted into an empty notebook."""
    notebook = {"__name__": "__main__"}
    exec(solution_of(name.partition(".")[0], EXERCISES[name].stub), notebook)
    return notebook[EXERCISES[name].stub]


@pytest.mark.parametrize(
    ("name", "solution"),
    [
        *((name, None) for name in EXERCISES),
        ("megatron_mlp.f", copy_to),
        ("long_sequences.positions", lambda *case: torch.tensor(my_positions(*case))),
        ("host_fails.reads", lambda *case: (list(read) for read in my_reads(*case))),
        ("vocabulary.vocabulary_loss", lambda x, t: vocab_parallel_cross_entropy(x, t, reduction="none")),
    ],
)
def test_each_exercise_can_be_solved(name, solution):
    outcome = judge(name, solution or pasted(name))
    assert outcome.message.startswith(f"{name.partition('.')[2]}: solved.")
    assert outcome.solved


@pytest.mark.parametrize(("name", "answer", "hint"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_wrong_answers_get_the_message_that_helps(name, answer, hint):
    assert hint in told_of_wrong(name, answer)


def told_of_wrong(name, answer):
    outcome = judge(name, answer)
    assert outcome.attempted
    assert not outcome.solved
    assert outcome.message.startswith(f"{name.partition('.')[2]}: not yet.")
    assert "\n" not in outcome.message, "one line, and no stack trace of anybody"
    assert len(outcome.message) < 900
    return outcome.message


@pytest.mark.parametrize("name", EXERCISES)
def test_an_answer_that_returns_nothing_is_told_so(name):
    message = told_of_wrong(name, returns_nothing)
    assert re.search("None|order must name|it wrote less than the state has", message), message


def declared(check):
    """Of a :class:`Formula`, its typical wrong answers: what is wrong about each, and which of that."""
    counts = Counter()
    for case in check.drawn():
        words = Counter(why for wrong, why in check.expected(*case)[1] if not callable(wrong))
        counts |= words
    return [(why, which) for why, count in counts.items() for which in range(count)]


@pytest.mark.parametrize("name", FORMULAS)
def test_each_mistake_that_a_formula_declares_is_told(name):
    for why, which in declared(FORMULAS[name]):

        def mistaken(*case, why=why, which=which):
            right, mistakes = FORMULAS[name].expected(*case)
            values = [wrong for wrong, words in mistakes if words == why and not callable(wrong)]
            return values[which] if which < len(values) else right

        assert why in told_of_wrong(name, mistaken)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_parameters_of_its_stub(name):
    solution = getattr(module_of(name), EXERCISES[name].stub)
    assert list(signature(FORMULAS[name].expected).parameters) == list(signature(solution).parameters)


def test_every_exercise_has_wrong_answers_with_their_messages():
    found = {
        name: len(WRONG.get(name, ())) + (len(declared(FORMULAS[name])) if name in FORMULAS else 0)
        for name in EXERCISES
    }
    assert min(found.values()) >= 1, found


def test_a_deadlock_is_told_as_one(monkeypatch):
    monkeypatch.setattr(exercises, "TIMEOUT_S", 2)
    outcome = judge("data_parallel.all_reduce", all_receive_first)
    assert not outcome.solved
    assert says(outcome.message, "finish", "2")
    assert says(outcome.message, "receive", "exactly")
