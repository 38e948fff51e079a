"""The site's page that plans: the planner of layouts as it is, run by Pyodide in the reader's browser.

``plan.html`` is the form and the answer, ``plan/`` what it loads: the script, the worker that runs Python beside the
page, ``pardemo.zip`` with the planner's modules, and Pyodide. Nothing is asked of another host.
"""

import shutil
import zipfile
from pathlib import Path
from typing import Any

from pardemo import project
from pardemo.book.run import report
from pardemo.book.run.site import pyodide
from pardemo.draw import palette
from pardemo.planner import hardware
from pardemo.planner.layouts import configurations, layout_command
from pardemo.planner.layouts.configurations import MODELS
from pardemo.planner.layouts.micro_batch import PARTS
from pardemo.planner.layouts.programs import PROGRAMS

FILE, FOLDER = "plan.html", "plan"
TITLE = "Plan a training job"
TEMPLATES = Path(__file__).resolve().parent
#: Of the package, what the planner of layouts imports; all of it loads without a library.
MODULES = (
    "__init__.py", "argument_checks.py", "project.py", "extras.py", "tables.py", "planner/__init__.py",
    "planner/divisors.py", "planner/hardware.py", "planner/rates.py", "planner/gpus.csv", "planner/profile.py",
    "planner/estimate.py",
    "formulas/__init__.py",
    "formulas/tensor_parallel.py",
    "peers/__init__.py", "peers/accelerate/__init__.py", "peers/accelerate/job_settings.py",
    "planner/layouts/**/*.py", "planner/layouts/**/*.json", "planner/layouts/**/*.toml",
)  # fmt: skip
#: What the page asks when it is opened without a question: it answers in a second.
FIRST_QUESTION = {"model": "llama3-8b", "gpu": "H100", "gpus": "8", "sequence": "8192", "samples": "64"}
GIGABITS = (10, 25, 100, 200, 400, 800, 1600, 3200, 6400)  # the slider of links


def body(with_python: bool) -> str:
    """The page's own part of its frame. ``with_python``: whether Pyodide is beside it."""
    template = report.environment(TEMPLATES).get_template("plan.html.j2")
    links = {name: rate * 8 / 1e9 for name, rate in hardware.LINKS.items()}
    return template.render(
        with_python=with_python, folder=FOLDER, version=pyodide.VERSION, styles=_styles(), first=FIRST_QUESTION,
        models=_models(), gpus=list(hardware.GPUS), links=links,
        programs={name: program.fitted_to for name, program in PROGRAMS.items()}, usual_program=layout_command.PROGRAM,
        precisions=hardware.PRECISIONS, gigabits=GIGABITS, usual_link=hardware.USUAL_LINK,
        usual_sequence=layout_command.SEQUENCE,
    )  # fmt: skip


def write_plan_page(into: Path, runtime: Path | None) -> None:
    """Writes what the page loads into the site's folder; ``runtime`` is Pyodide's, None where there is none."""
    folder = into / FOLDER
    folder.mkdir()
    for name in ("plan.js", "worker.mjs"):
        shutil.copyfile(TEMPLATES / name, folder / name)
    if runtime is None:
        return
    pack_planner(folder / "pardemo.zip")
    (folder / "pyodide").mkdir()
    for name in pyodide.FILES:
        shutil.copyfile(runtime / name, folder / "pyodide" / name)


def pack_planner(path: Path) -> None:
    """Writes the planner's modules as an archive, the same bytes for the same modules."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for pattern in MODULES:
            for module in sorted(project.PACKAGE.glob(pattern)):
                name = f"pardemo/{module.relative_to(project.PACKAGE).as_posix()}"
                archive.writestr(zipfile.ZipInfo(name), module.read_bytes(), zipfile.ZIP_DEFLATED)


def _models() -> dict[str, str]:
    """Built-in models with how many parameters they have."""
    return {name: f"{configurations.shape_of(name).params / 1e9:.3g}B" for name in MODELS}


#: A pattern of the book's charts, as a background's layers over a colour.
_HATCHES = {
    "": "",
    "///": "repeating-linear-gradient(135deg, #fff9 0 1px, #0000 1px 5px)",
    "...": "radial-gradient(#fffc 1px, #0000 1.3px) 0 0/5px 5px",
    "---": "repeating-linear-gradient(0deg, #fff9 0 1px, #0000 1px 4px)",
    "+++": "repeating-linear-gradient(0deg, #fff9 0 1px, #0000 1px 5px), "
    "repeating-linear-gradient(90deg, #fff9 0 1px, #0000 1px 5px)",
    "xxx": "repeating-linear-gradient(45deg, #fff9 0 1px, #0000 1px 5px), "
    "repeating-linear-gradient(135deg, #fff9 0 1px, #0000 1px 5px)",
}


def _styles() -> dict[str, Any]:
    """Backgrounds by part of a step's time and by line of memory, those of the book's charts."""
    from pardemo.planner.layouts import charts

    drawn = {"time": charts.PARTS, "memory": {line: (colour, "") for line, colour in charts.LINES.items()}}
    every = {"time": PARTS, "memory": charts.LINES}
    return {
        kind: {
            name: " ".join(filter(None, (f"{_HATCHES[hatch]}," if hatch else "", colour)))
            for name in every[kind]
            for colour, hatch in [drawn[kind].get(name, (palette.OTHER, ""))]
        }
        for kind in drawn
    }
