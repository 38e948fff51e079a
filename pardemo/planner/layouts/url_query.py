"""Reads a search's question from a link's query, and writes its answer as the site's page shows it in a browser.

The page runs this module by Pyodide, so nothing here needs more than Python's own library. The arithmetic and the
defaults are those of ``pardemo plan --search --json``.
"""

import contextlib
import itertools
import json
import math
import shlex
import shutil
import tempfile
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pardemo import argument_checks
from pardemo.planner import hardware
from pardemo.planner.layouts import configurations, explanations, launch, layout_command
from pardemo.planner.layouts.configurations import MODELS, key_of
from pardemo.planner.layouts.layout import Layout
from pardemo.planner.layouts.memory import LINES
from pardemo.planner.layouts.micro_batch import PARTS
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.search import SearchResult, changes, if_changed, search

#: What a question may say: ``host`` is GPUs of a host, ``samples`` those of a step, ``config`` the text of a
#: configuration in place of a model's name, ``rank`` and ``target`` LoRA's, ``price`` what a GPU costs an hour.
FIELDS = ("model", "config", "gpu", "gpus", "host", "link", "sequence", "samples", "program", "precision", "rank",
          "target", "price")  # fmt: skip
MOST_GPUS = 16_384
MOST_DIGITS = 12
MOST_BRACKETS = 500  # of a configuration, which may nest: a browser's stack ends, with Python, at some thousand
EVERY = 250  # layouts between two words of how far a search is
_SHARDING = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3 (FSDP)"}


class RefusedField(ValueError):
    """Raised for a question without an answer; names the field that is wrong ("" where it is all of them)."""

    def __init__(self, field: str, message: str):
        super().__init__(message)
        self.field = field


class PageSearch:
    """Searches for a question's answer, and answers what else can be asked about it.

    Args:
        question: texts by :data:`FIELDS`; but for the first four, the command's default stands for what is left out.
        looked: is called now and then with how many layouts were looked at.

    Raises:
        RefusedField: a field is wrong, or the job has no layout.
    """

    def __init__(self, question: Mapping[str, str], looked: Callable[[int], object] | None = None):
        folder = tempfile.mkdtemp()  # for a configuration's file, as long as this lives
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.arguments = plan_arguments(question, Path(folder))
        model = self.arguments.model
        with _about("sequence"):  # the rest was looked at before
            self.job = layout_command.job_of(self.arguments)
        self.able = _counted(launch.runnable_by_program(self.job, model), looked)
        with _about("samples"):
            self.result: SearchResult = search(self.job, self.arguments.per_step or self.arguments.gpus, able=self.able)
        self.assumed = layout_command.assumptions_of(self.arguments, self.job, self.result.batch)

    def answer(self) -> dict[str, Any]:
        """Returns the command's JSON under ``json``, without what changes with an assumption, and texts for readers."""
        result, job = self.result, self.job
        warning = explanations.positions_warning(result, self.arguments.model)
        shown = result.best or (result.least,)
        return {
            "json": explanations.search_json(result, {}, self.assumed, warning),
            "planned": explanations.describe_job(job, self.assumed).splitlines(),
            "notes": explanations.describe_trust(result) if result.best
            else [explanations.suggest_savings(result.least)],
            "shown": [explanations.layout_json(row) for row in shown],
            "names": [str(row.layout) for row in shown],
            "words": [describe_layout(row.layout) for row in shown],
            "money_per_billion_tokens": [layout_command.money_per_billion(self.arguments, row.step) for row in shown],
            "room_bytes": job.machine.usable_bytes, "capacity_bytes": job.machine.gpu.memory_bytes,
            "parts": PARTS, "lines": LINES, "assumptions": list(changes(job)), "command": command_line(self.arguments),
        }  # fmt: skip

    def if_changed(self, name: str) -> dict[str, Any]:
        """Returns the best layout under one changed assumption, and a line for readers."""
        pair = if_changed(self.result, changes(self.job)[name], self.able)
        if pair is None:
            return {"json": None, "line": f"if {name}: nothing fits"}
        return {"json": explanations.changed_json(*pair), "line": explanations.changed_line(name, *pair)}


