"""Techniques over ranks in configurations drawn at random, each against one process.

``PARDEMO_CONFIGURATIONS=200 pytest tests/test_random_configurations.py`` draws as many on each number of ranks;
``pardemo soak --only layouts/attention`` draws others.
"""

import os

import pytest

from pardemo.soak.layouts.techniques import RANKS, TECHNIQUES, check

#: On each number of ranks; what seed gives which configuration does not change.
MANY = int(os.environ.get("PARDEMO_CONFIGURATIONS", "25"))


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("name", TECHNIQUES)
def test_ranks_get_what_one_process_gets(rank, world_size, name):
    for number in range(MANY):
        check(name, number, 1)
