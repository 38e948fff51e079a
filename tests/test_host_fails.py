"""What the chapter *When a host fails* reads from what torchrun prints."""

from pardemo.book.chapters.host_fails.restarts import agents_lines, events_of

PRINTED = """rank 1, process 12: kill 7 20.5
W1127 21:17:27.970000 25144 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 25181 closing signal
E1127 21:17:28.050000 25144 .venv/lib/torch/distributed/elastic/multiprocessing/api.py:1002] failed of: /home/a/python
rank 0, process 13: begin 5 24.25
"""


def test_the_agents_lines_wherever_torch_lies():
    assert agents_lines(PRINTED) == ["Sending process 25181 closing signal", "failed of: python"]


def test_what_ranks_said():
    assert [(event.rank, event.what, event.step) for event in events_of(PRINTED)] == [(1, "kill", 7), (0, "begin", 5)]
