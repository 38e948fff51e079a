"""Exercises that check themselves on real ranks: ``check(name, my_function)``.

A check never raises: it prints what is right or what is missing, so that a notebook with open exercises still
runs from top to bottom. It returns whether the exercise is solved.
"""

import secrets
from collections.abc import Callable
from importlib import import_module

from pardemo.world.errors import RankDied, RankError, RankFailed


class Mistake(Exception):
    """What is wrong with a solution, in words that teach."""


def call(function: Callable, *args: object) -> object:
    """Calls a solution in this process; what it raises becomes a Mistake."""
    try:
        return function(*args)
    except Exception as error:
        raise Mistake(f"Your function raised {type(error).__name__}: {error}") from None


#: What an exercise that asks for sends and receives allows.
POINT_TO_POINT = {"send", "recv"}


def fresh_seed() -> int:
    """For the numbers of one check: what a solution can neither know nor remember has to travel between the ranks."""
    return secrets.randbits(31)


#: name -> (module of this package, function that checks). A chapter's exercises live in ``chapter_NN``.
EXERCISES = {
    "00_bus_bandwidth": ("chapter_00", "check_bus_bandwidth"),
    "00_neighbour": ("chapter_00", "check_neighbour"),
    "01_all_reduce": ("chapter_01", "check_all_reduce"),
    "01_unequal_shards": ("chapter_01", "check_unequal_shards"),
    "02_1f1b": ("chapter_02", "check_1f1b"),
    "02_bubble": ("chapter_02", "check_bubble"),
    "03_f": ("chapter_03", "check_f"),
    "03_split": ("chapter_03", "check_split"),
    "04_qkv_rows": ("chapter_04", "check_qkv_rows"),
    "04_vocabulary_loss": ("chapter_04", "check_vocabulary_loss"),
    "05_groups": ("chapter_05", "check_groups"),
    "05_order": ("chapter_05", "check_order"),
    "06_bytes": ("chapter_06", "check_bytes"),
    "06_stage": ("chapter_06", "check_stage"),
    "07_zero1_step": ("chapter_07", "check_zero1_step"),
    "07_psi": ("chapter_07", "check_psi"),
    "08_checkpoints": ("chapter_08", "check_checkpoints"),
    "08_order": ("chapter_08", "check_order"),
    "09_config": ("chapter_09", "check_config"),
    "09_in_step": ("chapter_09", "check_in_step"),
    "10_lora_states": ("chapter_10", "check_lora_states"),
    "10_steps": ("chapter_10", "check_steps"),
    "11_labels": ("chapter_11", "check_labels"),
    "11_lora": ("chapter_11", "check_lora"),
    "12_rouge_l": ("chapter_12", "check_rouge_l"),
    "12_split": ("chapter_12", "check_split"),
    "13_step_bytes": ("chapter_13", "check_step_bytes"),
    "13_verdict": ("chapter_13", "check_verdict"),
}


def check(name: str, function: Callable) -> bool:
    """Runs ``function`` against exercise ``name`` and prints the verdict; True when it is solved.

    Raises:
        ValueError: no exercise of that name.
    """
    if name not in EXERCISES:
        raise ValueError(f"no exercise {name!r}; there are: {', '.join(EXERCISES)}")
    module, checker = EXERCISES[name]
    try:
        praise = getattr(import_module(f"pardemo.collection.exercises.{module}"), checker)(function)
    except Mistake as mistake:
        print(f"{name}: not yet. {mistake}")
        return False
    except TypeError as error:  # it cannot be sent to the ranks
        print(f"{name}: not yet. {error}")
        return False
    except RankFailed as error:
        rank, failure = error.first
        print(f"{name}: not yet. Your function raised on rank {rank}: {failure.headline}")
        return False
    except RankError as error:
        died = isinstance(error, RankDied)
        hint = "" if died else " Does every rank receive exactly what another one sends?"
        print(f"{name}: not yet. {str(error).splitlines()[0]}.{hint}")
        return False
    print(f"{name}: solved. {praise}")
    return True
