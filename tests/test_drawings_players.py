"""Players and schedules: each frame is right, by the formulas and by the engines themselves."""

import re

import pytest
import svgs
import torch
from book import drawings
from torch import nn

from pardemo import CallMeter, compat
from pardemo.book.chapters.hybrid_parallel import drawings as hybrid
from pardemo.book.chapters.long_sequences import drawings as long
from pardemo.book.chapters.megatron_attention import drawings as attention
from pardemo.book.chapters.pipeline_parallel.drawings import Course
from pardemo.book.chapters.pipelines_without_bubbles.drawings import filled
from pardemo.book.chapters.zero_memory import drawings as zero_moments
from pardemo.context_parallel import positions
from pardemo.draw import palette
from pardemo.formulas import communication, context_parallel, memory
from pardemo.formulas import pipeline as pipelines
from pardemo.pipeline_parallel import BackwardInput, BackwardWeight, Forward, Schedule, gpipe, zb_v
from pardemo.pipeline_parallel.timetable import chart, kind_of
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3


@pytest.mark.parametrize("ranks", [2, 5])
def test_the_rings_last_frame_has_the_whole_sum_everywhere_and_each_step_sends_one_chunk_a_rank(ranks):
    frames = svgs.frames(drawings.ring_all_reduce(ranks))
    assert len(frames) == 1 + 2 * (ranks - 1)
    added = [sum(len(frame.filled(colour)) for colour in palette.RANKS) for frame in frames]
    assert added[0] == ranks * ranks, "each chunk has one rank's numbers"
    assert added[ranks - 1] == ranks * ranks * (ranks + 1) // 2, "one chunk with all, one with all but one …"
    assert added[-1] == ranks**3, "every chunk has everybody's"
    assert [len(frame.heads) for frame in frames] == [0] + [ranks] * (2 * (ranks - 1))
    first_lap = drawings.ring_all_reduce(ranks, laps=1)
    assert first_lap.captions == drawings.ring_all_reduce(ranks).captions[:ranks], "no word of the second"


@pytest.mark.parametrize(
    ("kind", "stages", "micro_batches", "chunks"),
    [("gpipe", 4, 4, 1), ("one_f_one_b", 3, 2, 1), ("interleaved", 2, 4, 2)],
)
def test_a_schedules_player_computes_everything_once_and_holds_as_many_as_it_should(
    kind, stages, micro_batches, chunks
):
    player = drawings.pipeline_schedule(kind, stages, micro_batches, chunks)
    frames = svgs.frames(player)
    steps = 3 * (chunks * micro_batches + stages - 1)
    assert len(frames) == 1 + steps
    held = [[float(word) for word in held_of(frame)] for frame in frames]
    most = [pipelines.in_flight(kind, rank, stages, micro_batches, chunks) / chunks for rank in range(stages)]
    assert held[0] == [0] * stages
    assert held[-1] == most, "the last frame, which is shown first, tells the most"
    assert [max(column) for column in zip(*held[:-1], strict=True)] == most, "in whole micro-batches"
    last = frames[-1]
    area = {name: sum(box.area for box in last.filled(palette.DONE[name])) for name in ("forward", "backward", "idle")}
    area = {name: total - 18 * 18 for name, total in area.items()}  # the legend's own
    assert area["backward"] == pytest.approx(2 * area["forward"], rel=0.01)
    bubble = pipelines.bubble_of_total(stages, micro_batches, chunks)
    rows = [box for box in last.boxes if box.fill == "none"]
    assert area["idle"] / sum(row.area for row in rows) == pytest.approx(bubble, abs=0.01)
    assert f"{bubble:.0%} of the total time" in player.captions[-1]
    numbers = [
        text.text
        for text in last.texts
        if fill_under(last, text) in (palette.DONE["forward"], palette.DONE["backward"])
    ]
    assert sorted(numbers) == sorted(str(k) for k in range(micro_batches) for _ in range(2 * stages * chunks))


