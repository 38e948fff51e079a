"""Ranks that end, sleep, or do not make the steps that the others make."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from pardemo.soak.ranks.fault import FaultCase, fault
from pardemo.soak.ranks.trainers import ENGINES, TRAINERS

PURPOSE = "on purpose"


def train(case: FaultCase, at: dict[str, Callable[[], object]], steps: int = 4) -> None:
    """Trains; at step ``case.when`` the rank to blame does what ``at`` has for a moment of the step."""
    trainer = TRAINERS[case.trainer]()
    for step in range(steps):
        trainer.step(step, at if case.mine and step == case.when else {})


def _raise() -> None:
    raise RuntimeError(f"{PURPOSE} by rank {dist.get_rank()}")


@fault("raises", f"^rank {{who}}: RuntimeError: {PURPOSE} by rank {{who}}", ("before", "between", "after"), TRAINERS)
def _raises(case: FaultCase) -> None:
    train(case, {case.how: _raise})


@fault("killed", "^rank {who} died: killed by SIGKILL", ("before", "between", "after"), TRAINERS)
def _killed(case: FaultCase) -> None:
    train(case, {case.how: lambda: os.kill(os.getpid(), signal.SIGKILL)})


@fault(
    "ends", "", ("exit", "at once"), TRAINERS,
    by_way={"exit": "^rank {who}: SystemExit: exit status 3", "at once": "^rank {who} died: exit code 3"},
)  # fmt: skip
def _ends(case: FaultCase) -> None:
    train(case, {"between": {"exit": lambda: sys.exit(3), "at once": lambda: os._exit(3)}[case.how]})


@fault(
    "sleeps",
    "did not finish",
    ("before", "between", "after"),
    TRAINERS,
    at_limit=r'processes.py", line \d+ in <lambda>',
)
def _sleeps(case: FaultCase) -> None:
    train(case, {case.how: lambda: time.sleep(3600)})


@fault("result", "^rank {who}: TypeError: the result, of type .*, cannot be sent back")
def _result(case: FaultCase) -> object:
    return threading.Lock() if case.mine else None


# --- steps that some ranks do not make

#: Those that exchange in every backward pass. (To ZeRO-1 a backward more or less is a micro-batch of that rank.)
COUNTED = ("naive", "bucketed", "zero2", "zero3")


@fault("backward", r"backward|differ", ("skipped", "twice"), COUNTED, at_limit="")
def _backward(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    for step in range(4):
        odd = case.mine and step == case.when
        trainer.step(step, backwards={"skipped": 0, "twice": 2}[case.how] if odd else 1)


@fault("fewer batches", r"batch|step|closed|join|did not finish", ("",), TRAINERS, at_limit=r"\(rank {who} did\)")
def _fewer_batches(case: FaultCase) -> None:
    trainer = TRAINERS[case.trainer]()
    for step in range(case.when if case.mine else 4):
        trainer.step(step)


@fault(
    "no_sync",
    # the rank that is one exchange ahead ends first: its neighbours see that in what they await, or in what they send
    r"no_sync|differ|(closed the connection|cannot send to rank \d of the group: .*), in .* backward \d",
    ("",),
    ("naive", "bucketed"),
    at_limit="",
)
def _no_sync(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    for step in range(4):
        trainer.step(step, synchronised=not (case.mine and step == case.when))
