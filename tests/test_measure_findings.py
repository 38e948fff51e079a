"""What ``pardemo measure`` would change, rule by rule; each beside a case that is right as it is."""

import copy
import dataclasses
from itertools import pairwise

import pytest
from conftest import says

from pardemo.formulas import communication
from pardemo.script.hangs import journal, standstill
from pardemo.script.hangs.journal import Journal
from pardemo.script.report import files
from pardemo.script.runtime.call_sites import NORM, ROOT, CallSite
from pardemo.script.step import findings, recognised
from pardemo.script.step.parallelism import (
    DdpOptions,
    Fsdp1Options,
    Fsdp2Options,
    Parallelism,
    SeveralModels,
    ZeroOptions,
)
from pardemo.script.step.summary import CollectiveRow, Summary, Times
from pardemo.tables import amount

WHOLE = 8_000_000


def row(kind="all-reduce", nbytes=0.0, ranks=(0, 1), calls=1.0, dtype="float32", shapes=((1000,),), **site):
    call_site = CallSite(**({"line": "train.py:9", "module": "", "phase": "backward"} | site))
    return CollectiveRow(kind, ranks, calls, nbytes, call_site, dtype, shapes)


def explained(
    *rows, parallelism=(), micro_batches=1, computed_in=(), compute=(1.0, 1.0), idle=(0.0, 0.0), wire=None, step=2.0
):
    times = [Times(rank, step, c, 0.1, 0.0, i, 0.0) for rank, (c, i) in enumerate(zip(compute, idle, strict=True))]
    measured = Summary(
        2, 3, micro_batches, "enough", "gloo", list(parallelism),
        {"parameters": 10**6, "computed_in": list(computed_in), "vocabularies": [32000]},
        list(rows), [0.0, 0.0], wire or [1e6, 1e6], [0.0, 0.0], {}, times,
    )  # fmt: skip
    findings.explain(measured)
    return measured, [one.what for one in measured.findings]