@pytest.mark.parametrize(
    ("kind", "stages", "micro_batches", "chunks"),
    [("zb_h1", 3, 3, 1), ("zb_v", 2, 4, 2)],
)
def test_a_zero_bubble_player_draws_the_weights_gradients_apart_and_the_v(kind, stages, micro_batches, chunks):
    player = drawings.pipeline_schedule(kind, stages, micro_batches, chunks)
    frames = svgs.frames(player)
    assert len(frames) == 1 + 3 * chunks * micro_batches + stages - 1
    held = [[float(word) for word in held_of(frame)] for frame in frames]
    most = [pipelines.in_flight(kind, rank, stages, micro_batches, chunks) / chunks for rank in range(stages)]
    assert held[0] == [0] * stages
    assert held[-1] == [max(column) for column in zip(*held[:-1], strict=True)] == most
    last = frames[-1]
    kinds = ("forward", "backward", "weight gradients")
    area = {name: sum(box.area for box in last.filled(palette.DONE[name])) - 18 * 18 for name in (*kinds, "idle")}
    assert area["forward"] == pytest.approx(area["backward"]) == pytest.approx(area["weight gradients"])
    unit = 3 * micro_batches * stages
    idle = stages * pipelines.idle(kind, stages, micro_batches, 1, 2)
    rows = sum(box.area for box in last.boxes if box.fill == "none")
    assert area["idle"] / rows == pytest.approx(idle / (unit + idle), abs=0.01)
    assert f"{idle / (unit + idle):.0%} of the total time" in player.captions[-1]
    for name in kinds:
        numbers = [text.text for text in last.texts if fill_under(last, text) == palette.DONE[name]]
        assert sorted(numbers) == sorted(str(k) for k in range(micro_batches) for _ in range(stages * chunks))
    if chunks == 2:
        labels = [int(text.text) for text in last.texts if 70 < text.x < 96 and text.text.isdigit()]
        assert labels == [stage for rank in range(stages) for stage in (rank, 2 * stages - 1 - rank)]


@pytest.mark.parametrize(("kind", "chunks"), [("gpipe", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_before_a_guess_a_schedule_opens_early_and_no_words_tell_the_answer(kind, chunks):
    player = drawings.pipeline_schedule(kind, 2, 4, chunks, before_guess=True)
    assert player.start == 2, "micro-batch 0 has reached the last rank"
    words = [player.name, *player.captions, *(text for frame in svgs.frames(player) for text in frame.words())]
    assert not [text for text in words if "%" in text or "was idle" in text or "(p" in text]
    assert len(player) == len(drawings.pipeline_schedule(kind, 2, 4, chunks)), "and steps through all of it"


def test_what_zb_v_fills_is_what_whole_backwards_would_leave_idle():
    """Each of these computations begins while what the rank needs next is still being computed elsewhere."""
    course = Course.of(Schedule(zb_v, 3, 5, 2))
    gaps = filled(course)
    assert gaps[5, 2] == "the gradient of micro-batch 0", "rank 0, before its own first stage's turn"
    for stage, k in gaps:
        begin, end = course.times[stage, k, "weight gradients"]
        rank = course.schedule.rank_of(stage)
        following = [of for of, (start, _) in course.of_rank(rank).items() if start == end]
        needed = course.schedule.before(instruction(*following[0]))
        assert course.times[needed.stage, needed.micro_batch, kind_of(needed)][1] > begin


def instruction(stage, k, kind):
    return {"forward": Forward, "backward": BackwardInput, "weight gradients": BackwardWeight}[kind](stage, k)


def held_of(frame):
    return [text.text for text in frame.texts if text.x > 530 and text.text[0].isdigit()]


def fill_under(frame, text):
    box = frame.box_of(text)
    return box.fill if box else None


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_step_sends_and_holds_what_the_formulas_say(stage, ranks):
    moments = zero_moments.moments(stage, ranks)
    whole = 1_000_000
    share = moments[-1].sent * 2 * whole * (ranks - 1) / ranks
    assert share == pytest.approx(communication.zero_step(whole, ranks, stage))
    theory = memory.model_states(3 * ranks, ranks, stage)
    last_gradient = max(k for k, moment in enumerate(moments) if moment.does in ("backward", "reduce-scatter"))
    held = max(moment.bytes_each for moment in moments) if stage == 1 else moments[last_gradient].bytes_each
    assert held == pytest.approx(sum(theory.values()) / (3 * ranks))
    without = (sum(theory.values()) - theory["gradients"]) / (3 * ranks)
    assert moments[0].bytes_each == moments[-1].bytes_each == pytest.approx(without), "a step ends as it began"
    for frame, moment in zip(svgs.frames(drawings.zero_step(stage, ranks)), moments, strict=True):
        arrows = 2 * (ranks - 1) * len(moment.layers) * (moment.does in ("all-gather", "reduce-scatter"))
        assert len(frame.heads) == arrows


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_step_calls_what_the_engine_calls(stage, world_of):
    def count():
        net = gpt.seeded(lambda: nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)]))
        options = {1: {}, 2: {"bucket_bytes": 8 * 8 * 4}, 3: {}}[stage]
        engine = {1: Zero1, 2: Zero2, 3: Zero3}[stage](net, torch.optim.AdamW, **options)
        x, here = gpt.numbers(4, 8), []
        if stage == 3:
            whole = lambda layer: any(p.untyped_storage().nbytes() for p in compat.fsdp_gathered(layer))  # noqa: E731
            note = lambda *_: here.append([k for k, layer in enumerate(net, 1) if whole(layer)])  # noqa: E731
            for layer in net:
                layer.register_forward_pre_hook(note)
                layer.register_forward_hook(lambda module, _, out: out.register_hook(note) and None)
        with CallMeter() as calls:
            engine(x).square().mean().backward()
            engine.step()
        engine.close()
        return calls.counts, here

    counts, here = world_of(2).run(count)[0]
    moments = zero_moments.moments(stage, 2)
    units = {1: 1, 2: 3, 3: 1}[stage]  # stage 2 gathers its three buckets one by one
    drawn = {
        "all_gather": units * sum(moment.does == "all-gather" for moment in moments),
        "reduce_scatter": sum(moment.does == "reduce-scatter" for moment in moments),
    }
    assert {name: counts[name] for name in drawn} == drawn
    if stage == 3:
        computed = [moment for moment in moments if moment.does in ("forward", "backward")]
        whole = [
            [layer for layer in zero_moments.LAYERS if len(moment.held[0, layer, "parameters"]) == 2]
            for moment in computed
        ]
        assert whole == here, "the layers that are there in full whenever one computes"


