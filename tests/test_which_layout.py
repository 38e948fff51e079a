"""What *Which layout?* stands on: papers' rows that nothing was fitted to, the sliders, the pictures."""

import re
import statistics

import pytest
from book import figures

from pardemo import project
from pardemo.book.chapters.which_layout import judged
from pardemo.planner import hardware
from pardemo.planner.estimate import choose as choose_fastest
from pardemo.planner.layouts import charts
from pardemo.planner.layouts.job import Job
from pardemo.planner.layouts.layout import Layout, check_layout
from pardemo.planner.layouts.machines import Machine
from pardemo.planner.layouts.memory import predict_memory
from pardemo.planner.layouts.micro_batch import layer_seconds
from pardemo.planner.layouts.procedure import adds, choose, job_of
from pardemo.planner.layouts.programs import find_program
from pardemo.planner.layouts.published import against, loaders, papers
from pardemo.planner.layouts.shape import Shape
from pardemo.planner.layouts.step import predict_step, stage_layers

START = {"model": "llama3-8b", "gpus": 64, "link": 400, "sequence": 8192, "tp": 4, "pp": 2}


def test_the_papers_rows_can_be_run_and_say_what_they_print():
    rows = [*papers.narayanan(pipelines=True), *papers.narayanan(pipelines=False), *papers.llama_3()]
    for one in rows:
        ends = one.job.program.embedding_and_loss_as_layers
        check_layout(one.layout, one.job.shape, one.job.machine.gpus, one.job.sequence, ends)
    days = [300e9 / 2048 / one.layout.batch * one.seconds / 86400 for one in rows[:12]]
    # Table 2's last column: days for 300B tokens
    printed = [84, 43, 23, 156, 80, 42, 90, 74, 74, 169, 137, 140]
    assert days == pytest.approx(printed, rel=0.02)
    assert [one.layout.batch * one.job.sequence for one in papers.llama_3()] == [2**24] * 3
    mfu = [one.tflops * 1e12 / one.job.machine.gpu.flops for one in papers.llama_3()]
    assert mfu == pytest.approx([0.43, 0.41, 0.38], abs=0.006), "Table 4's last column"


def test_the_rule_answers_the_chapter_s_first_question_with_the_best_of_the_122_layouts():
    rows = against.compare(loaders.read(project.root() / "data" / "published_runs" / "nanotron_h100.csv"))
    tried = [one for one in rows if one.run.layout.gpus == 32 and one.run.job.shape.name == "8.86B"]
    best = min(against.usable(tried), key=lambda one: one.run.seconds)
    assert (str(best.run.layout), round(best.run.seconds, 2)) == ("PP2 DP16 zero1 1×16", 4.56)
    assert str(choose(best.run.job, best.run.layout.batch).layout) == str(best.run.layout)
    first = min((one for one in tried if one.fits), key=lambda one: one.step.seconds)
    assert str(first.run.layout) == "TP2 DP16 zero1 1×16"
    assert 1.02 < best.step.seconds / first.step.seconds < 1.03
    assert round(best.step.seconds, 1) == 4.9


def test_a_chunk_of_llama_3_is_a_layer_and_the_page_says_what_follows():
    trained = papers.llama_3()
    for one in trained:
        assert stage_layers(one.job, one.layout) == [7, *[8] * 14, 7]
    slow, slower, fast = (one.predicted_tflops / one.tflops for one in trained)
    one = trained[1]
    filled = {name: predict_memory(one.job, one.layout.but(sharding=name)) for name in ("zero1", "zero2")}
    assert {of.stage for of in filled.values()} == {1}, "the second stage is the fullest"
    saved, left = (filled["zero1"].peak_bytes - filled["zero2"].peak_bytes) / 1e9, filled["zero2"].peak_bytes
    page = project.notebooks()["22_which_layout"].read_text(encoding="utf-8")
    for said in (
        f"{100 - 100 * slow:.0f} and {100 - 100 * slower:.0f} % too slow, the third, with attention as its largest "
        f"part, {100 * fast - 100:.0f} % too fast",
        f"{saved:.0f} GB less. The {left / 1e9:.0f} GB that remain leave "
        f"{100 - 100 * left / one.job.machine.gpu.memory_bytes:.0f} % free",
        f"the {predict_step(one.job, one.layout).seconds:.1f} s step",
    ):
        assert said in page


