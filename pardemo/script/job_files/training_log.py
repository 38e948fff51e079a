"""Reads the durations, losses and rates of steps from logs of torchtitan and Megatron-LM."""

import datetime
import re
from collections.abc import Iterable
from dataclasses import replace

from pardemo.script.job_files.records import LoggedStep

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"([-+\d.,]+(?:[eE][-+]?\d+)?|nan|inf)"
#: torchtitan's line (components/metrics.py): ``step: 10  loss: 5.6  …  memory: 48.87GiB(51.44%)  tps: 4,376  …``
_TITAN = re.compile(rf"\bstep: *(\d+) +loss: *{_NUMBER}(.*)")
#: Megatron-LM's (training/training.py): ``iteration  10/  500 | … | elapsed time per iteration (ms): 512.3 | …``
_MEGATRON = re.compile(rf"\biteration +(\d+)/.*elapsed time per iteration \(ms\): *{_NUMBER}(.*)")
_TITANS = {"memory_bytes": "memory:", "tokens_per_s": "tps:", "tflops": "tflops:"}
_MEGATRONS = {"loss": "lm loss:", "tflops": r"throughput per GPU \(TFLOP/s/GPU\):"}
_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)[.,]?(\d*)")
#: Megatron-LM's line of memory, in MB of 2²⁰ bytes.
_MEMORY = re.compile(rf"after (\d+) iterations\) memory \(MB\) .*max allocated: *{_NUMBER}")
#: Characters of a line that are searched.
LONGEST = 4000


def steps_of(lines: Iterable[str]) -> list[LoggedStep]:
    """Reads the steps of a log, in order; returns none for a text that is no such log.

    torchtitan's lines have no duration of a step: it is the time between two lines, over the steps between them.
    """
    steps: list[LoggedStep] = []
    for line in lines:
        plain = _COLOURS.sub("", line[:LONGEST])
        if match := _TITAN.search(plain):
            step = _step(int(match[1]), plain, match[3], _TITANS, loss=_value(match[2]))
            before = steps[-1] if steps else step
            if step.at_s and before.at_s and step.step > before.step:
                step = replace(step, step_s=(step.at_s - before.at_s) / (step.step - before.step))
            steps.append(step)
        elif match := _MEGATRON.search(plain):
            milliseconds = _value(match[2])
            seconds = None if milliseconds is None else milliseconds / 1e3
            steps.append(_step(int(match[1]), plain, plain[match.start() :], _MEGATRONS, step_s=seconds))
        elif match := _MEMORY.search(plain):
            steps.append(LoggedStep(int(match[1]), memory_bytes=(_value(match[2]) or 0.0) * 2**20))
    return steps


def _step(step: int, line: str, rest: str, names: dict[str, str], **known: float | None) -> LoggedStep:
    read = {
        field: _value(match[1]) for field, name in names.items() if (match := re.search(f"{name} *{_NUMBER}", rest))
    }
    if read.get("memory_bytes") is not None:
        read["memory_bytes"] *= 2**30  # type: ignore[operator]
    at_s = None
    if match := _TIME.search(line):
        moment = datetime.datetime.fromisoformat(match[1]).replace(tzinfo=datetime.UTC)
        at_s = moment.timestamp() + float(f"0.{match[2] or 0}")
    return LoggedStep(step, at_s, **known | read)


def _value(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