def test_what_several_frames_have_stands_in_the_page_once_and_every_frame_points_to_it():
    pages = [
        drawings.pipeline_schedule(kind, 4, 8, 1)._repr_html_() for kind in ("one_f_one_b", "gpipe", "one_f_one_b")
    ]
    for page in pages:
        names = re.findall(r' id="([^"]+)"', page)
        assert len(names) == len(set(names)) > 20
        assert set(names) == set(re.findall(r'<use href="#([^"]+)"/>', page))
        long = [part for part in re.findall(r"<(?:rect|path|text) .*?(?:/>|</text>)", page) if len(part) > 60]
        assert len(long) == len(set(long))
    one, other, again = (set(re.findall(r' id="([^"]+)"', page)) for page in pages)
    assert not one & other, "another player's drawing would appear in this one"
    assert one == again, "the same drawing twice in a page"


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_ring_of_keys_computes_each_seen_block_once(ranks):
    seen = {(a, b) for a in range(2 * ranks) for b in range(a + 1)}
    for order, name in (("plain order", "plain"), ("zigzag", "zigzag")):
        blocks = {
            rank: [b for step in range(ranks) for b in long.blocks_of_step(order, rank, ranks, step)]
            for rank in range(ranks)
        }
        every = [block for of_rank in blocks.values() for block in of_rank]
        assert len(every) == len(seen)
        assert set(every) == seen
        counted = [len(of_rank) for of_rank in blocks.values()]
        assert counted == [context_parallel.blocks_seen(rank, ranks, name) for rank in range(ranks)]
        for rank in range(ranks):  # the package's own cut
            halves = positions(4 * ranks, rank, ranks, name)[::2] // 2
            assert halves.tolist() == list(long.ORDERS[order](rank, ranks))


def test_the_cubes_step_has_gpipes_times_and_a_blocks_sums():
    course = hybrid.times()
    schedule = Schedule(gpipe, hybrid.STAGES, hybrid.MICRO_BATCHES)
    real = sorted((step.stage, kind_of(step), *span) for step, span in chart(schedule).times.items())
    assert sorted((stage, kind, *span) for (stage, _, kind), span in course.items()) == real
    assert attention.BLOCK.count("g") == attention.BLOCK.count("f") == hybrid.SUMS
    svg = svgs.drawing(drawings.cube_step())
    own = 2 * hybrid.STAGES * hybrid.MICRO_BATCHES * hybrid.SUMS * hybrid.LAYERS
    assert len(svg.filled(palette.KEPT["activations"])) == own + 4, "and the legend's four"
    assert len(svg.filled(palette.KEPT["gradients"])) == hybrid.STAGES + 1, "a sum at the end of each stage; the legend"
    assert len(svg.heads) == 2 * hybrid.MICRO_BATCHES + 2, "down and up; the legend's, and the time's"
