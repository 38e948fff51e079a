"""Fills tables of settings, launch scripts and reasons for a refusal with a plan's values."""

import string
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.launch.facts import ModelFacts
from pardemo.planner.layouts.layout import Layout


class _Script(string.Template):
    delimiter = "%%"  # which no shell script and no Python file has


def script(file: str, /, **values: object) -> str:
    """Returns the text of a file of this folder, with a value in the place of each ``%%{name}``."""
    return _Script(Path(__file__).with_name(file).read_text(encoding="utf-8")).substitute(values)


@cache
def table(file: str) -> Any:
    """Returns what a YAML file of this folder says."""
    import yaml  # of what writes alone: a browser plans without it

    return yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def fill(settings: Any, values: Mapping[str, Any]) -> Any:
    """Fills the settings with a value in the place of each ``=name``; keys whose name stands for None are left out."""
    if isinstance(settings, str) and settings.startswith("="):
        return look_up(settings[1:], values)
    if isinstance(settings, list):
        return [fill(setting, values) for setting in settings]
    if not isinstance(settings, dict):
        return settings
    filled = ((key, value, fill(value, values)) for key, value in settings.items())
    return {key: value for key, given, value in filled if value is not None or given is None}


def look_up(name: str, values: Mapping[str, Any]) -> Any:
    """Finds the value of ``layout.tp``, by attributes and keys; None where a part before a dot is None or lacks it."""
    root, *rest = name.split(".")
    value = values[root]
    for part in rest:
        value = value.get(part) if isinstance(value, dict) else value and getattr(value, part)
    return value


def refusal(*rules: tuple[object, str], **values: object) -> str | None:
    """Returns the reason of the first rule that holds, with values in place of ``{layout.tp}``; None if none does."""
    return next((reason.format(**values) for holds, reason in rules if holds), None)


def about(job: Job, layout: Layout, model: ModelFacts, hosts: str = "") -> str:
    """Returns the first line of a file, a comment: what is run."""
    samples = f"{layout.batch} samples of {job.sequence} tokens a step"
    return f"# {model.name}: {layout}, {layout.gpus} GPUs{hosts}, {samples}\n"