def test_the_page_says_what_metas_layout_adds_by_the_rule():
    one = papers.llama_3()[1]
    job = job_of("llama3.1-405b", "H100", 16_384, 400, sequence=8192)
    shares = {part: 100 * share for part, share in adds(job, one.layout).items()}
    bubble = 100 * 15 / (16 * 8)
    said = f"add {sum(shares.values()):.0f} %: {shares['tensor parallel']:.0f} for tensor ranks, {bubble:.0f} for the "
    said += f"bubble, {shares['pipeline'] - bubble:.0f} for messages, {shares['data parallel']:.0f} for ZeRO-1"
    assert said in project.notebooks()["22_which_layout"].read_text(encoding="utf-8")
    assert predict_memory(job, one.layout).peak_bytes > job.machine.usable_bytes


def test_pipelines_of_another_paper_are_predicted_with_megatrons_constants():
    for one in papers.narayanan(pipelines=True):
        assert one.predicted_tflops == pytest.approx(one.tflops, rel=0.05)


def test_fewer_adapters_make_zero_3_slower_alone():
    eight, one = (papers.narayanan(pipelines=False, adapters=n) for n in (8, 1))
    for fast, slow in zip(eight, one, strict=True):
        assert slow.predicted_tflops < 0.65 * fast.predicted_tflops
        assert slow.seconds == fast.seconds


def test_jobs_are_runs_of_one_job():
    runs = loaders.read(project.root() / "data" / "published_runs" / "nanotron_h100.csv")
    outcomes = against.compare(run for run in runs if run.layout.gpus == 32)
    groups = against.jobs(outcomes)
    assert groups
    for group in groups:
        assert len({(x.run.job.shape.name, x.run.layout.gpus, x.run.layout.batch) for x in group}) == 1
        assert len(group) > 1
    assert len(against.choices(outcomes)) == len(groups)


@pytest.mark.nightly
def test_the_page_counts_all_published_runs_and_what_choices_by_plain_seconds_cost():
    outcomes = against.compare(judged.published_runs(project.root() / "data" / "published_runs"))
    groups = against.jobs(outcomes)
    regrets = []
    for group in groups:
        fitting = [x for x in group if x.has_room] or group
        chosen = choose_fastest(fitting, lambda x: x.step.seconds, lambda x: x.memory.peak_bytes)
        regrets.append(chosen.run.seconds / min(x.run.seconds for x in group) - 1)
    assert (round(statistics.fmean(regrets), 3), round(1 + max(regrets), 1)) == (0.037, 4.0)
    failed = sum(x.run.outcome == "failed" for x in outcomes)
    small = sum(len(group) <= 3 for group in groups)
    page = project.notebooks()["22_which_layout"].read_text(encoding="utf-8")
    for said in (
        f"all {len(outcomes):,} published runs, of which {failed} failed",
        f"{small} groups have no more than three layouts",
        "3.7 % behind the best on average, and at worst takes four times as long",
    ):
        assert said in page


def test_a_positions_text_has_all_parts_of_its_step():
    _, text = charts._frame("here", charts.planned_layout(**START))
    whole, *parts = map(float, re.findall(r"([\d.]+) s\b", text))
    assert len(parts) > 2
    assert sum(parts) == pytest.approx(whole, abs=0.05 * (1 + len(charts.DOES)))


def test_without_a_reader_the_layouts_sliders_are_a_player_through_some_positions(monkeypatch):
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")
    player = charts.layout_explorer(**START)
    assert len(player) == 1 + len(charts.TRIED)
    planned = charts.planned_layout(**START)
    begins = f"the start: TP 4, PP 2, 400 Gbit/s: {planned.layout}. {planned.seconds:.1f} s a step"
    assert player.captions[0].startswith(begins)