def plan_arguments(question: Mapping[str, str], folder: Path) -> Namespace:
    """Converts a question to options of ``pardemo plan --search``; writes its configuration into ``folder``.

    Raises:
        RefusedField: a field is wrong.
    """
    query = {name: str(question.get(name) or "").strip() for name in FIELDS}
    model = _model(query, folder)
    counts = {name: _integer(query, name) for name in ("gpus", "host", "rank", "sequence", "samples")}
    gpus, host_gpus, rank = counts["gpus"], counts["host"], counts["rank"]
    with _about("gpu"):
        if not query["gpu"]:
            raise ValueError("which GPU?")
        gpu = hardware.gpu(query["gpu"])
    if gpus is None or gpus > MOST_GPUS:
        raise RefusedField("gpus", f"how many GPUs? 1 to {MOST_GPUS:,}")
    if host_gpus and gpus > host_gpus and gpus % host_gpus:
        raise RefusedField("host", f"{gpus:,} GPUs do not fill hosts of {host_gpus:,}")
    with _about("link"):
        if query["link"]:
            hardware.link(query["link"])
    with _about("program"):
        program = find_program(query["program"] or layout_command.PROGRAM)
        if query["target"] or rank:
            program.check_lora()
    with _about("precision"):
        hardware.peak_flops(gpu, hardware.precision(query["precision"] or "bf16"))
    with _about("target"):
        config = configurations.find_configuration(model)
        layout_command.tuning_of(query["target"], rank, config, configurations.shape_of_config(config))
    words = {name: query[name] or None for name in ("link", "target", "program", "precision")}
    return Namespace(
        model=model, gpu=gpu.name, gpus=gpus, hosts=max(1, gpus // host_gpus) if host_gpus else None, explain=None,
        measured=None, rank=rank, sequence=counts["sequence"], per_step=counts["samples"],
        price=_price(query["price"]), **words,
    )  # fmt: skip


def command_line(arguments: Namespace) -> str:
    """Returns the command that asks the same in a shell."""
    words: list[str] = ["pardemo", "plan", "--search"]
    for name in ("model", "gpu", "gpus", "hosts", "link", "sequence", "per_step", "program", "precision", "rank",
                 "target", "price"):  # fmt: skip
        if (value := getattr(arguments, name)) is not None:
            value = Path(value).name if name == "model" and Path(value).is_absolute() else value
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def describe_layout(layout: Layout) -> str:
    """Describes a layout without abbreviations."""
    degrees = {
        "tensor parallel": layout.tp, "context parallel": layout.cp, "pipeline stages": layout.pp,
        "expert parallel": layout.ep, "replicas": layout.dp,
    }  # fmt: skip
    words = [f"{count} {name}" for name, count in degrees.items() if count > 1] or ["1 GPU"]
    if layout.sharding != "none":
        words.append(_SHARDING[layout.sharding] + (f" over {layout.shard_group}" if layout.shard_group else ""))
    samples = f"{layout.micro_batch} sample{'s' * (layout.micro_batch > 1)}"
    words.append(f"{layout.accumulation} micro-batch{'es' * (layout.accumulation > 1)} of {samples}")
    if layout.chunks > 1:
        words.append(f"{layout.chunks} chunks a stage")
    if layout.recompute != "none":
        words.append(f"{layout.recompute} recomputation")
    if layout.cp > 1 and layout.context != "ring":
        words.append(f"context by {layout.context}")
    return ", ".join(words)


def for_a_page() -> Callable[[str, Callable[[int], object] | None], str]:
    """Returns a function that answers a page's messages, both in JSON, and remembers the last question.

    ``{"question": {…}}`` is a question; ``{"if": name}`` asks about an assumption of the last one.
    """
    last: list[PageSearch] = []

    def reply(message: str, looked: Callable[[int], object] | None = None) -> str:
        query = json.loads(message)
        try:
            if "if" in query:
                return json.dumps(last[-1].if_changed(query["if"]))
            last[:] = [PageSearch(query["question"], looked)]
            return json.dumps(last[-1].answer())
        except RefusedField as error:
            return json.dumps({"field": error.field, "error": str(error)})

    return reply


@contextlib.contextmanager
def _about(field: str) -> Iterator[None]:
    """Names the field in every refusal that is raised inside."""
    try:
        yield
    except RefusedField:
        raise
    except ValueError as error:
        raise RefusedField(field, str(error).removeprefix("--")) from None


def _model(query: Mapping[str, str], folder: Path) -> str:
    """Returns a built-in model's name, or the file into which the configuration was written."""
    if not query["config"]:
        name = query["model"]
        if not name:
            raise RefusedField("model", "which model?")
        if key_of(name) is None:
            hint = argument_checks.nearest(name.lower().rpartition("/")[2], MODELS, "; paste its config.json")
            raise RefusedField("model", f"no model {name!r} is built in{hint}")
        return name
    with _about("config"):
        if sum(map(query["config"].count, "[{")) > MOST_BRACKETS:
            raise RefusedField("config", f"not a configuration: it has more than {MOST_BRACKETS:,} brackets")
        try:
            values = json.loads(query["config"])
        except ValueError as error:
            raise RefusedField("config", f"not JSON: {error}") from None
        if (plain := configurations.plain(values)) is None:
            more = "pardemo plan --search --model config.json asks Transformers"
            raise RefusedField("config", f"{configurations.unsaid(values)}; {more}")
        configurations.shape_of_config(plain)
    path = folder / "config.json"
    path.write_text(query["config"], encoding="utf-8")
    return str(path)


def _integer(query: Mapping[str, str], name: str) -> int | None:
    text = query[name].replace(",", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        raise RefusedField(name, f"a whole number of at least 1, not {query[name]:.40}")
    if len(text) > MOST_DIGITS:
        raise RefusedField(name, f"a number of at most {MOST_DIGITS} digits")
    return int(text)


def _price(text: str) -> float | None:
    if not text:
        return None
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise RefusedField("price", f"a number of at least 0, not {text:.40}")
    return price


def _counted(able: Callable[[Layout], bool], looked: Callable[[int], object] | None) -> Callable[[Layout], bool]:
    """Returns the same, telling ``looked`` at each :data:`EVERY` layouts how many there were."""
    if looked is None:
        return able
    counter = itertools.count(1)

    def counted(layout: Layout) -> bool:
        if (count := next(counter)) % EVERY == 0:
            looked(count)
        return able(layout)

    return counted
