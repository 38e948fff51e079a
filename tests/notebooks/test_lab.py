"""JupyterLab as a reader uses it, in a headless Chromium: run all, sliders, interrupt, restart."""

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time

import nbformat
import psutil
import pytest
from conftest import gone

from pardemo import project
from pardemo.book.contents import notebook_of

pytestmark = pytest.mark.collection
#: every cell is in the page, not those alone that are in sight; nothing asks to be confirmed
SETTINGS = {
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
}
HANG = [
    "import json, os, time\nfrom pathlib import Path\nfrom pardemo import World\n"
    "world = World(2)\ndef pid(): return os.getpid()\ndef hang(): time.sleep(900)",
    "Path('ranks.json').write_text(json.dumps([os.getpid(), *world.run(pid)]));",
    "world.run(hang)",
    "Path('again.json').write_text(json.dumps([os.getpid(), *world.run(pid)]));",
]

#: *Baichuan2: the plan*'s slider, without the minute of dry runs before it.
PLAN = [
    "from pardemo.book.chapters.baichuan2_plan import drawings\nway = {b: {'logits': b * 1.5e9} for b in (1, 8, 32)}\n"
    "drawings.memory_by_batch({'LoRA': way}, 83e9)",
]
ATTEMPTS = [
    'from pardemo.book.page import Page\n\npage = Page("hybrid_parallel")\n\n\n'
    f'def my_order(): {body}\n\n\npage.check("order", my_order)'
    for body in ("...", 'return "pp-dp-tp"', 'return "tp-dp-pp"')
]


@pytest.fixture(scope="module")
def lab(chromium, tmp_path_factory):  # no browser: no server
    """A server of this test's own on a free port: (address, token, folder of the notebooks)."""
    home = tmp_path_factory.mktemp("lab")
    shutil.copytree(project.root() / "notebooks", home / "notebooks")
    for name, sources in {"hang": HANG, "plan": PLAN, "attempts": ATTEMPTS}.items():
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel()), home / "notebooks" / f"{name}.ipynb")
    for name, value in SETTINGS.items():
        project.write_json(home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings", value)
    token = secrets.token_hex(16)
    folders = {"JUPYTER_RUNTIME_DIR": "runtime", "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data",
               "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
               "IPYTHONDIR": "ipython", "PARDEMO_OUT": "out"}  # fmt: skip
    with (home / "log").open("w") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0",
             f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={home / 'notebooks'}",
             "--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
             "--LabApp.extension_manager=readonly"],
            stdout=log, stderr=log, env={**os.environ, **{key: str(home / name) for key, name in folders.items()}},
        )  # fmt: skip
    try:
        yield _address(server, home), token, home / "notebooks"
    finally:
        family = [p.pid for p in psutil.Process(server.pid).children(recursive=True)]
        server.terminate()  # it ends its kernels, and these their ranks
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        assert gone(family), "the server's kernels or their ranks are still there"


def _address(server, home):
    until = time.monotonic() + 240
    while time.monotonic() < until and server.poll() is None:
        for told in (home / "runtime").glob("jpserver-*.json"):
            try:
                return json.loads(told.read_text())["url"]
            except ValueError:  # it is being written
                continue
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start: {(home / 'log').read_text()[-2000:]}")


