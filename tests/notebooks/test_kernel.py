"""World inside a real Jupyter kernel: prints, errors, interrupt, restart, kill."""

import queue
import time

import psutil
import pytest
from conftest import few, gone, says
from jupyter_client.manager import start_new_kernel

SETUP = """
import os, time
import torch.distributed as dist
from pardemo import World
world = World(2)
def pids(): return os.getpid()
def hang(): time.sleep(600)
def fail(): raise KeyError(f"on rank {dist.get_rank()}")
"""


class Notebook:
    """A kernel and what its cells print."""

    def __init__(self):
        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.is_set_up = False

    def start(self, code):
        return self.client.execute(code)

    def finish(self, request, timeout_s=240):
        """Output text and error name of a cell."""
        text, error = "", ""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                text += content["text"]
            elif kind == "execute_result":
                text += content["data"]["text/plain"]
            elif kind == "error":
                error = content["ename"]
                text += content["evalue"]
            elif kind == "status" and content["execution_state"] == "idle":
                return text, error
        raise TimeoutError(f"the cell did not finish within {timeout_s} s; it printed: {text}")

    def run(self, code):
        return self.finish(self.start(code))

    def ranks(self):
        return [int(word) for word in self.run("print(*world.run(pids))")[0].split()]


@pytest.fixture(scope="module")
def opened():
    notebook = Notebook()
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(opened):
    """One notebook for all: a kernel loads torch for seconds, and only who restarts or kills it needs another."""
    if not opened.is_set_up:
        if not opened.manager.is_alive():
            opened.manager.restart_kernel(now=True)
        opened.client.wait_for_ready(timeout=240)
        assert opened.run(SETUP) == ("", "")
        opened.is_set_up = True
    return opened


def test_functions_prints_and_errors_of_a_cell(notebook):
    text, error = notebook.run("world.run(lambda: print('hello from', dist.get_rank()))")
    assert error == ""
    assert "[0] hello from 0\n" in text
    assert "[1] hello from 1\n" in text
    text, error = notebook.run("world.run(fail)")
    assert error == "RankFailed"
    assert says(text, "0", "KeyError", "on", "0", "1", "KeyError", "on", "1")
    assert "in fail" in text


def test_interrupting_the_cell_stops_the_work_and_the_next_cell_works(notebook):
    ranks = notebook.ranks()
    request = notebook.start("world.run(hang)")
    time.sleep(1.5)
    begin = time.monotonic()
    notebook.manager.interrupt_kernel()
    _, error = notebook.finish(request)
    assert error == "KeyboardInterrupt"
    assert time.monotonic() - begin < 120
    assert gone(ranks)
    assert len(notebook.ranks()) == 2


@pytest.mark.parametrize("how", few(["kill", "restart", "restart while busy"]))
def test_no_rank_outlives_its_kernel(notebook, how):
    ranks = notebook.ranks()
    if how == "restart while busy":
        notebook.start("world.run(hang)")
        time.sleep(1)
    notebook.is_set_up = False
    if how == "kill":
        psutil.Process(notebook.manager.provisioner.pid).kill()
    else:
        notebook.manager.restart_kernel(now=how != "restart")
    assert gone(ranks)
