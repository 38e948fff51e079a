"""The plug-in of pytest: test bodies on ranks, their failures as pytest's, and what is refused.

pytest runs within pytest here, mostly in this process: its runs share the process that ranks are forked from. A run
holds many small tests, since each begins with new ranks.
"""

import re
import subprocess
import sys
import textwrap

import pytest
import torch  # noqa: F401 (the runs within this one import it: not anew each time)

import pardemo.testing.runner  # noqa: F401 (and keep the warm process that the first of them starts)
from pardemo import project
from pardemo.testing.marker import rank_setups

pytest_plugins = ["pytester"]
IMPORTS = """
import os, random, sys, threading, time
from dataclasses import dataclass
import pytest, torch, torch.distributed as dist
from pardemo.testing import warm_world
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """``run(source, *arguments)``: pytest's result of a file with that text; its text is kept as ``.text``."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(source, *arguments, conftest="", subprocess=False):
        pytester.makepyfile(IMPORTS + textwrap.dedent(source))
        if conftest:
            pytester.makeconftest(IMPORTS + textwrap.dedent(conftest))
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        result = start("--strict-markers", "-p", "no:cacheprovider", *arguments)
        result.text = result.stdout.str() + result.stderr.str()
        return result

    return call


# ---------------------------------------------------------------- what works


def test_bodies_run_on_every_rank_with_fixtures_classes_and_parameters(run):
    result = run(
        """
        TOGETHER = 3

        @dataclass
        class Thing:
            x: int

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                return 2 * gradient

        class Layer(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.ones(2))

        def helper(rank):
            return TOGETHER * rank

        @pytest.mark.ranks(1, 2, 4)
        @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
        def test_sum(rank, world_size, dtype, here, there):
            x = torch.full((2,), helper(rank), dtype=dtype)
            dist.all_reduce(x)
            assert x.tolist() == [TOGETHER * world_size * (world_size - 1) / 2] * 2
            assert (here, there) == (["made here"], ("made here", rank, "twice"))

        @pytest.mark.ranks(2)
        def test_objects_of_this_file_travel_between_ranks(rank):
            out = [None, None]
            dist.all_gather_object(out, Thing(rank))
            assert out == [Thing(0), Thing(1)]
            x = torch.ones(2, requires_grad=True)
            Double.apply(x).sum().backward()
            assert x.grad.tolist() == [2, 2]
            assert Layer().weight.sum() == 2

        @pytest.mark.ranks(2)
        class TestInAClass:
            def setup_method(self):
                self.number = 5

            @pytest.fixture(params=["a", "b"])
            def own(self, request, world_size):
                yield f"{request.param}{self.number}{world_size}"
                dist.barrier()

            def test_method(self, own, rank):
                assert own in ("a52", "b52")
                assert self.number == 5

            @pytest.mark.usefixtures("sets_a_variable")
            def test_used_fixture(self):
                assert os.environ["SET_BY_FIXTURE"] == os.environ["RANK"]

            def test_that_it_is_gone(self):
                assert "SET_BY_FIXTURE" not in os.environ

        def test_a_world_of_the_same_ranks_has_this_file_too(request):
            assert warm_world(request.config, 2).run(helper, 3) == [9, 9]

        @pytest.mark.ranks(2)
        def test_on_ranks_again(rank):
            assert helper(rank) == 3 * rank

        LOCK = threading.Lock()

        @pytest.mark.parametrize("unused", [threading.Lock()], ids=["a lock in another test's marker"])
        def test_in_one_process(unused):
            assert not dist.is_initialized()
            with LOCK:
                assert os.environ.get("WORLD_SIZE") is None
        """,
        "-q",
        conftest="""
        @pytest.fixture
        def here():
            assert not dist.is_initialized()
            return ["made here"]

        @pytest.fixture
        def there(here, rank, other):
            assert dist.get_rank() == rank
            yield here[0], rank, other
            dist.barrier()

        @pytest.fixture
        def other(world_size):
            return "twice"

        @pytest.fixture
        def sets_a_variable(monkeypatch, rank):
            monkeypatch.setenv("SET_BY_FIXTURE", str(rank))
        """,
    )
    result.assert_outcomes(passed=6 + 1 + 2 + 2 + 2 + 1)


