"""One warm World per size for the whole session; tests that kill ranks make their own."""

import contextlib
import fcntl
import functools
import gc
import http.server
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import hypothesis
import psutil
import pytest
from costs import Costs

from pardemo import project
from pardemo.book.contents import CHAPTERS
from pardemo.book.page.exercises import exercises_of
from pardemo.peers.deepspeed import deepspeed_disk
from pardemo.testing import warm_world
from pardemo.testing.worlds import PRELOAD
from pardemo.world import bf16, fork_server, imports

#: Torch's threads sleep while they wait for one another, here and in all that tests start. They would keep a core busy
#: with waiting, and where another test has that core they take three times the seconds of it, for the same results.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

bf16.through_fp32_where_slow()  # as on ranks: many tests compare with one process, this one

# A shell hides Ctrl-C from what it runs in the background. Tests send it, to themselves and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

#: Where the tests begin, each of them: some name their files from there.
HERE = os.getcwd()

#: What these modules import: a rank that runs a function of theirs would load it anew, and there are a thousand ranks.
fork_server.PRELOADED += (*PRELOAD, "hypothesis")
#: No test is timed: an example that takes long beside other work is no fault of what it tries.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

#: The longest files begin, so that no worker is left with one of them while the other has nothing to do any more.
LONGEST = (
    "notebooks/test_collection.py", "test_finetune.py", "notebooks/test_lab.py",
    "test_cluster.py", "test_plan_memory.py", "test_world.py", "test_drawings.py", "test_runner.py",
    "test_site.py", "test_accelerate.py", "test_drawings_content.py", "test_launched.py",
    "test_zero.py", "test_plan_measured_peak.py", "test_plan.py", "test_plan_profile.py", "test_exercises.py",
    "test_plan_arithmetic.py", "test_plan_peaks.py", "test_prove_stop.py",
)  # fmt: skip

#: ``pytest -m quick``, for work in progress: the core against one process and against its formulas, and the package's
#: shape. No notebook, no browser, no other framework; under three minutes on two quiet cores. The gate is all of them.
QUICK = (
    "test_channel.py", "test_claims.py", "test_collectives.py", "test_data_parallel.py", "test_formulas.py",
    "test_groups.py", "test_layers.py", "test_layouts.py", "test_layouts_refused.py", "test_layouts_search.py",
    "test_meters.py", "test_pipeline.py", "test_pipeline_schedules.py", "test_readme.py", "test_recipe.py",
    "test_tensor_parallel.py", "test_types.py", "test_zero_engines.py", "test_zero_optimizers.py",
)  # fmt: skip


def in_gate(config):
    """Whether this is `make test`, which leaves to the night what is marked ``nightly``."""
    return "not nightly" in config.option.markexpr


def few(values, *gate):
    """Values of a parametrized test, of which the gate has those at these places (the first, by default).

    The others are marked ``nightly``: more of the same kind, each of which costs the gate as much as the first.
    """
    every = [value if hasattr(value, "marks") else pytest.param(*_as_tuple(value)) for value in values]
    kept = {place % len(every) for place in gate or (0,)}
    return [
        value if place in kept else value._replace(marks=(*value.marks, pytest.mark.nightly))
        for place, value in enumerate(every)
    ]


def _as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="write the table of CPU seconds by file of tests")


def pytest_configure(config):
    config.pluginmanager.register(Costs(config))
    if not hasattr(config, "workerinput"):  # a run that was ended while DeepSpeed compiled would hold up all later ones
        deepspeed_disk.clear_stale_locks()


def pytest_ignore_collect(collection_path, config):
    """With ``-m quick`` the other files are not even imported: that alone takes longer than many of the tests."""
    if config.option.markexpr == "quick" and collection_path.name.startswith("test_"):
        return collection_path.name not in QUICK or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """The tests' files load every library. What is there then lives to the end: the collector walks only what comes."""
    with imports.without_garbage_collection():
        found = yield
    gc.collect()
    gc.freeze()  # a second each time that it walked all of them, and where a test measures memory it does so often
    return found


