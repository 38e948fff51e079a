"""What the chapter *When a host fails* reads from what torchrun prints."""

import inspect

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from pardemo.book.chapters.host_fails.restarts import agents_lines, events_of, restarts_of

PRINTED = """host 0, rank 1 of 2, process 12: kill 7 20.5
W1127 21:17:27.970000 25144 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 25181 closing signal
E1127 21:17:28.050000 25144 .venv/lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed of: /home/a/python
host 0, rank 0 of 2, process 13: start 5 24.25
"""


def test_the_agents_lines_wherever_torch_lies():
    assert agents_lines(PRINTED) == ["Sending process 25181 closing signal", "failed of: python"]


def test_what_ranks_said():
    assert [(event.rank, event.what, event.step) for event in events_of(PRINTED)] == [(1, "kill", 7), (0, "start", 5)]


HOSTS = """host 0, rank 0 of 2, process 10: start 0 1.0
host 0, rank 0 of 2, process 10: load 0 2.0
host 1, rank 1 of 2, process 11: start 0 1.5
host 1, rank 1 of 2, process 11: load 0 3.0
host 0, rank 0 of 2, process 10: step 6 4.0
host 1, rank 1 of 2, process 11: kill 7 4.5
host 0, rank 0 of 1, process 12: start 5 9.5
host 0, rank 0 of 1, process 12: load 5 11.0
host 0, rank 0 of 1, process 12: step 5 11.25
host 0, rank 0 of 1, process 12: step 6 11.5
host 0, rank 0 of 2, process 13: start 5 12.5
host 2, rank 1 of 2, process 14: start 5 12.75
host 2, rank 1 of 2, process 14: load 5 13.5
host 0, rank 0 of 2, process 13: load 5 13.75
host 2, rank 1 of 2, process 14: step 5 14.0
host 0, rank 0 of 2, process 13: step 5 14.0
"""


def test_restarts_in_their_parts():
    died, came = restarts_of(events_of(HOSTS))
    assert died == (2, 5.0, 1.5, 0.25)
    assert came == (2, 1.25, 1.0, 0.25)
    assert died.seconds == 6.75


def test_a_job_that_is_not_restarted():
    assert restarts_of(events_of(HOSTS)[:5]) == []
    with pytest.raises(ValueError, match="no rank said anything"):
        events_of("")


def test_torchrun_s_own_settings_are_those_that_the_page_names():
    settings = inspect.signature(dynamic_rendezvous.DynamicRendezvousHandler.from_backend).parameters
    assert (settings["keep_alive_interval"].default, settings["keep_alive_max_attempt"].default) == (5, 3)
    assert dynamic_rendezvous.RendezvousTimeout().last_call.total_seconds() == 30