def test_what_pytest_offers_within_a_test_works_on_ranks(run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_raises_and_warns(rank):
            with pytest.raises(ZeroDivisionError):
                1 / 0
            with pytest.warns(UserWarning, match="careful"):
                import warnings
                warnings.warn("careful")
            assert 1 + rank == pytest.approx(1 + rank + 1e-9)

        @pytest.mark.ranks(2)
        def test_one_folder_for_all(rank, tmp_path):
            (tmp_path / str(rank)).write_text("here")
            dist.barrier()
            assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}

        @pytest.mark.ranks(2)
        def test_prints(rank, capsys):
            print("seen by", rank)
            assert capsys.readouterr().out == f"seen by {rank}\\n"
            with capsys.disabled():
                print("not captured")

        @pytest.mark.ranks(2)
        def test_changes(rank, monkeypatch):
            monkeypatch.setattr(os, "getpid", lambda: rank)
            os.environ["LEFT"] = "behind"
            os.chdir("/")
            assert os.getpid() == rank

        NUMBERS = []

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("turn", range(2))
        def test_does_not_depend_on_the_one_before(rank, tmp_path, turn):
            assert os.getpid() > 1
            assert "LEFT" not in os.environ
            assert os.getcwd() != "/"
            assert os.environ["PYTEST_CURRENT_TEST"].startswith("test_")
            same = torch.Generator().manual_seed(1000 + rank)
            assert torch.equal(torch.rand(3), torch.rand(3, generator=same))
            assert random.random() == random.Random(1000 + rank).random()
            assert NUMBERS == []
            NUMBERS.append(turn)

        @pytest.mark.ranks(2)
        def test_expected():
            pytest.xfail("known")

        class Own(Exception):
            pass

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=Own, strict=True)
        def test_expected_kind(rank):
            raise Own(rank)

        @pytest.mark.skipif(True, reason="never here")
        @pytest.mark.ranks(2)
        def test_never():
            raise AssertionError

        @pytest.mark.ranks(2)
        def test_returns(rank):
            return rank == 0
        """,
        "-rx",
    )
    result.assert_outcomes(passed=7, skipped=1, xfailed=2, warnings=1)
    result.stdout.fnmatch_lines(["*test_returns*returned bool on its ranks*", "XFAIL*test_expected?2ranks?*known"])


# ---------------------------------------------------------------- failures


def test_failures_are_told_as_pytest_tells_them(run):
    result = run(
        """
        def nested(numbers):
            inner = "an inner variable"
            assert numbers == [1, 2, 4]

        @pytest.mark.ranks(2)
        def test_one_rank(rank):
            print("printed by", rank)
            if rank == 1:
                nested([1, 2, 3])
            dist.barrier()

        @pytest.mark.ranks(3)
        def test_two_kinds(rank):
            if rank < 2:
                assert rank == 5
            raise ValueError("another one")

        @pytest.mark.ranks(2)
        def test_dies(rank):
            if rank == 0:
                os._exit(3)
            dist.barrier()

        @pytest.mark.ranks(2, timeout=2)
        def test_hangs(rank):
            if rank == 1:
                dist.barrier()

        @pytest.mark.ranks(2)
        def test_unpicklable(rank):
            class Mine(Exception):
                def __init__(self, one, two):
                    super().__init__(threading.Lock())

            raise Mine(1, 2)

        @pytest.mark.ranks(2)
        def test_next_one_works(rank, same_on_all_ranks):
            same_on_all_ranks(3)
        """,
        "-l",
    )
    result.assert_outcomes(passed=1, failed=5)
    lines = result.stdout.fnmatch_lines
    lines(
        [
            "*_ test_one_rank?2ranks? _*",
            "rank = 1",
            ">           nested([1, 2, 3])",
            "    def nested(numbers):",
            ">       assert numbers == [[]1, 2, 4[]]",
            "E       assert [[]1, 2, 3[]] == [[]1, 2, 4[]]",
            "E         At index 2 diff: 3 != 4",
            "inner      = 'an inner variable'",
            "test_failures_are_told_as_pytest_tells_them.py:*: AssertionError",
            "*- 2 ranks -*",
            "rank 0 did not finish: in test_one_rank (test_failures*.py, line *)",
            "rank 1 failed as above",
            "*- Captured stdout call -*",
            "[[]*[]] printed by *",
            "*_ test_two_kinds?3ranks? _*",
            "E           assert 0 == 5",
            "*- rank 2 failed elsewhere -*",
            "E       ValueError: another one",
            "*- 3 ranks -*",
            "rank 0 failed as above",
            "rank 1 failed there too: assert 1 == 5",
            "rank 2 failed: ValueError: another one",
            "*_ test_dies?2ranks? _*",
            "rank 0 died: exit code 3",
            "rank 1 then failed: RuntimeError: *Connection *",
            "*_ test_hangs?2ranks? _*",
            "rank 1 did not finish within 2 s (rank 0 did): rank 1 is in test_hangs (test_failures*.py, line *)",
            '  File "*test_failures_*.py", line * in test_hangs',
            "*_ test_unpicklable?2ranks? _*",
            ">       raise Mine(1, 2)",
            "FAILED *test_one_rank?2ranks? - rank 1: assert [[]1, 2, 3[]] == [[]1, 2, 4[]]",
        ]
    )
    result.stdout.no_fnmatch_line("*pardemo/testing*")
    result.stdout.no_fnmatch_line("*NotPassed*")


def test_ranks_have_to_agree_on_the_outcome(run):
    result = run(
        """
        @pytest.mark.ranks(2)
        def test_some_skip(rank):
            if rank == 1:
                pytest.skip("only one")

        @pytest.mark.ranks(2)
        def test_some_xfail(rank):
            if rank == 0:
                pytest.xfail("only zero")
            dist.barrier()

        @pytest.mark.ranks(2)
        def test_a_failure_counts_more(rank):
            if rank == 1:
                pytest.skip("only one")
            assert rank == 1

        @pytest.mark.ranks(2)
        def test_reasons_may_differ(rank):
            pytest.skip(f"reason {rank}")
        """,
        "-rs",
    )
    result.assert_outcomes(failed=3, skipped=1)
    result.stdout.fnmatch_lines(
        [
            "the ranks disagree: rank 0 passed; rank 1 skipped, 'only one'. Decide it alike: a test skips on all *",
            "the ranks disagree: rank 0 failed as pytest.xfail expects, 'only zero'; rank 1 did not finish: in test*",
            "E       assert 0 == 1",
            "rank 0 failed as above",
            "rank 1 skipped, 'only one'",
            "SKIPPED*reason 0; reason 1",
        ]
    )


def test_options_of_pytest(run, pytester):
    source = """
        @pytest.mark.ranks(2, 4)
        def test_first(rank):
            assert rank == -1, "wrong"

        @pytest.mark.ranks(2)
        def test_second():
            pass
        """
    result = run(source, "-x", "-k", "2ranks", "--tb=short")
    result.assert_outcomes(failed=1, deselected=1)
    result.stdout.fnmatch_lines(
        ["test_options_of_pytest.py:*: in test_first", "E   AssertionError: wrong", "*stopping after 1*"]
    )
    result = run(source, "--import-mode=importlib", "-k", "second or 4ranks", "--tb=line")
    result.assert_outcomes(failed=1, passed=1, deselected=1)
    assert "rank 0: AssertionError: wrong" in result.text
    for option in ("--pdb", "--trace"):
        result = run(source, option)
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        result.stderr.fnmatch_lines([f"ERROR: {option} cannot enter the ranks' processes*"])


@pytest.mark.nightly
def test_with_xdist(run):
    result = run(
        """
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("k", range(4))
        def test_many(rank, k):
            assert not (k == 3 and rank == 1)
            dist.barrier()
        """,
        "-n1",
        subprocess=True,
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["E       assert not (3 == 3 and 1 == 1)", "rank 0 did not finish: in *", "rank 1 failed as above"]
    )


def test_filters_of_warnings_hold_on_ranks(run, pytester):
    pytester.makeini("[pytest]\nfilterwarnings =\n    error\n    ignore:known:DeprecationWarning")
    result = run(
        """
        import warnings

        class Careful(UserWarning):
            pass

        @pytest.mark.ranks(2)
        def test_error(rank):
            warnings.warn("rank by rank")

        @pytest.mark.ranks(2)
        def test_ignored(rank):
            warnings.warn("known to us", DeprecationWarning)

        @pytest.mark.ranks(2)
        @pytest.mark.filterwarnings("default:rank by rank")
        def test_marked():
            warnings.warn("rank by rank", Careful)

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=Careful, strict=True)
        def test_own_kind():
            warnings.warn("of this file", Careful)
        """,
    )
    result.assert_outcomes(passed=2, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["E*UserWarning: rank by rank", "*UserWarning: rank by rank"])


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("marker", "line"),
    [
        ("ranks", "ranks names no number of ranks: ranks(2), ranks(2, 4) or ranks(cluster='2x2')"),
        ("ranks(0)", "a number of ranks, as in ranks(2, 4), must be a whole number from 1 to 64, not 0"),
        ("ranks('2')", "* not '2'"),
        ("ranks(2, 2)", "ranks names 2 twice"),
        ("ranks(2, size=3)", "ranks has no option 'size'; it has cluster, between, inside, timeout"),
        ("ranks(2, timeout=0)", "timeout is a number of seconds above 0, not 0"),
        ("ranks(cluster='two')", "cluster is a pardemo.Cluster, or hosts x ranks on each as in '2x4', not 'two'"),
        ("ranks(3, cluster='2x2')", "3 ranks do not fit a cluster of 2 × 2 = 4: leave the number out"),
        ("ranks(cluster='9x9')", "the cluster has 81 ranks; 64 is the limit"),
        ("ranks(2, between='1 MB/s')", "between is a limit of a cluster, and there is none"),
        ("ranks(cluster='2x2', between='fast')", "*fast*"),
    ],
)
def test_bad_markers_are_one_line_at_collection(run, marker, line):
    result = run(f"@pytest.mark.{marker}\ndef test_it(rank): pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_bad_markers*.py::test_it: @pytest.mark.ranks: {line}"])
    assert "Traceback" not in result.text


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("@pytest.mark.ranks(2)\nasync def test_it(): pass", "*ranks run plain functions, and this is an async one: *"),
        ("@pytest.mark.ranks(2)\ndef test_it(): yield", "*'yield' keyword is allowed in fixtures, but not in tests*"),
        (
            "from hypothesis import given, strategies\n@pytest.mark.ranks(2)\n@given(strategies.integers())\n"
            "def test_it(x): pass",
            "*under @given each rank would draw other examples: use @pytest.mark.parametrize, *",
        ),
    ],
    ids=["async", "yield", "given"],
)  # fmt: skip
def test_functions_that_cannot_run_on_ranks_are_refused_at_collection(run, source, line):
    result = run(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([line])


FIXTURES = """
import unittest
LOCK = threading.Lock()

