"""Cells that run on ranks: their variables stay, their values come home, what goes wrong is said in a line."""

import re
import signal
import threading

import nbformat
import pytest
import torch
from conftest import says
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from pardemo import Cluster, RankDied, RankFailed, RankTimeout, World
from pardemo.cells import run_cell

# ---------------------------------------------------------------- without a notebook


def test_variables_stay_on_the_ranks_from_one_text_to_the_next(world_of):
    world = world_of(2)
    run_cell(world, "x = torch.ones(3) * rank\ndef double(t): return 2 * t")
    cells = run_cell(world, "x = double(x)\ndist.all_reduce(x)\nx.tolist()", get=["x", "rank", "world_size"])
    assert [cell.shown for cell in cells] == ["[2.0, 2.0, 2.0]"] * 2
    assert [cell.got["rank"] for cell in cells] == [0, 1]
    assert {cell.got["world_size"] for cell in cells} == {2}
    assert all(torch.equal(cell.got["x"], torch.full((3,), 2.0)) for cell in cells)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("1 + 1", "2"),
        ("1 + 1;", None),
        ("None", None),
        ("y = 3", None),
        ("'é'; ", None),
        ("f'{rank >= 0};'", "'True;'"),
    ],
)
def test_the_last_expression_is_shown_as_a_notebook_shows_it(world_of, source, shown):
    assert [cell.shown for cell in run_cell(world_of(2), source)] == [shown] * 2


def test_variables_are_sent_to_the_ranks_and_classes_come_home(world_of):
    source = "class Pair:\n    def __init__(self, a): self.a = a\npair = Pair(n * rank)"
    cells = run_cell(world_of(2), source, put={"n": 21}, get=["pair"])
    assert [cell.got["pair"].a for cell in cells] == [0, 21]


def test_meters_measure_the_text(world_of):
    source = (
        "model = torch.nn.Linear(64, 64)\nwith timeline.span('compute'):\n    y = torch.zeros(1000)\ndist.all_reduce(y)"
    )
    for cell in run_cell(world_of(2), source, meters=["wire", "memory", "timeline"]):
        assert 4000 <= cell.measured["wire"].sent_bytes < 5000, "an all-reduce of two ranks sends its 4,000 bytes"
        assert cell.measured["memory"]["activations"] >= 4000 + 4 * 64 * 65, (
            "made in the cell: the model was not there before"
        )
        assert [span.kind for span in cell.measured["timeline"]] == ["compute"]
    for cell in run_cell(world_of(2), "z = torch.zeros(10)", meters=["memory"]):
        assert cell.measured["memory"]["parameters"] == 4 * 64 * 65, "a model of an earlier cell is known as one"


def test_bad_input_without_a_notebook(world_of):
    world = world_of(2)
    with pytest.raises(SyntaxError, match="invalid syntax"):
        run_cell(world, "a = = 1")
    with pytest.raises(ValueError, match=r"timeline.*seconds"):
        run_cell(world, "1", meters=["wires"])
    with pytest.raises(ValueError, match=r"0.*variable"):
        run_cell(world, "here = 1", get=["nowhere"])
    with pytest.raises(ValueError, match=r"0.*notebook"):
        run_cell(world, "import threading; lock = threading.Lock()", get=["lock"])
    assert run_cell(world, "here")[1].shown == "1", "nothing is lost"


# ---------------------------------------------------------------- in IPython


@pytest.fixture
def shell():
    shell = InteractiveShell()
    shell.run_line_magic("load_ext", "pardemo")
    yield shell
    shell.run_line_magic("unload_ext", "pardemo")


def run(shell, text):
    """The error of a cell, or None."""
    result = shell.run_cell(text)
    return result.error_before_exec or result.error_in_exec


def test_a_cell_runs_on_ranks_and_shows_equal_values_once(shell, capsys):
    assert run(shell, "%%ranks 2\nx = torch.tensor([rank + 1])\nprint('hello')\nrank") is None
    out = capsys.readouterr().out.splitlines()
    assert sorted(out[:2]) == ["[0] hello", "[1] hello"]
    assert out[2:] == ["rank 0: 0", "rank 1: 1"]
    assert run(shell, "%%ranks 2 --get x\ndist.all_reduce(x)\nx") is None
    assert capsys.readouterr().out == "all ranks: tensor([3])\n"
    assert [int(x) for x in shell.user_ns["x"]] == [3, 3]