def kernel():
    return {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


class Reader:
    """Somebody at the lab, with one notebook open and its kernel ready."""

    def __init__(self, window, lab, name):
        self.address, self.token, self.folder = lab
        self.name = name
        self.page = window.new_page()
        self.page.set_default_timeout(240_000)
        self.page.goto(f"{self.address}lab/workspaces/{name[:2]}/tree/{name}.ipynb?token={self.token}")
        self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        until = time.monotonic() + 60
        while not self._is_idle() and time.monotonic() < until:
            time.sleep(0.2)
        if not self._is_idle():  # seen once, on a loaded machine: a kernel that the server called otherwise for minutes
            self.page.reload()  # which asks the kernel again
            self.page.locator(".jp-Notebook .jp-CodeCell").first.wait_for()
        self.idle()

    def idle(self):
        """Waits until the kernel is there and does nothing: pressed earlier, Run asks for a kernel."""
        self.until(self._is_idle, "an idle kernel")
        self.page.locator('.jp-NotebookPanel .jp-Notebook-ExecutionIndicator[data-status="idle"]').wait_for()

    def _is_idle(self):
        return self._states() == ["idle"]

    def _states(self):
        sessions = self.page.request.get(f"{self.address}api/sessions?token={self.token}").json()
        return [s["kernel"]["execution_state"] for s in sessions if s["path"] == f"{self.name}.ipynb"]

    def menu(self, menu, entry):
        self.page.locator(".lm-MenuBar-itemLabel", has_text=menu).first.click()
        self.page.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def press_run(self, cell):
        """Runs one cell, the count from 0, as Shift-Enter does."""
        self.page.locator(".jp-Notebook .jp-Cell").nth(cell).locator(
            ".jp-InputPrompt:visible, .jp-MarkdownOutput"
        ).first.click()
        self.page.keyboard.press("Shift+Enter")

    def prompts(self):
        """Of every code cell; a folded one has a second, empty one in its place."""
        return self.page.locator(".jp-CodeCell .jp-InputArea .jp-InputPrompt").all_text_contents()

    def until(self, condition, what, seconds=240):
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"{what}: not within {seconds} s; {self._states()}, {self.prompts()}"
            time.sleep(0.2)

    def errors(self):
        return self.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all_text_contents()


@pytest.fixture(scope="module")
def window(chromium):
    """One for all pages: JupyterLab's scripts are fetched and compiled once."""
    with chromium.new_context(viewport={"width": 1300, "height": 1000}) as opened:
        yield opened


@pytest.fixture
def open_notebook(lab, window):
    readers = []

    def open_(name):
        readers.append(Reader(window, lab, name))
        return readers[-1]

    yield open_
    for reader in readers:
        reader.page.close()


@pytest.mark.nightly  # the gate has a player, a hint and an exercise in JupyterLab
def test_notebook_02_runs_to_its_end(open_notebook):
    """A lesson as its reader runs it: cells on ranks, guesses, drawings, claims in a line."""
    reader = open_notebook("02_megatron_mlp")
    reader.menu("Run", "Run All Cells")
    reader.until(lambda: all(p.strip("[]: ").isdigit() for p in reader.prompts()), "Run All", 900)
    assert reader.errors() == []
    last = reader.page.locator(".jp-CodeCell").last.locator(".jp-OutputArea").inner_text()
    assert re.search(r"\d+ claims in \d+ cases: \d+ hold", last)
    assert "fail" not in last
    drawn = reader.page.locator(".jp-OutputArea img").evaluate_all("all => all.map(image => image.naturalWidth)")
    assert len(drawn) == 5
    assert all(width > 300 for width in drawn), "every picture is there, once"
    shown = reader.page.locator(".jp-OutputArea svg[role=img]").evaluate_all("all => all.map(s => s.clientWidth)")
    assert len(shown) == 6
    assert all(width > 300 for width in shown)
    lines = reader.page.locator(".jp-OutputArea .claim").evaluate_all("all => all.map(line => line.dataset.claim)")
    assert "s26.columns" in lines, "the claim stands where it was measured"
    answer = reader.page.locator(".jp-OutputArea details.guess").first
    assert "It is " not in answer.inner_text(), "folded, for a reader who has not guessed"
    answer.locator("summary").click()
    assert re.search(r"It is \d+\.?\d* φ", answer.inner_text())


def test_every_chapter_with_a_widget_has_its_test_here():
    made = {
        path.stem
        for path in project.PACKAGE.rglob("*.py")
        if re.search(r"^def \w+_explorer\(", path.read_text(), re.MULTILINE)
    }
    assert made == {"drawings", "charts"}
    asked = {name: re.findall(r"(\w+_explorer)\(", path.read_text()) for name, path in project.notebooks().items()}
    assert {name: used for name, used in asked.items() if used} == {
        notebook_of("zero_memory"): ["states_explorer"],
        notebook_of("which_layout"): ["layout_explorer"],
    }
    assert not [name for name, path in project.notebooks().items() if "ipywidgets" in path.read_text()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sliders"),
    [
        (notebook_of("zero_memory"), ["N"]),
        (notebook_of("which_layout"), ["GPUs", "Gbit/s", "sequence", "TP", "PP"]),
    ],
    ids=["06", "14"],
)
def test_sliders_move_the_picture(lab, open_notebook, name, sliders):
    cells = nbformat.read(lab[2] / f"{name}.ipynb", as_version=4).cells
    (explorer,) = [cell for cell in cells if "_explorer(" in cell.source]
    imports = next(cell for cell in cells if cell.cell_type == "code")
    # these two alone: what lies between starts worlds, which the formula does not need, and takes long to be shown
    alone = nbformat.v4.new_notebook(cells=[imports, explorer], metadata=kernel())
    nbformat.write(alone, lab[2] / f"{name}_sliders.ipynb")
    reader = open_notebook(f"{name}_sliders")
    for cell in (0, 1):
        reader.press_run(cell)
    output = reader.page.locator(".jp-Notebook .jp-Cell").nth(1).locator(".jp-OutputArea")
    picture = output.locator("svg[role=img]").first
    reader.until(picture.count, "sliders and a picture")
    for slider in sliders:
        before = picture.inner_html()
        handle = output.locator(".widget-slider", has_text=slider).locator(".noUi-handle")
        handle.focus()
        reader.page.keyboard.press("ArrowRight")
        reader.until(lambda shown=before: picture.inner_html() != shown, f"the picture follows {slider}")
    assert reader.errors() == []


def test_a_player_moves_by_its_slider(open_notebook):
    reader = open_notebook("plan")
    reader.press_run(0)
    player = reader.page.locator(".jp-OutputArea .player")
    player.wait_for(timeout=240_000)
    told = player.locator(".frame:visible figcaption")
    assert told.inner_text().startswith("Micro-batch 8")
    player.locator("input").fill("2")  # the third of its three frames
    reader.until(lambda: told.inner_text().startswith("Micro-batch 32"), "the next frame")
    for place in (player.locator("input"), player):  # the arrow keys, on the slider and on the picture: a frame each
        place.focus()
        reader.page.keyboard.press("ArrowLeft")
        reader.until(lambda: told.inner_text().startswith("Micro-batch 8"), "the frame before")
        reader.page.keyboard.press("ArrowRight")
        reader.until(lambda: told.inner_text().startswith("Micro-batch 32"), "the frame after it")
    assert reader.errors() == []


def test_hint_and_solution_unfold(open_notebook):
    reader = open_notebook("attempts")
    for cell in range(3):
        reader.press_run(cell)
    outputs = reader.page.locator(".jp-CodeCell .jp-OutputArea-output")
    reader.until(lambda: outputs.count() == 3, "one output for each attempt")
    reader.idle()
    open_, wrong, right = (outputs.nth(k) for k in range(3))
    told = [output.inner_text().splitlines() for output in (open_, wrong, right)]
    assert told[0] == ["Not attempted yet: write my_order above, then run this cell again.", "Hint", "Solution"]
    assert "let tp run fastest" in told[1][0]
    assert told[1][1:] == ["Hint", "Solution"]
    assert told[2][0].startswith("order: solved.")
    assert told[2][1:] == ["One way to write it"]
    for output, summary, text in ((open_, "Hint", "runs fastest"), (wrong, "Solution", "def my_order():")):
        inside = output.locator("details", has_text=summary).get_by_text(text)
        assert not inside.is_visible()
        output.get_by_text(summary, exact=True).click()
        inside.wait_for(state="visible")
    assert reader.errors() == []


@pytest.mark.nightly  # of a kernel without JupyterLab the gate has it in test_kernel.py
def test_interrupt_and_restart(open_notebook):
    reader = open_notebook("hang")
    for cell in (0, 1):
        reader.press_run(cell)
    reader.until((reader.folder / "ranks.json").exists, "two ranks")
    reader.idle()
    kernel_pid, *ranks = json.loads((reader.folder / "ranks.json").read_text())
    assert len(ranks) == 2
    reader.press_run(2)
    reader.page.locator('.jp-Notebook-ExecutionIndicator[data-status="busy"]').wait_for()
    time.sleep(1)
    reader.menu("Kernel", "Interrupt Kernel")
    reader.until(lambda: "KeyboardInterrupt" in " ".join(reader.errors()), "the hanging cell ends")
    assert gone(ranks), "and its ranks"
    reader.press_run(3)
    reader.until((reader.folder / "again.json").exists, "the next cell works")
    same, *ranks = json.loads((reader.folder / "again.json").read_text())
    assert same == kernel_pid
    assert len(ranks) == 2
    reader.menu("Kernel", "Restart Kernel…")
    reader.page.locator(".jp-Dialog .jp-mod-accept, .jp-Dialog .jp-mod-warn").last.click()
    assert gone([kernel_pid, *ranks]), "no rank outlives its kernel"
    reader.idle()
