"""What the planner says of a script's parallelism at full size: planned, not measured."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pardemo.measure import full_size_layout
from pardemo.measure.full_size_layout import NoCounterpart

if TYPE_CHECKING:
    from pardemo.measure.program import Seen
    from pardemo.measure.summary import Summary
    from pardemo.meters.snapshot import Block
    from pardemo.planner.layouts.model.shape import Shape

#: Each line of a plan, and the kind of a measurement that it is beside. What has none is no tensor of the script.
BESIDE = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer states": "optimizer states",
    "gathered parameters": "gathered",
    "activations": "activations",
    "logits": "logits",
    "communication buffers": "communication buffers",
    "temporaries": "temporaries",
}


@dataclass(frozen=True)
class Question:
    """``--full-size MODEL`` with ``--gpus``, ``--sequence``, ``--micro-batch``: None is what the script has."""

    model: str
    shape: "Shape"
    gpus: int | None = None
    sequence: int | None = None
    micro_batch: int | None = None


def question(
    model: str | None, gpus: int | None = None, sequence: int | None = None, micro_batch: int | None = None
) -> Question | None:
    """The question; None where there is none.

    Raises:
        ValueError: no such model, or numbers without one; said before anything runs.
    """
    if model is None:
        given = {"--gpus": gpus, "--sequence": sequence, "--micro-batch": micro_batch}
        for option, value in given.items():
            if value is not None:
                raise ValueError(f"{option} is of the model at full size: say which, as --full-size llama3-8b")
        return None
    from pardemo.planner.layouts.model import configurations, sizes

    return Question(model, configurations.of(sizes.find(model)), gpus, sequence, micro_batch)


def answer(asked: Question, measured: "Summary", seen: "Sequence[Seen]") -> dict[str, Any]:
    """The plan beside the measurement.

    Returns:
        ``planned`` True; ``model``, ``gpus``, ``peak_bytes``, ``kinds`` (bytes by kind of the fullest GPU),
        ``measured`` (by kind the bytes at the small run's peak and the most in its step), ``taken_over`` from the
        script, ``assumed``, ``command`` of ``pardemo plan`` for what is nearest to it; ``why_not``, and no bytes, where
        the planner has no counterpart.
    """
    fullest = next(one for one in seen if one.rank == measured.memory["rank"])
    answer: dict[str, Any] = {
        "planned": True, "model": asked.model, "gpus": asked.gpus or measured.ranks, "peak_bytes": None, "kinds": {},
        "measured": _beside(measured.memory["kinds"], most_by_kind(fullest.memory.blocks)), "taken_over": [],
        "assumed": [], "command": "", "why_not": "",
    }  # fmt: skip
    way: Callable[..., dict[str, Any]] = full_size_layout.planned
    if any(one.kind.startswith("DeepSpeed") for one in measured.parallelism):
        from pardemo.measure import full_size_deepspeed

        way = full_size_deepspeed.planned
    try:
        told = way(asked, measured, seen, fullest)
    except NoCounterpart as why:
        return answer | {"why_not": str(why)}
    except ValueError as wrong:  # the planner's own: heads that do not divide, a sequence that is too long
        return answer | {"why_not": f"the planner refuses it: {wrong}"}
    order = [*BESIDE, *told["kinds"]]
    kinds = {kind: round(told["kinds"].get(kind, 0.0)) for kind in dict.fromkeys(order)}
    kinds = {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
    return answer | told | {"kinds": kinds, "peak_bytes": sum(kinds.values())}


def most_by_kind(blocks: "Sequence[Block]") -> Mapping[str, int]:
    """The most bytes of each kind at one time of the followed step; others may have theirs at other times."""
    changes = [(one.born, one.kind, one.bytes) for one in blocks]
    changes += [(one.died, one.kind, -one.bytes) for one in blocks if one.died is not None]
    alive: Counter[str] = Counter()
    most: Counter[str] = Counter()
    for _, kind, nbytes in sorted(changes):
        alive[kind] += nbytes
        most[kind] = max(most[kind], alive[kind])
    return most


def _beside(peak: Mapping[str, int], most: Mapping[str, int]) -> dict[str, dict[str, int]]:
    return {line: {"peak": peak.get(kind, 0), "most": most.get(kind, 0)} for line, kind in BESIDE.items()}