def ddp(**options):
    sizes = {"words.weight": WHOLE // 2, "head.weight": WHOLE // 2}
    return Parallelism("DDP", (0, 1), ("GPT",), sizes, DdpOptions(**options))


def fsdp(again=True, dtype="bfloat16"):
    options = Fsdp2Options({"layers.0": WHOLE}, {"layers.0": again}, gathered_in=[dtype])
    return Parallelism("FSDP2", (0, 1), ("layers.0",), {"layers.0": WHOLE}, options)


ONCE = communication.ring_all_reduce(WHOLE, 2).sent
HALF = communication.ring_half(WHOLE, 2).sent


BOTH = [row("all-gather", HALF, module="layers.0", phase=phase) for phase in ("forward", "backward")]
LOW = {"computed_in": ["bfloat16"]}
BETWEEN = {"phase": "between"}
SLOW = {"compute": (1.0, 1.6)}


@pytest.mark.parametrize(
    ("rows", "more", "expected"),
    [
        ([row(nbytes=ONCE)], {"parallelism": [ddp()]}, []),
        ([row(nbytes=ONCE)], {"parallelism": [ddp()], "micro_batches": 4}, []),
        ([row(nbytes=4 * ONCE, calls=4)], {"parallelism": [ddp()], "micro_batches": 4},
         [("after each of 4 micro-batches, 32.0 MB a step where once would be 8.00 MB", 3 * ONCE)]),
        ([row(nbytes=ONCE)], {"parallelism": [ddp()], **LOW}, [("`bf16_compress_hook` would send half", ONCE / 2)]),
        ([row(nbytes=ONCE, dtype="bfloat16")], {"parallelism": [ddp()], **LOW}, []),
        (BOTH, {"parallelism": [fsdp(dtype="float32")], **LOW}, [("param_dtype=torch.bfloat16", HALF)]),
        ([row(nbytes=ONCE)], {"parallelism": [ddp(rows_used={"words.weight": (300, 32000)})]},
         [("words.weight is summed whole, 50% of all gradients, though a step touches 300 of its 32,000", ONCE / 2)]),
        ([row(nbytes=ONCE)], {"parallelism": [ddp(rows_used={"words.weight": (30000, 32000)})]}, []),
        ([row(nbytes=ONCE)], {"parallelism": [ddp(unused=["head.weight"])]},
         [("no gradient reached head.weight", ONCE / 2)]),
        ([row("all-gather", 2 * HALF, calls=2, module="layers.0", phase="forward")], {"parallelism": [fsdp(False)]},
         [("gathered 2 times for the forward of a micro-batch where 1 would do", HALF)]),
        ([row("all-gather", HALF, module="layers.0")], {"parallelism": [fsdp(False)]},  # it stays gathered
         [("where 0 would do", HALF)]),
        ([row("all-gather", 1e6, calls=2.0, shapes=((4, 128, 32000),), **BETWEEN)], {},
         [("logits are gathered whole, 2 times a step", 1e6)]),
        ([row("all-gather", 1e6, shapes=((4, 128, 4096),), phase="forward")], {}, []),
        ([row("all-gather", 1e6, **BETWEEN)], {}, []),
        ([row(nbytes=8, shapes=((),), **BETWEEN), row(nbytes=ONCE)], {},
         [("a small all-reduce outside of forward and backward, once a step", 8)]),
        ([row("all-gather", 4.0, shapes=((1,), (1,)), **BETWEEN)], {}, [("gather such figures together", 4)]),
        ([row(nbytes=512, shapes=((128,),), **BETWEEN), row(nbytes=ONCE)], {}, []),  # a loss of each token
        ([row(nbytes=8, shapes=((),), use=NORM, **BETWEEN), row(nbytes=ONCE)], {}, []),  # a norm for clipping
        ([row("broadcast", 100, objects="broadcast_object_list", **BETWEEN)], {},
         [("Python objects travel once a step (broadcast_object_list)", 100)]),
        ([row("barrier", 0, calls=2.0, **BETWEEN)], {}, [("at a barrier, 2 times a step", 0)]),
        ([row("broadcast", 4e6, module="DistributedDataParallel", phase="forward")], {},
         [("broadcast_buffers=False", 4e6)]),
        ([row("broadcast", 64.0, module="DistributedDataParallel", phase="forward")], {}, []),  # a batch norm's
        ([row(nbytes=ONCE)], {**SLOW, "idle": (0.5, 0.0)},
         [("rank 1 computes 1600 ms of a step, the others 1000: they wait 500 ms", 0)]),
        ([row(nbytes=ONCE)], {**SLOW, "idle": (0.0, 0.0)}, []),  # nobody waits
        ([row(nbytes=ONCE)], {"compute": (1.0, 1.1), "idle": (0.5, 0.0)}, []),  # not for it
        ([row(nbytes=ONCE)], {"compute": (0.003, 0.006), "idle": (0.003, 0.0), "step": 0.008}, []),  # a busy core
        ([], {"compute": (0.5, 0.5, 0.5, 1.5), "idle": (1.0, 1.0, 1.0, 0.0)}, [("rank 3 computes", 0)]),
        ([], {"compute": (0.5, 0.5, 1.5, 1.5), "idle": (1.0, 1.0, 1.0, 0.0)}, []),  # of two slow ones neither is late
    ],
)  # fmt: skip
def test_what_is_found_of_rows_and_times(rows, more, expected):
    measured, told = explained(*copy.deepcopy(rows), **more)
    assert [one.bytes for one in measured.findings] == [nbytes for _, nbytes in expected], told
    assert all(part in what for what, (part, _) in zip(told, expected, strict=True)), told


def test_what_a_unit_of_fsdp2_sends_is_what_its_formula_says():
    rows = [*copy.deepcopy(BOTH), row("reduce-scatter", HALF, module="layers.0")]
    measured, told = explained(*rows, parallelism=[fsdp()])
    assert (told, [one.expected_bytes for one in measured.collectives]) == ([], [HALF] * 3)


def test_models_of_one_group_are_told_as_one():
    alone, other = ddp(), Parallelism("DDP", (2, 3), ("Judge",), {}, DdpOptions())
    assert recognised._models_together([alone, other]) == [alone, other]
    (both,) = recognised._models_together([alone, ddp()])
    assert (both.wraps, both.options) == (("GPT", "GPT"), SeveralModels(2))


def test_ranks_part_within_a_group_and_not_between_two(tmp_path):
    def log(rank, *calls):
        (tmp_path / f"rank{rank}").unlink(missing_ok=True)
        written = Journal(str(tmp_path / f"rank{rank}"))
        for own, (number, kind, group) in enumerate(calls):
            place = "train.py:3", "", "between", 0, float(own)
            written.begins(own, kind, (0, 1), number, group, 8, (2,), "float32", *place)
        with (tmp_path / f"rank{rank}").open("a") as file:
            file.write('["begins", 2, "all-')

    log(0, (0, "all-reduce", "a"), (0, "all-gather", "b"))
    log(1, (0, "all-gather", "b"), (0, "all-reduce", "a"))
    assert standstill.standstill_of(journal.read_logs(tmp_path), 1.0).first is None, "each group's calls are in order"
    log(1, (0, "all-gather", "a"))
    told = standstill.standstill_of(journal.read_logs(tmp_path), 1.0)
    assert told.first.differ
    assert says(told.line, "0", "1", "0", "1", "8", "train.py:3", "1", "1")


def test_several_models_and_an_evaluation_are_not_judged():
    two = Parallelism("DDP", (0, 1), ("Generator", "Judge"), {}, SeveralModels(2))
    measured, told = explained(row(nbytes=7 * ONCE), parallelism=[two], micro_batches=2)
    assert (told, measured.collectives[0].expected_bytes) == ([], None)
    gather = row("all-gather", 5 * HALF, calls=5, module="layers.0", phase="evaluation")
    measured, told = explained(gather, parallelism=[fsdp(again=False)])
    assert told == []
    assert says(measured.collectives[0].why, "without gradients", "evaluation", "teacher")


def test_nothing_is_summed_is_said_only_where_nobody_counted_bytes():
    silent = [100.0, 100.0]
    assert explained(wire=silent, parallelism=[ddp()])[1] == [], "DDP of a model of few bytes"
    assert explained(row(nbytes=100, shapes=((20,),), phase="between"), wire=silent)[1] == [], "sums of its own"
    assert says(explained(wire=silent)[1], "nothing is summed", "2 ranks", "unless it is averaged", "3 measured")
    assert explained(wire=[1e6, 1e6])[1] == [], "a library with sockets of its own"


@pytest.mark.parametrize(("stage", "summed", "gathered"), [(0, 2, 0), (1, 1, 1), (2, 3, 1), (3, 3, 6)])
def test_deepspeed_by_zeros_formulas(stage, summed, gathered):
    assert (summed + gathered) * HALF == communication.zero_step(WHOLE, 2, stage, 3, element_bytes=1)
    zero = Parallelism(f"DeepSpeed ZeRO-{stage}", (0, 1), ("GPT",), {"w": WHOLE}, ZeroOptions(3, stage))
    right = {"reduce-scatter": summed * HALF, "all-gather": gathered * HALF}
    rows = [row(kind, nbytes) for kind, nbytes in right.items() if nbytes]
    measured, told = explained(*rows, parallelism=[zero], micro_batches=3)
    assert all(one.expected_bytes == right[one.kind] for one in measured.collectives)
    assert told == []
    _, told = explained(row("all-reduce", (summed + 1) * HALF), parallelism=[zero], micro_batches=3)
    assert f"{amount(summed * HALF)} a step" in told[0]
    assert "stage3" not in told[0] or stage == 3


def test_fsdp1_keeps_its_root_gathered():
    options = Fsdp1Options("FULL_SHARD", {ROOT: 1e6, "layers.0": 1e6})
    fsdp1 = Parallelism("FSDP1", (0, 1), (ROOT, "layers.0"), {ROOT: 1_000_000, "layers.0": 1_000_000}, options)
    half = communication.ring_half(1_000_000, 2).sent
    measured, told = explained(row("all-gather", 3 * half), row("reduce-scatter", 2 * half), parallelism=[fsdp1])
    assert [one.expected_bytes for one in measured.collectives] == [3 * half, 2 * half]
    assert told == []


def test_spans_that_overlap_have_rows_of_their_own():
    spans = [(0.0, 4.0), (1.0, 2.0), (2.5, 3.0), (5.0, 6.0), (1.5, 5.5)]
    rows = files._rows(spans)
    assert rows == [1, 2, 2, 1, 3]
    for row in set(rows):
        own = sorted(span for span, of in zip(spans, rows, strict=True) if of == row)
        assert all(a[1] <= b[0] for a, b in pairwise(own))


def test_of_a_teacher_and_its_student_the_trained_one_is_held_against_formulas():
    student = Parallelism("FSDP2", (0, 1), ("0", "1"), {"0": 8, "1": 8}, Fsdp2Options({"0": 8, "1": 8}))
    teacher = Parallelism("FSDP2", (0, 1), ("0", "1"), {"0": 8, "1": 8}, Fsdp2Options({"0": 0, "1": 0}))
    other = Parallelism("FSDP2", (0, 1), ("2",), {"2": 8}, Fsdp2Options({"2": 0}))
    assert recognised._trained([teacher, student, other]) == [student, other]
    assert recognised._trained([teacher]) == [teacher], "nothing is trained under its names"


def test_a_model_that_is_one_unit_of_fsdp2():
    shapes = {f"layers.{n}.weight": [8, 8] for n in range(4)}
    whole = Parallelism("FSDP2", (0, 1), (ROOT,), {ROOT: 1e6}, Fsdp2Options({ROOT: 1e6}, shapes=shapes))
    (found,) = findings.one_unit([whole])
    assert says(found.what, "one unit", "fully_shard")
    layers = dataclasses.replace(whole, wraps=(ROOT, "layers.0"))
    one_layer = dataclasses.replace(whole, options=Fsdp2Options(shapes={"weight": [8, 8]}))
    assert list(findings.one_unit([layers, one_layer])) == []
