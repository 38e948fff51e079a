"""The extras of the installation: which package each brings, and one line that names the extra that is missing.

``pip install .`` in a clone brings what the core needs: ranks, meters, collectives, engines, formulas, layouts.
Notebooks, frameworks and the fine-tune need more, and say so here:

>>> with needed_by("pardemo.draw.style"):                           # doctest: +SKIP
...     import matplotlib
pardemo.extras.MissingExtra: pardemo.draw.style needs matplotlib, which the extra [book] brings: …
"""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

REPOSITORY = "https://github.com/pardemo/pardemo"
#: Whether the package lies in a clone of the repository, from which pip can install an extra.
IN_A_CLONE = (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()
#: Of each extra: the module that is imported -> the package that pip installs. A module stands in one extra, the first
#: that a reader needs it for; ``pyproject.toml`` may bring it in others too.
PACKAGES: dict[str, dict[str, str]] = {
    "book": {
        "IPython": "ipython", "PIL": "pillow", "bs4": "beautifulsoup4", "ipykernel": "ipykernel",
        "ipywidgets": "ipywidgets", "jupyter_client": "jupyter_client",
        "jinja2": "jinja2", "jupyterlab": "jupyterlab", "matplotlib": "matplotlib",
        "nbclient": "nbclient", "nbconvert": "nbconvert", "nbformat": "nbformat", "pagefind": "pagefind",
        "pandas": "pandas", "papermill": "papermill", "pygments": "pygments", "scipy": "scipy",
        "traitlets": "traitlets",
    },
    "deepspeed": {"deepspeed": "deepspeed"},
    "megatron": {"megatron": "megatron-core"},
    "accelerate": {"accelerate": "accelerate"},
    "finetune": {
        "datasets": "datasets", "evaluate": "evaluate", "jieba": "jieba", "nltk": "nltk", "peft": "peft",
        "rouge_chinese": "rouge-chinese",
        "sentencepiece": "sentencepiece", "tensorboard": "tensorboard", "transformers": "transformers",
    },
    "testing": {"pytest": "pytest"},
}  # fmt: skip
_EXTRA_OF = {module: extra for extra, modules in PACKAGES.items() for module in modules}


class MissingExtra(ModuleNotFoundError):
    """A package is not installed; the message says what needs it, and which extra brings it."""


@contextlib.contextmanager
def needed_by(feature: str) -> Iterator[None]:
    """Around imports: one that fails for want of an extra is raised as :class:`MissingExtra`, any other as it is."""
    try:
        yield
    except MissingExtra:
        raise  # it names the part of pardemo that needs the package, on which this one is built
    except ModuleNotFoundError as error:
        if (message := line_of(feature, error)) is None:
            raise
        raise MissingExtra(message, name=error.name) from None


def require(feature: str, module: str) -> None:
    """MissingExtra where a module cannot be found; it is not imported."""
    try:
        there = find_spec(module) is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        raise MissingExtra(line(feature, module), name=module)


def line(feature: str, module: str) -> str:
    """Returns the text about a missing module; ``module`` has to be in :data:`PACKAGES`."""
    extra = _EXTRA_OF[module]
    package = PACKAGES[extra][module]
    return f"{feature} needs {package}, which the extra [{extra}] brings: {install(module)}"


def install(module: str) -> str:
    """The command that installs a module; ``torch`` and all that is in no extra comes with pardemo itself.

    No package index has pardemo: it is installed from a clone, or from the repository's address.
    """
    extra = _EXTRA_OF.get(module)
    named = f"[{extra}]" if extra else ""
    return f"pip install '.{named}' in the clone" if IN_A_CLONE else f"pip install 'pardemo{named} @ git+{REPOSITORY}'"


def line_of(feature: str, error: ModuleNotFoundError) -> str | None:
    """:func:`line` of an import that failed; None where no extra brings what is missing, as ``torch`` itself."""
    module = (error.name or "").partition(".")[0]
    return line(feature, module) if module in _EXTRA_OF else None