def test_meters_show_a_line_and_leave_what_they_found(shell, capsys):
    cell = "x = torch.ones(100_000)\nwith timeline.span('communication'):\n    dist.all_reduce(x)"
    assert run(shell, f"%%ranks 2 --wire sum_bytes --memory --timeline\n{cell}") is None
    out = capsys.readouterr().out
    assert re.search(r"each rank sent 40\d,\d{3}( to 40\d,\d{3})? B and received 40", out)
    assert says(out, "counted", "kernel")
    assert "at the peak 400,0" in out
    assert says(out, "When")
    assert 400_000 <= shell.user_ns["sum_bytes"][0].sent_bytes < 402_000
    assert "wire" not in shell.user_ns, "the name that follows a meter is the variable's"
    assert [len(spans) for spans in shell.user_ns["timeline"]] == [1, 1]
    assert (
        run(shell, "%%ranks 2 --wire\nif rank: dist.send(torch.ones(9999), 0)\nelse: dist.recv(torch.ones(9999), 1)")
        is None
    )
    assert shell.user_ns["wire"][1].sent_bytes > 4 * 9999
    assert 400_000 <= shell.user_ns["sum_bytes"][0].sent_bytes < 402_000, "a later cell leaves it as it is"
    told = capsys.readouterr().out.splitlines()
    assert [line[:12] for line in told] == ["rank 0 sent ", "rank 1 sent "], "where they differ, each has its line"


def test_variables_of_the_notebook_are_given_by_name(shell, capsys):
    shell.user_ns["hidden"] = 7
    assert run(shell, "%%ranks {1 + 1} --put hidden\nhidden * rank") is None
    assert capsys.readouterr().out == "rank 0: 0\nrank 1: 7\n"


def test_cells_run_on_the_hosts_of_a_cluster(shell, capsys):
    shell.user_ns["two_hosts"] = Cluster(hosts=2, ranks_per_host=2, between="400 Mbit/s", tier="pacing")
    cell = "x = torch.ones(1_000_000)\nif rank == 0: dist.send(x, 2)\nif rank == 2: dist.recv(x, 0)"
    assert run(shell, f"%%ranks 4 --cluster two_hosts --links links_used --seconds\n{cell}") is None
    told = capsys.readouterr().out
    assert re.search(r"node 0 sent 4,00\d,\d{3} B to other nodes and received \d+ B from them", told)
    assert re.search(r"^0\.\d{3} s until the last rank was done$", told, re.MULTILINE)
    links = shell.user_ns["links_used"]
    assert links.matrix[0][2] == pytest.approx(4e6, rel=1e-3)
    assert links.hosts[1][1] == links.hosts[0][0]
    seconds = shell.user_ns["seconds"]
    assert len(seconds) == 4
    assert max(seconds) > 0.9 * 4e6 / 50e6
    shell.run_cell("%%ranks 4\n'x' in globals()")
    assert "all ranks: False" in capsys.readouterr().out, "ranks without a cluster are others"