@pytest.fixture
def lock():
    return threading.Lock()

@pytest.fixture
def asks(request, rank):
    return request.node

@pytest.fixture
def with_log(caplog, rank):
    return caplog

def test_not_marked(world_size): pass
"""
#: Marked tests, and what is said of each.
REFUSED = {
    "def test_fixture(lock): pass":
        "the value of 'lock' (a lock) cannot be sent to the ranks: cannot pickle '_thread.lock' object. A fix*",
    "def test_global():\n    with LOCK: pass":
        "test_global uses LOCK (a lock), which cannot be sent to the ranks: *. Make it within the function",
    "def test_request(request): pass": "the test runs on ranks, and 'request' stays in pytest's own process: *",
    "def test_caplog(caplog): pass": "the test runs on ranks, and 'caplog' stays in pytest's own process: *",
    "def test_inner(with_log): pass":
        "the fixture 'with_log' is made on the ranks, and 'caplog' stays in pytest's own process: *",
    "def test_asks(asks): pass":
        "request.node: on the ranks request has param and fixturename; make 'asks' of two fixtures, *",
    "def test_unused(wire): pass": "the test asks for 'wire' and measures nothing with it: write 'with wire:'",
    "def test_breakpoint(): breakpoint()": "E   RuntimeError: breakpoint(): a rank has no terminal. *",
    "class TestOld(unittest.TestCase):\n    def test_method(self): pass":
        "@pytest.mark.ranks: unittest runs the methods of a TestCase itself, in this process: make *",
}  # fmt: skip


def test_what_stays_in_the_main_process_is_refused_in_one_line(run):
    result = run(FIXTURES + "".join(f"@pytest.mark.ranks(2)\n{test}\n" for test in REFUSED), "--tb=short")
    assert result.parseoutcomes() == {"failed": 7, "errors": 3}
    unmarked = "the fixture 'world_size' is for tests that run on ranks: mark the test, as with @pytest.mark.ranks(2)"
    result.stdout.fnmatch_lines_random([*REFUSED.values(), unmarked])


def test_the_page_says_what_is_so(run):
    """docs/testing.md: its examples run, the failure that it shows is what pytest shows, the lines are the tool's."""
    page = (project.root() / "docs" / "testing.md").read_text()
    examples = "".join(re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL))
    (shown,) = re.findall(r"```\n(rank = 1\n.*?)```", page, flags=re.DOTALL)
    test = "".join(line[4:] if line[:1] != "E" else "" for line in shown.splitlines(True) if line[:1] in " >")
    result = run(examples + textwrap.dedent(f"{test}    dist.barrier()\n"), "-q")
    result.assert_outcomes(passed=4, failed=1)
    ours = [line for line in shown.splitlines() if line.startswith(("E", "rank ", ">"))]
    result.stdout.fnmatch_lines([re.sub(r"test_gather.py, line \d+", "*", re.sub(r"([][])", r"[\1]", o)) for o in ours])
    sources = "".join(path.read_text() for path in (project.PACKAGE / "testing").glob("*.py"))
    table = page[page.index("## What it cannot do") : page.index("And without a line")]
    said = re.findall(r"`([^`]{20,})`", "".join(re.findall(r"^\| (`.*?) \|", table, flags=re.MULTILINE)))
    assert len(said) == 8
    assert [line for line in said if line not in sources] == []


# ---------------------------------------------------------------- what it costs


def test_loading_it_loads_nothing_else():
    code = "import sys, pytest; was = set(sys.modules); import pardemo.testing.plugin; print(*set(sys.modules) - was)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    own = {"pardemo", "pardemo.extras", "pardemo.testing", "pardemo.testing.plugin"}
    assert {name for name in done.stdout.split() if name.startswith(("pardemo", "torch", "numpy"))} == own


def test_sizes_and_clusters_of_a_marker():
    one, four = rank_setups((1, 4), {}, 60.0)
    assert [(one.size, one.id, one.timeout_s), (four.size, four.id)] == [(1, "1rank", 60.0), (4, "4ranks")]
    (place,) = rank_setups((), {"cluster": "2x3", "inside": "1 Gbit/s", "timeout": 5}, 60.0)
    assert (place.size, place.id, place.timeout_s, place.cluster.inside) == (6, "2x3", 5.0, "1 Gbit/s")
