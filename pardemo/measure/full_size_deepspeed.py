"""DeepSpeed's stages at full size: a dry run of the real engine with the script's own settings."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pardemo.measure.full_size_layout import NoCounterpart, recomputed, tokens, tokens_taken, trained_of

if TYPE_CHECKING:
    from pardemo.measure.full_size import Question
    from pardemo.measure.program import Seen
    from pardemo.measure.summary import Summary

#: Lines of a dry run, and the kinds of a measurement that they are beside.
KINDS = {
    "frozen parameters": "parameters",
    "gathered parameters": "gathered parameters",
    "buckets": "communication buffers",
}
ADAM = {"Adam", "AdamW", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam"}


def planned(asked: "Question", measured: "Summary", seen: "Sequence[Seen]", fullest: "Seen") -> dict[str, Any]:
    """As :func:`pardemo.measure.full_size_layout.planned`, of DeepSpeed's engine.

    Raises:
        NoCounterpart: it is not run dry in this way. ValueError: the planner refuses the job.
    """
    from pardemo.planner import models
    from pardemo.planner.job import RankJob
    from pardemo.planner.memory import Curve

    trained = trained_of(fullest, measured)
    settings = trained["deepspeed"]
    (engine,) = (one for one in measured.parallelism if one.kind.startswith("DeepSpeed") and fullest.rank in one.ranks)
    if others := sorted({one.kind for one in measured.parallelism} - {engine.kind}):
        raise NoCounterpart(f"{engine.kind} together with {', '.join(others)} is not run dry")
    if not settings or settings["offloads"]:
        raise NoCounterpart(
            "an engine that offloads, or one of several, is not translated: pardemo plan --zero plans it"
        )
    if not settings["half"] or not set(trained["optimizers"]) <= ADAM:
        raise NoCounterpart(
            f"DeepSpeed is run dry in 16 bits with Adam alone, not with {', '.join(trained['optimizers'])}"
            + ("" if settings["half"] else " in fp32")
        )
    stage, gpus = engine.options["stage"], asked.gpus or measured.ranks
    if gpus < 2 <= stage + 1:
        raise NoCounterpart(f"stage {stage} shards over data-parallel ranks, and there is one")
    samples, sequence = tokens(asked, seen, 1)
    micro_batches, again = engine.options["micro_batches"], recomputed(trained)
    job = RankJob(
        models.find(asked.model), samples, sequence, checkpointing=again == "full", engine=f"zero-{stage}", ranks=gpus,
        accumulation=min(2, micro_batches), clipping=settings["clipping"], zero=settings["zero"],
    )  # fmt: skip
    with _quiet(), contextlib.redirect_stdout(sys.stderr):
        lines = Curve(job).estimate(samples, accumulation=micro_batches).lines
    kinds: dict[str, float] = {}
    for name, nbytes in lines.items():
        kind = KINDS.get(name, name)
        kinds[kind] = kinds.get(kind, 0.0) + nbytes
    how = "on" if again == "full" else "off"
    return {
        "kinds": kinds,
        "taken_over": [
            f"ZeRO-{stage} with Adam in 16 bits and its settings: "
            + (", ".join(f"{name} {value}" for name, value in settings["zero"].items()) or "DeepSpeed's own"),
            tokens_taken(asked, samples, sequence, micro_batches),
            f"{'each layer' if how == 'on' else 'nothing'} is recomputed",
        ],
        "assumed": ["the model and its loss as Transformers has them, all parameters trained, fused attention"],
        "layout": f"{job.engine} over {gpus}, {samples}×{micro_batches}",
        "command": f"pardemo plan --model {asked.model} --full --zero {stage} --checkpointing {how} --batch {samples} "
        f"--sequence {sequence} --per-step {samples * micro_batches * gpus} --gpus {gpus} --gpu H100",
    }  # fmt: skip


@contextlib.contextmanager
def _quiet() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