@pytest.mark.parametrize(
    ("cell", "told"),
    [
        ("%%ranks 2 --cluster nowhere\n1", "--cluster nowhere: the notebook has no variable of that name"),
        ("%%ranks 2 --cluster shape\n1", "--cluster shape: the notebook has a tuple of that name; it names a Cluster"),
        ("%%ranks 2 --cluster three\n1", "2 ranks do not fit a cluster of 3 × 1 = 3"),
        ("%%ranks 0\n1", "the number of ranks is a whole number from 1 on, not 0"),
        ("%%ranks\n1", "the following arguments are required: ranks. Usage: %%ranks N"),
        ("%%ranks 2 --weir\n1", "unrecognized arguments: --weir. Usage: %%ranks N"),
        ("%%ranks 2 --timeout=-1\n1", "--timeout is a number of seconds above 0, not '-1'"),
        ("%%ranks 2\nx = 1\ny = (", "line 2 of the cell: '(' was never closed"),
        ("%%ranks 2\n%time x = 1", "a line that begins with % or ! is the notebook's"),
        ("%%ranks 2 --get a-b\n1", "'a-b' is not the name of a variable"),
        ("%%ranks --wire 2\n1", "'2' is not the name of a variable. Usage: %%ranks N"),
        ("%%ranks 2 --get a --wire a\n1", "a would be left twice: give what a meter measured a name of its own"),
        ("%%ranks 2 --get nowhere\n1", "get nowhere: on rank 0 no variable of that name; there are device, rank"),
        ("%%ranks 2 --put nothing\n1", "--put nothing: the notebook has no variable of that name"),
    ],
)
def test_bad_input_is_one_clear_line(shell, capsys, cell, told):
    shell.user_ns.update(shape=(2, 2), three=Cluster(hosts=3))
    assert type(run(shell, cell)).__name__ == "UsageError"
    printed = "".join(capsys.readouterr())
    assert told in printed
    assert "Traceback" not in printed
    assert len(printed.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("cell", "kind", "told"),
    [
        ("%%ranks 2\nif rank:\n    1 / 0", RankFailed, "rank 1: ZeroDivisionError: division by zero"),
        ("%%ranks 2\nimport os\nif rank: os._exit(3)", RankDied, "rank 1 died: exit code 3"),
        ("%%ranks 2 --timeout 4\nimport time\ntime.sleep(60 * rank)", RankTimeout, "rank 1 did not finish within 4 s"),
    ],
)
def test_ranks_that_fail_are_told_and_fresh_afterwards(shell, capsys, cell, kind, told):
    assert run(shell, "%%ranks 2\nkept = 1") is None
    assert type(run(shell, cell)) is kind
    printed = "".join(capsys.readouterr())
    assert told in printed
    assert printed.count("Traceback") <= 1, "the ranks' own"
    assert "pardemo/cells" not in printed
    assert says(printed.rstrip(), "ranks", "variables")
    assert run(shell, "%%ranks 2\n'kept' in globals()") is None
    assert "all ranks: False" in capsys.readouterr().out


def test_an_interrupt_is_one_line(shell, capsys):
    assert run(shell, "%%ranks 2\nkept = 1") is None
    threading.Timer(1, signal.raise_signal, [signal.SIGINT]).start()  # Python hands it to the main thread
    assert type(run(shell, "%%ranks 2\nimport time\ntime.sleep(60)")) is KeyboardInterrupt
    told = "KeyboardInterrupt. The ranks start anew with the next cell: their variables are gone."
    assert "".join(capsys.readouterr()).strip() == told
    assert run(shell, "%%ranks 2\n'kept' in globals()") is None
    assert "all ranks: False" in capsys.readouterr().out


def test_a_traceback_shows_the_line_of_the_cell(shell, capsys):
    run(shell, "%%ranks 2\nx = 1\nx / (rank - 1)")
    printed = "".join(capsys.readouterr())
    assert "line 2, in <module>" in printed
    assert says(printed, "/", "rank", "1")


def test_other_preloaded_modules_start_the_ranks_anew_and_say_so(shell, capsys):
    run(shell, "%%ranks 2\nkept = 1")
    run(shell, "%%ranks 2 --preload wave\nimport sys\n'kept' in globals(), 'wave' in sys.modules")
    out = capsys.readouterr().out
    assert says(out, "2", "variables")
    assert "all ranks: (False, True)" in out


# ---------------------------------------------------------------- in a kernel, as papermill runs it


def notebook(*cells):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    return book.cells


def test_in_a_kernel():
    cells = notebook("%load_ext pardemo", "%%ranks 2 --get total\ntotal = torch.ones(1) * rank\ndist.all_reduce(total)",
                     "[float(t) for t in total]")  # fmt: skip
    assert cells[-1].outputs[0]["data"]["text/plain"] == "[1.0, 1.0]"


@pytest.mark.parametrize("cell", ["%%ranks 0\n1", "%%ranks 2\n1 / 0"])
def test_in_a_kernel_a_cell_that_fails_fails_the_notebook(cell):
    with pytest.raises(CellExecutionError):
        notebook("%load_ext pardemo", cell, "1")


def test_the_ranks_end_with_the_extension(shell):
    run(shell, "%%ranks 2\n1")
    (world,) = shell.pardemo_ranks._worlds._worlds.values()
    shell.run_line_magic("unload_ext", "pardemo")
    with pytest.raises(Exception, match="closed"):
        world.run(World)