def test_every_slider_of_a_layout_moves_the_picture(monkeypatch):
    shown = []
    monkeypatch.delenv("PARDEMO_HEADLESS", raising=False)
    monkeypatch.setattr("IPython.display.display", shown.append)
    sliders = charts.layout_explorer(**START)
    sliders.update()
    named = {child.description: child for child in sliders.children if getattr(child, "description", "")}
    assert set(named) == {"GPUs", "Gbit/s", "sequence", "TP", "PP"}
    for slider in named.values():
        before = shown[-1]
        slider.value = slider.options[slider.options.index(slider.value) + 1]
        assert shown[-1]._repr_html_() != before._repr_html_(), slider.description


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"gpus": 8, "tp": 16}, "TP 16 × PP 2 does not divide 8 GPUs"),
        ({"gpus": 4096, "tp": 1, "pp": 1}, "512 samples a step are too few for DP 4096"),
        ({"tp": 1, "pp": 64}, "32 layers cannot be cut"),
    ],
)
def test_what_the_sliders_cannot_make_is_said(changed, told):
    with pytest.raises(ValueError, match=told):
        charts.planned_layout(**START | changed)


def test_a_layout_that_does_not_fit_is_recomputed():
    few = charts.planned_layout(**START).layout
    long = charts.planned_layout(**START | {"sequence": 65536, "tp": 1, "pp": 1}).layout
    assert (few.recompute, long.recompute) == ("none", "full")
    assert (few.sharding, long.sharding) == ("zero1", "zero3")


def test_a_step_is_drawn_part_by_part_with_what_was_published(out):
    multiplied = {"matrix multiplications": 2.0}
    steps = {"a": multiplied | {"pipeline bubble": 1.0}, "b": multiplied | {"attention": 4.0}}
    picture = figures.seconds_of_layouts(steps, {"a": 2.5}, "14_test")
    assert picture.alt == (
        "Predicted seconds of a step: a 3.00 s, mostly matrix multiplications, published 2.50 s; "
        "b 6.00 s, mostly attention."
    )
    assert (out / "figures" / "14_test.svg").exists()


def test_a_layer_without_small_matrices_and_launches_is_the_four_lines_of_the_chapter():
    machine = Machine(hardware.gpu("H100"), gpus=32, host_gpus=8, between=400e9)
    model = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn_hidden=14336, vocabulary=131072)
    bare = find_program("nanotron").but(tile_loss=0, launch_s=0, launch_rank_s=0, launch_across_hosts_s=0)
    job = Job(model, machine, bare, sequence=4096)
    layout = Layout(tp=4, pp=4, dp=2, micro_batch=4, accumulation=32, sharding="zero1", sequence_parallel=True)
    t, h, tokens = 4, 4096, 4 * 4096
    a_sum = 2 * (t - 1) / t * 2 * tokens * h / machine.rate(t) + 2 * machine.latency_within
    assert layer_seconds(job, layout).seconds == pytest.approx(
        {
            "matrix multiplications": (
                6 * tokens * (4 * h * h + 3 * h * 14336) / t / (machine.matrix_flops * bare.matmul_efficiency)
            ),
            "attention": 3.5 * 2 * 4 * 4096**2 * h / t / (machine.attention_flops * bare.attention_efficiency),
            "memory bandwidth": 3 * 2 * tokens * h * 22 / t / machine.memory_bytes_per_s,
            "tensor-parallel traffic": 4 * a_sum,
        }
    )


def test_the_latency_beyond_a_node_is_the_one_that_the_page_names():
    machine = Machine(hardware.gpu("H100"), gpus=32, host_gpus=8, between=400e9)
    across_s = machine.latency(16) + find_program("nanotron").exchange_across_hosts_s
    assert [machine.latency(8), across_s] == pytest.approx([0.15e-3, 1.7e-3])
    page = project.notebooks()["22_which_layout"].read_text(encoding="utf-8")
    assert "after 1.7 ms across nodes instead of 0.15" in page
