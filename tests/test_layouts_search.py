"""A search tries what can be run, keeps the quickest that fits, and says what it depends on."""

from dataclasses import replace

import pytest
from conftest import says

from pardemo.planner import hardware, models
from pardemo.planner.estimate import AS_QUICK
from pardemo.planner.layouts import configurations, programs
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import CONTEXTS, Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.search import layouts, search, sensitivity
from pardemo.planner.layouts.step import predict_step

LLAMA = configurations.shape_of_config(models.find("llama3-70b"))


def job(what, gpus, gpu="H100", between=400e9, program="megatron-core", sequence=8192):
    return Job(what, Machine(hardware.gpu(gpu), gpus, min(gpus, 8), between), programs.find_program(program), sequence)


def test_a_search_tries_only_what_can_be_run_and_keeps_the_quickest():
    given = job(LLAMA, 64, sequence=8192)
    every = list(layouts(LLAMA, given.machine, 128, 8192))
    tried = [one for one in every if given.program.can_run(one) and one.recompute != "selective"]
    assert 0 < len(tried) < len(every), "a search leaves out what the program does not run"
    for layout in tried:
        check_layout(layout, LLAMA, 64, 8192)
        assert layout.batch == 128
    assert len(tried) == len(set(tried))
    answer = search(given, 128)
    fitting = [one for one in tried if predict_memory(given, one).peak_bytes <= given.machine.usable_bytes]
    assert (answer.tried, answer.fitting) == (len(tried), len(fitting))
    quickest = min(predict_step(given, one).seconds for one in fitting)
    assert answer.best[0].seconds <= AS_QUICK * quickest
    assert all(one.has_room for one in (*answer.best, *answer.front))
    free = [one.headroom for one in answer.front]
    assert free == sorted(free), "slower, but with more room"


@pytest.mark.parametrize("model", ["llama3-70b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_job_remembers_only_what_a_layout_does_not_change(model):
    """Each of some hundred layouts, asked of a job that has been asked for all before it and of a new one."""
    shape = configurations.shape_of_config(models.find(model))
    used = job(shape, 64)
    tried = list(layouts(shape, used.machine, 128, 8192))
    for layout in tried[:: len(tried) // 150]:
        for recompute in ("none", "selective", "full"):
            chosen = layout.but(recompute=recompute, offloaded_layers=layout.tp % 2 if recompute == "none" else 0)
            new = replace(used)
            assert predict_step(used, chosen).seconds == predict_step(new, chosen).seconds
            assert predict_memory(used, chosen).lines == predict_memory(new, chosen).lines


def test_what_fits_nowhere_is_told_with_the_least():
    answer = search(job(LLAMA, 8, "4090"), 8)
    assert (answer.best, answer.fitting) == ((), 0)
    assert answer.least.memory.peak_bytes > answer.least.usable_bytes
    assert sensitivity(answer) == {}


def test_a_choice_may_depend_on_what_was_assumed():
    answer = search(job(LLAMA, 64, between=12.5e9, sequence=8192), 128)
    for best, same in sensitivity(answer).values():
        assert best.seconds <= same.seconds * AS_QUICK or not same.has_room


def test_a_search_tries_stage_two_and_both_ways_to_share_a_sequence():
    def kinds(program):
        given = job(LLAMA, 64, program=program)
        tried = [one for one in layouts(LLAMA, given.machine, 128, 8192) if given.program.can_run(one)]
        return {(one.sharding, one.pp > 1) for one in tried}, {one.context for one in tried}

    shardings, contexts = kinds("megatron-core")
    assert contexts == {"ring", "all-to-all"}
    assert {("zero2", False), ("zero3", False), ("zero1", True)} < shardings
    assert not {("zero2", True), ("zero3", True)} & shardings, "its FSDP takes the place of a pipeline"
    latent = replace(LLAMA, kv_heads=64, head_dim=192, value_dim=128)  # keys and values of two widths go round a ring
    assert {one.context for one in layouts(latent, job(latent, 64).machine, 128, 8192)} == {"ring"}
    shardings, contexts = kinds("torchtitan")
    assert contexts == {"ring"}
    assert not {"zero1", "zero2"} & {sharding for sharding, _ in shardings}


@pytest.mark.parametrize(("gpus", "tp", "cp", "quicker"), [(8, 1, 8, "ring"), (32, 2, 16, "all-to-all")])
def test_the_quicker_way_to_share_a_sequence_is_chosen(gpus, tp, cp, quicker):
    """Attention hides a ring of 8 within a host; over hosts 15 messages one after the other are not hidden."""
    given = job(configurations.shape_of_config(models.find("llama2-7b")), gpus, sequence=32768)
    ways = {way: predict_step(given, Layout(tp=tp, cp=cp, sharding="zero1", context=way)).seconds for way in CONTEXTS}
    assert min(ways, key=ways.get) == quicker
    assert max(ways.values()) > 1.01 * ways[quicker]
    best = search(given, 1, most=100).best
    assert {one.layout.context for one in best if (one.layout.tp, one.layout.cp) == (tp, cp)} == {quicker}


def test_what_is_not_usual_is_told():
    assert says(str(Layout(cp=2, context="all-to-all")), "CP2", "DP1", "1×1", "context")
    assert says(str(Layout(pp=2, accumulation=4, schedule="zb-h1")), "PP2", "DP1", "1×4", "schedule", "zb-h1")