def pytest_collection_modifyitems(items):
    folder = Path(__file__).parent
    places = {folder / name: place for place, name in enumerate(LONGEST)}
    assert all(path.is_file() for path in places), "a file of LONGEST has another name now"
    assert all((folder / name).is_file() for name in QUICK), "a file of QUICK has another name now"
    for item in items:
        if item.path.name in QUICK:
            item.add_marker("quick")
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """A test that ends in another folder fails: else those would that come after it on its worker, in some runs."""
    result = yield
    left = os.readlink("/proc/self/cwd")  # "… (deleted)", where it is gone
    if left != HERE:
        os.chdir(HERE)
        pytest.fail(f"the test leaves its process in {left}", pytrace=False)
    return result


@pytest.fixture(scope="session")
def world_of(pytestconfig):
    """``world_of(n)``: a World of n ranks, shared by all tests: by those that are marked with ``ranks(n)``, too."""
    return functools.partial(warm_world, pytestconfig)


@pytest.fixture(scope="session")
def reference_pages(tmp_path_factory):
    """The committed run with its pages, which are not committed: built once for all workers, in a folder of theirs."""
    from pardemo.book.run import report

    own = tmp_path_factory.getbasetemp()
    pages = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "pages"
    pages.mkdir(exist_ok=True)
    folder, committed = pages / "reference", project.root() / "outputs" / "reference"
    with (pages / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be building them
        if not (folder / "report.html").exists():  # the last that is built
            shutil.copytree(committed, folder, ignore=shutil.ignore_patterns("*.html"), dirs_exist_ok=True)
            report.rebuild(folder)
    return folder


@pytest.fixture(scope="module")
def chromium():
    """A headless browser; its event loop ends with the module, so that other tests may have their own."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here (Debian: apt install chromium)")
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (requirements.txt)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def out(tmp_path, monkeypatch):
    """An output folder of this test's own."""
    monkeypatch.setenv("PARDEMO_OUT", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def one_thread():
    """Small models are slower on several threads, the more so where tests run side by side; ranks have one, too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves the files of a folder, and prints no line for each."""

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def served_from(folder):
    """The address of a web server on this machine that has a folder's files."""
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class RunsCode:
    """A pickle that makes a folder where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def fenced(mark, page):
    """The two fenced blocks of a page behind a comment: what is run, and what it prints."""
    return re.findall(r"```\w+\n(.*?)```", page[page.index(f"<!-- {mark}:") :], flags=re.S)[:2]


def gone(pids, within_s=120.0):
    """Whether all processes end within that time (zombies count as ended): what would end by itself lives longer."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if not any(_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # also between the two lines of /proc that psutil reads
        return False


def exercises_of_the_book():
    """Every exercise, by ``chapter.name``, in the chapters' order."""
    return {f"{chapter}.{name}": exercise for chapter in CHAPTERS for name, exercise in exercises_of(chapter).items()}


def says(text, *values):
    """Whether a message, or one of several, names these in this order. How it says so is for its readers to like."""
    return any(_in_order(line, values) for line in ([text] if isinstance(text, str) else text))


@contextlib.contextmanager
def refused(message):
    """The block raises a ValueError whose text has ``message`` and is one line; gives it."""
    with pytest.raises(ValueError) as error:  # noqa: PT011, the message is looked at below
        yield error
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def _in_order(text, values):
    at = 0
    for value in values:
        found = text.find(value, at)
        if found < 0:
            return False
        at = found + len(value)
    return True


def tiny_folder(folder, texts, **changes):
    """A checkpoint folder with a random Baichuan2 of two small layers and a tokenizer of these texts."""
    import torch
    from tiny_model import train_tokenizer

    from pardemo.baichuan2 import Baichuan2Config, Baichuan2ForCausalLM, Baichuan2Tokenizer, save_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(train_tokenizer(texts, 1400))
    tokenizer = Baichuan2Tokenizer(str(folder / "tokenizer.model"))
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = Baichuan2Config(vocab_size=tokenizer.vocab_size, initializer_range=0.1, **{**sizes, **changes})
    save_checkpoint(Baichuan2ForCausalLM(config), folder, tokenizer)
    return folder
