"""What the script of the mutants changes in a module, and what it leaves alone."""

import mutants
from mutations import mutants_of

MODULE = '''
"""Of 3 things < 4."""
import os

def f(a: int = 1, *, b: "x < 1" = True) -> "not a":
    """3 < 4."""
    if a < 2 and not b:
        raise ValueError(f"{a + 1} is above 3", min(a, b))
    a.b = max(a, -b)
    return a + 7000
'''


def test_each_mutant_differs_in_one_thing():
    found = {(line, before, after) for line, each in mutants_of(MODULE).items() for before, after, _ in each}
    assert found == {
        (5, "1", "2"), (5, "True", "False"), (7, "a < 2 and (not b)", "(not (a < 2 and (not b)))"),
        (7, "a < 2 and (not b)", "(a < 2 or not b)"), (7, "a < 2", "(a <= 2)"), (7, "a < 2", "(a > 2)"), (7, "2", "3"),
        (7, "not b", "(b)"), (8, "raise ValueError(f'{a + 1} is above 3', min(a, b))", "pass"),
        (9, "a.b = max(a, -b)", "pass"), (9, "max(a, -b)", "min(a, -b)"), (9, "max(a, -b)", "max(-b, a)"),
        (9, "-b", "(b)"), (10, "return a + 7000", "return None"), (10, "a + 7000", "(a - 7000)"), (10, "7000", "14000"),
    }  # fmt: skip
    for line, each in mutants_of(MODULE).items():
        for _, after, module in each:
            compile(module, "a mutant", "exec")
            others = [number for number in range(1, 11) if number != line]
            assert [module.splitlines()[n - 1] for n in others] == [MODULE.splitlines()[n - 1] for n in others]
            assert after in module.splitlines()[line - 1]


def test_the_tests_of_a_part_come_before_those_of_its_room():
    assert mutants.tests_of("pardemo/world/waiting.py")[0] == "tests/test_hangs.py"
    assert set(mutants.tests_of("pardemo/world/waiting.py")) > set(mutants.tests_of("pardemo/world/rank.py"))
    assert mutants.tests_of("pardemo/draw/charts.py") == []
