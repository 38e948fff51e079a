"""Pictures: written whole, with alternative text, in the one style."""

import importlib
import io
from xml.etree import ElementTree

import pytest
import torch
from book import drawings, figures
from conftest import says
from matplotlib import font_manager
from PIL import Image

from pardemo import project
from pardemo.book.chapters.zero_communication import measurements as zero_traffic
from pardemo.draw import pictures, style
from pardemo.draw.style import COLOURS, HATCHES, SETTINGS
from pardemo.meters import Span
from pardemo.meters.trace import Bar
from pardemo.planner.layouts.procedure import candidates, choose, job_of


def test_saved_with_alternative_text(out):
    fig, ax = figures.new()
    ax.plot([1, 2], [1, 2], "o-")
    picture = figures.save(fig, "01_test", "A line and 2 × 2 points.")
    file = out / "figures" / "01_test.svg"
    shown, metadata = picture._repr_mimebundle_()
    assert metadata == {"image/png": {"alt": "A line and 2 × 2 points.", "file": "01_test.svg"}}
    assert picture.svg == file.read_text(), "which a page shows"
    assert pictures.read_picture(file.read_text()) == pictures.Saved("A line and 2 × 2 points.", 880, 440, 501, "")
    with Image.open(io.BytesIO(shown["image/png"])) as image:
        assert image.info["Description"] == "A line and 2 × 2 points."
        assert image.size == (880, 440)
    assert [p.name for p in (out / "figures").iterdir()] == ["01_test.svg"], "no temporary file is left"


def test_a_picture_is_svg_of_words_and_the_same_each_time(tmp_path):
    texts = []
    for _ in range(2):
        fig, ax = figures.new(size=(4.0, 3.0))
        ax.plot([1, 2], [1, 2])
        ax.set_title('bytes "sent" < S', fontsize=12)
        ax.set_xlabel("seconds", fontsize=8)
        texts.append(figures.draw(fig, 'a "line" & <more>').svg)
    assert texts[0] == texts[1]
    root = ElementTree.fromstring(texts[0])
    assert root.get("aria-label") == 'a "line" & <more>'
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert 'bytes "sent" < S' in words
    assert "<style" not in texts[0], "it would reach the whole page"
    own = pictures.read_picture(texts[0])
    assert own.least == 360, "at 360 of 440 pixels the smallest words, of 8 points, are 10 pixels high"


def test_what_is_left_out_of_a_picture_is_nothing_that_is_seen():
    svg = (
        '<!-- x --><g id="a"><g clip-path="url(#p)"/><g transform="translate(1 2)">'
        "<text style=\"font: 9px 'DejaVu Sans'\">0.084</text></g></g><defs>\n</defs>"
    )
    kept = '<g clip-path="url(#p)"/><g transform="translate(1 2)"><text style="font-size: 9px">0.084</text></g>'
    assert style.smaller(svg) == kept
    assert style.smaller(kept) == kept
    dot = "M 0 1 C 1 2 3 4 2 2 C 1 2 0 0 0 1 z"
    assert style.smaller(f'<path d="{dot}"/>') == f'<path d="{dot}"/>', "a curve that is no hatch stays one"
    assert "C" not in style.smaller(f'<pattern id="h"><path d="{dot}"/></pattern>')


def test_every_committed_picture_is_whole():
    files = sorted((project.root() / "outputs" / "reference" / "figures").glob("*.svg"))
    assert files
    for file in files:
        ElementTree.parse(file)
        assert pictures.read_picture(file.read_text()).alt


@pytest.mark.parametrize("text", ["", "<svg width='1'>", "<svg></svg>", "<svg width='x' data-least='1'></svg>", "PNG"])
def test_what_is_no_picture_of_ours_is_said_to_be_none(text):
    with pytest.raises(ValueError, match=r"picture.*pardemo's"):
        pictures.read_picture(text)


def test_a_picture_may_be_a_png(tmp_path):
    fig, _ = figures.new()
    figures.write(fig, tmp_path / "x.png", "empty axes")
    with Image.open(tmp_path / "x.png") as image:
        assert image.info["Description"] == "empty axes"


def test_alternative_text_is_required(out):
    with pytest.raises(ValueError, match="alternative text"):
        figures.save(figures.new()[0], "01_test", "")


def test_prediction_is_a_line_measurement_points():
    _, ax = figures.new()
    told = figures.curves(ax, {"a": {1: 0.25, 2: 0.5}, "b": [3, 2]}, {"a": {1: 0.3}}, per=0.01)
    line, points, other = ax.lines
    assert (line.get_marker(), list(line.get_xdata()), list(line.get_ydata())) == ("", [1, 2], [25, 50])
    assert (points.get_linestyle(), list(points.get_ydata())) == ("None", [30])
    assert points.get_color() == line.get_color() != other.get_color()
    assert list(other.get_xdata()) == [0, 1], "numbers one after the other"
    assert ax.get_legend_handles_labels()[1] == ["a", "b"], "each name once"
    assert told == "a 25 to 50; b 300 to 200"


def test_sliders_show_the_picture_that_they_choose(monkeypatch):
    shown = []
    monkeypatch.delenv("PARDEMO_HEADLESS", raising=False)
    monkeypatch.setattr("IPython.display.display", shown.append)
    sliders = drawings.states_explorer(7.5, 64)
    sliders.update()
    assert says(shown[-1].alt, "64", "120", "31.4", "16.6", "1.88")
    named = {child.description: child for child in sliders.children if getattr(child, "description", "")}
    for letter, value in (("N", 8), ("K", 8), ("Ψ, 10⁹", 75)):
        before = shown[-1].alt
        named[letter].value = value
        assert shown[-1].alt != before, letter


def test_in_a_page_the_sliders_are_a_player_over_the_ranks(monkeypatch):
    monkeypatch.setenv("PARDEMO_HEADLESS", "1")
    player = drawings.states_explorer()
    assert (
        "64 GPUs, plain data parallelism, ZeRO-1, ZeRO-2 and ZeRO-3 keep 120, 31.4, 16.6, 1.88 GB"
        in player.captions[player.start]
    )
    assert says(player.captions[player.start], "85", "GB", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def test_bars_stand_side_by_side_within_their_outlines():
    _, ax = figures.new()
    series = {"send": {"a": 1, "b": 2}, "receive": {"a": 3, "b": 4}}
    told = figures.bars(ax, series, {name: {"a": 2, "b": 2} for name in series}, text="{:.1f}")
    measured = [bar for bar in ax.patches if bar.get_fill()]
    outlines = [bar for bar in ax.patches if not bar.get_fill()]
    assert [bar.get_height() for bar in measured] == [1, 2, 3, 4]
    assert [bar.get_height() for bar in outlines] == [2, 2, 2, 2]
    assert [text.get_position()[1] for text in ax.texts] == [3] * 4, "points above the bar or its outline"
    assert [text.xy[1] for text in ax.texts] == [2, 2, 3, 4]
    assert ax.get_legend_handles_labels()[1] == ["send", "predicted", "receive"]
    assert told == "send: a 1.0, b 2.0; receive: a 3.0, b 4.0"


def test_bars_are_stacked_from_the_top_down():
    _, ax = figures.new()
    series = {"one": {"a": 1000, "b": 2000}, "two": {"a": 3000}, "none": {"a": 0}}
    fills = {"two": "compute", "one": ("wait", "///"), "none": "off"}
    style = {"per": 1000, "across": True, "stacked": True, "fills": fills, "points": ("m", {"b": 4000})}
    told = figures.bars(ax, series, {"a": 5000}, **style)
    ends = [(bar.get_x(), bar.get_width()) for bar in ax.patches if bar.get_fill()]
    assert ends[:4] == [(0, 3), (0, 0), (3, 1), (0, 2)], "in the order of fills"
    assert ax.patches[2].get_hatch() == "///"
    assert ax.get_legend_handles_labels()[1] == ["m", "two", "one", "predicted"], "without what is nowhere"
    assert ax.get_xlim()[1] > 5 > ax.collections[0].get_offsets()[1][0] == 4
    assert ax.get_ylim()[0] > ax.get_ylim()[1], "the first is on top"
    assert told == "a 4, b 2"


def test_numbers_in_words():
    table = {"one\ntable": {8: 0.5, 16: 1.0}, "two": {8: 0.25}}
    assert figures.words(table, "{:.0f}", per=0.01) == "one table: 50 at 8, 100 at 16; two: 25 at 8"
    assert figures.words({"a": 1.0, "b": 2.5}) == "a 1, b 2.5"
    assert figures.words({"a": [1.0, 2.0], "b": [3.0]}, "{:.1f}") == "a 1.0, 2.0; b 3.0"


def test_a_logarithmic_axis_has_the_ticks_that_are_given():
    _, ax = figures.new()
    figures.log(ax, x=[1, 1000], y={1: "an hour", 24: "a day"})
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["1", "1,000"]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["an hour", "a day"]
    assert not list(ax.xaxis.get_minorticklocs())


def test_a_figure_has_one_legend_with_each_label_once(out, monkeypatch):
    drawn = {}
    monkeypatch.setattr("pardemo.draw.charts.save", lambda fig, name, alt: drawn.update({name: (fig, alt)}))
    panels = {title: {"series": {"send": {"x": size}}, "outline": {"x": size}} for title, size in (("a", 1), ("b", 2))}
    figures.bar_chart("02_test", "Sent: {}.", panels, shared=True, text="{:.1f}")
    fig, alt = drawn["02_test"]
    assert [text.get_text() for text in fig.legends[0].texts] == ["send", "predicted"]
    assert alt == "Sent: a: x 1.0; b: x 2.0."
    assert {ax.get_ylim() for ax in fig.axes} == {(0, 2.3)}, "one scale"


def test_boxes_over_time():
    spans = [Span(0, "compute", "", 1.0, 1.5), Span(0, "communication", "", 1.5, 1.6)]
    _, ax = figures.new()
    figures.lanes(ax, figures.by_kind(spans, {"layers": ["compute"], "all-reduce": ["communication"]}, 1.0))
    boxes = [collection.get_paths()[0].get_extents() for collection in ax.collections]
    assert [(round(box.x0), round(box.x1)) for box in boxes] == [(0, 500), (500, 600)], "milliseconds"
    assert [round((box.y0 + box.y1) / 2) for box in boxes] == [0, 1]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["layers", "all-reduce"]
    _, ax = figures.new()
    figures.gantt(ax, [Span(0, "compute", "", 1.0, 1.5), Span(1, "communication", "", 1.5, 1.6)])
    assert [t.get_text() for t in ax.get_yticklabels()] == ["rank 0", "rank 1"]
    box = ax.collections[0].get_paths()[0].get_extents()
    assert (box.x0, box.x1) == (0, 500), "milliseconds since the first span"


def test_the_font_comes_with_matplotlib():
    path = font_manager.findfont(SETTINGS["font.family"], fallback_to_default=False)
    assert "matplotlib" in path


def test_kinds_can_be_told_apart_without_colour():
    assert HATCHES["send"] != HATCHES["receive"]
    assert HATCHES["compute"] != HATCHES["communication"]
    assert set(HATCHES) <= set(COLOURS)


def test_what_a_block_keeps_is_drawn_with_its_numbers_in_words(out):
    found = {("as it is", "one GPU"): 114.0, ("as it is", "cut"): 36.0, ("full", "one GPU"): 2.0, ("full", "cut"): 2.0}
    picture = figures.activation_memory(found, found, ["as it is", "full"])
    assert says(picture.alt, "GPU", "114", "36", "GPU", "2")
    assert "softmax 32" in figures.activation_terms({"softmax": 32.0}, {"softmax": 32.0}, ["softmax"]).alt
    ways = {"tensor parallel": 7.0, "sequence, kept": 5.5}
    assert says(figures.sequence_cost(ways, [7, 5.5], ways, [7, 5.5], 4).alt, "sequence", "5.5", "5.5")
    figures.loss_bytes({96: 288.0}, {96: 18.0}, 4, {"GPT-2": 50_257})
    figures.on_each_gpu({"layers:\nweights": 25.2, "logits": 4.1}, {"layers:\nweights": 25.2, "logits": 0.5})
    names = [f"sequence_parallel_{name}" for name in ("activation_terms", "memory", "sequence_cost")]
    names += ["vocabulary_loss_bytes", "vocabulary_whole"]
    assert sorted(file.stem for file in (out / "figures").iterdir()) == names


def test_pictures_of_few_bits_tell_their_numbers_in_words(out):
    assert "E2M1 7, bf16 1,500" in figures.number_lines({"E2M1": range(8), "bf16": [k / 8 for k in range(1501)]}).alt
    assert "int8 0.78 per cent" in figures.rounding_error_by_size([1, 2], {"int8": [1.0, 0.0078]}).alt
    errors = {"fp32": {16: 1e-8, 32: 2e-8}, "bf16": {16: 0.01, 32: 0.5}}
    assert figures.sums_by_addends(errors, {16: 0.1, 32: 0.5}).alt.endswith("fp32 2e-08; bf16 0.5.")
    assert figures.small_updates([0, 1], {"fp32": [1, 1.5]}, [[1, 2]]).alt.endswith("fp32 1.5.")
    tensors = {"gradients": [1e-5, 2e-5, 3e-5], "parameters": [0.1], "activations": [0.2]}
    assert "gradients 2.0e-05" in figures.tensors_and_formats(tensors, {"E4M3": (2**-9, 448)}, {"E4M3": 0.9}).alt
    found = {"parameters": {"int8": 0.01, "nvfp4": 0.09}}
    assert says(figures.error_by_format(found).alt, "int8", "1.0", "nvfp4", "9.0")
    assert "int8 1 to 1e+02" in figures.outlier_errors([1, 10], {"int8": [0.01, 1.0]}).alt
    late = {"delayed": [0.03, 0.8], "current": [0.03, 0.03]}
    assert says(figures.scaling_over_steps(late, [1], 16).alt, "delayed", "80.0", "3.0")
    sent = {"int8": 0.2578, "nvfp4": 0.1406}
    assert says(figures.sent_by_format(sent, sent, {"int8": 0.1, "nvfp4": 0.2578}).alt, "nvfp4", "14.1", "25.8")
    assert figures.losses_apart({"nvfp4": [2.0, 0.9]}, [2.0, 0.8]).alt.endswith("fp32 0.8000, nvfp4 0.9000.")
    speeds = {"small": {"bf16": (None, 30.0)}, "large": {"mxfp8": (40.0, 41.0)}}
    told = figures.published_precisions(speeds).alt
    assert says(told, "bf16", "30", "mxfp8", "40", "41")
    assert len(list((out / "figures").iterdir())) == 11


def test_pictures_of_long_sequences_tell_their_numbers_in_words(out):
    assert says(figures.tokens_in_memory({"kept": 8e6, "logits": 2e6}, 80e9).alt, "10,000", "tokens", "40,000")
    blocks = {"plain order": [3, 7], "zigzag": [5, 5]}
    assert says(figures.blocks_by_rank(blocks, blocks).alt, "3", "7", "zigzag", "5", "5")
    lines = {"kv = a": {"ring": {2: 3.0, 4: 4.5}, "Ulysses": {2: 2.0, 4: 1.5}}}
    counted = {"kv = a": {"ring": 3.01, "Ulysses": 2.01}}
    assert says(
        figures.sent_by_ranks(lines | {"b": lines["kv = a"]}, counted | {"b": counted["kv = a"]}, 2).alt,
        "=",
        "ring",
        "3.00",
        "2",
        "4.50",
        "4",
    )
    links = {link: {"ring": [2.0, 1.0, 1.0], "Ulysses": [1.5, 1.2, 1.1]} for link in ("fast", "slow")}
    assert says(figures.attention_on_links([8192, 16_384, 32_768], links).alt, "Ulysses", "1.50", "1.10")
    wrong = figures.wrong_at_cuts({"right": 1e-7, "no\nlabels": 0.5}, {"right": 6.0, "no\nlabels": 6.1}).alt
    assert says(wrong, "1.0e-07", "6.000", "labels", "5.0e-01", "6.100")
    peaks = {1: 200e6, 2: 110e6}
    assert says(figures.loss_in_chunks({"ours": peaks}, peaks).alt, "ours", "200", "MB", "1", "110", "MB", "2")
    parts = (50e9, 20e9, 9e9)  # of logits and a layer the larger one counts
    assert "all of it 70" in figures.remedies_for_length({"all\nof it": parts}, 80e9).alt
    assert len(list((out / "figures").iterdir())) == 7


def test_pictures_of_experts_tell_their_numbers_in_words(out):
    told = figures.dropped_tokens({1.0: 0.19, 2.0: 0.0}, {1.0: 3.1, 2.0: 3.0}, 3.0).alt
    assert says(told, "1", "19", "dropped", "3.10")
    busy = {"early": [0.001, 0.004], "late": [0.002, 0.0025]}
    assert says(figures.who_waits_for_experts(busy, busy).alt, "early", "1.0", "4.0", "2.0", "2.5")
    told = figures.loads_over_time({"plain": [[4, 0]] * 40, "bias": [[2, 2]] * 40}, {"plain": [2.0] * 40}).alt
    assert says(told, "plain", "2.00")
    told = figures.rows_between_nodes({"a, b": 12.0}, {"a, b": 12.5}).alt
    assert says(told, "MB", "12.0")
    told = figures.groups_of_experts([[0, 1], [2, 3]], [[0, 1, 2, 3]], [[0]], host=2).alt
    assert told == "2 tensor groups of 2, 1 expert groups of 4. Ranks 0, in bold, have the same experts."
    assert len(list((out / "figures").iterdir())) == 5


def test_pictures_of_two_nodes_tell_their_numbers_in_words(out):
    told = figures.ring_or_nodes(ranks_per_node=8).alt
    assert says(told, "1.875", "1", "2", "nodes")
    assert says(told, "1022", "140", "64")
    told = figures.who_waits({"healthy": ([20, 20], [70, 71]), "a straggler": ([20, 80], [130, 70])}).alt
    assert says(told, "straggler", "20", "80", "130", "70")
    assert says(figures.does_a_node_pay({"one": (0.2, 0.0), "two": (0.1, 1.1)}).alt, "0.20", "1.20")
    assert len(list((out / "figures").iterdir())) == 3


def test_a_step_of_several_nodes_ends_when_computing_and_all_reduce_have(out):
    told = figures.more_nodes(2, 0.3, {"slow": 0.5, "quick": 0.1}).alt
    # the all-reduce begins after a third of 0.3 s; one node takes 0.6 s for as many samples
    assert says(told, "steps", "0.60", "0.60", "1.0", "0.30", "2.0")


CHAPTERS = ("pipeline_parallel", "pipelines_without_bubbles", "megatron_mlp")


@pytest.fixture
def drawn(monkeypatch):
    """Of the pictures of pipelines and of Megatron's MLP: the figures themselves, by the pictures' names."""
    kept = {}
    for name in (*(f"book.chapters.{chapter}.figures" for chapter in CHAPTERS), "draw.charts"):
        module = importlib.import_module(f"pardemo.{name}")
        monkeypatch.setattr(module, "save", lambda fig, name, alt: kept.update({name: fig}) or alt)
    return kept


def test_stages_of_a_cut_compute_or_wait_until_the_slowest_is_done(drawn):
    names = ["embedding", *["block"] * 3, "norm", "output"]
    told = figures.lengths_of_stages({"by layers": [2, 1, 4.5], "even": [3, 2, 2.5]}, {"by layers": [3, 1, 2],
                                     "even": [4, 0, 2]}, names)  # fmt: skip
    assert says(told, "layers", "2.0", "1.0", "4.5", "3.0", "2.0", "2.5")
    first, second = drawn["pipeline_parallel_stages"].axes
    labels = [tick.get_text() for tick in first.get_yticklabels()]
    assert labels == ["embedding, 2 blocks", "block", "norm, output"]
    for ax, slowest in ((first, 4.5), (second, 3)):
        ends = [bar.get_x() + bar.get_width() for bar in ax.patches]
        assert ends[3:] == [slowest] * 3, "with what it waits"
    assert [bar.get_width() for bar in first.patches] == [2, 1, 4.5, 2.5, 3.5, 0]


def test_what_does_not_fit_beside_the_states_crosses_the_line(drawn):
    states = {"parameters": 4e9, "gradients": 4e9, "optimizer states": 24e9}
    told = figures.memory_of_schedules(states, {"a": 60e9, "b": 40e9}, {"a": 0.25, "b": 0.5}, 80e9)
    assert says(told, "32", "GB", "92", "72", "60.0", "25.0%", "40.0", "50.0%")
    (ax,) = drawn["pipeline_parallel_on_a_gpu"].axes
    (room,) = ax.lines
    ends = [bar.get_x() + bar.get_width() for bar in ax.patches[-2:]]
    assert ends == [92, 72]
    assert ends[0] > room.get_xdata()[0] == 80 > ends[1]


def test_courses_mark_when_all_would_be_done_without_messages(drawn):
    spans = [Span(rank, "forward", f"{rank}.0", rank, rank + 0.5) for rank in (0, 1)]
    figures.courses({"a": (spans, 1), "b": (spans, 1)}, "02_test", "two courses", at_once_s=1.25)
    figures.courses({"a": (spans, 1)}, "02_plain", "a course")
    assert [line.get_xdata()[0] for ax in drawn["02_test"].axes for line in ax.lines] == [1250, 1250]
    assert not drawn["02_plain"].axes[0].lines


def test_the_two_of_a_pair_lie_one_above_the_other(drawn):
    spans = [
        Span(0, "forward", "0.0", 0, 1), Span(0, "forward", "1.1", 1, 4), Span(0, "backward", "0.0", 1, 4),
        Span(1, "forward", "1.0", 1, 4),
    ]  # fmt: skip
    figures.courses({"a": (spans, 2)}, "02_pairs", "a pair")
    (ax,) = drawn["02_pairs"].axes
    boxes = [collection.get_paths()[0].get_extents() for collection in ax.collections]
    idle, boxes = boxes[:2], boxes[2:]  # a row of grey for each rank
    assert len(idle) == 2
    places = [(box.x0, box.x1, round(box.y0, 2), round(box.y1, 2)) for box in boxes]
    assert places == [
        (0, 1000, -0.4, 0.4), (1000, 4000, -0.4, 0), (1000, 4000, 0, 0.4), (1000, 4000, 0.6, 1.4),
    ]  # fmt: skip


def test_two_bubbles_has_points_for_timetables_and_lines_for_formulas(drawn):
    panels = {"even": ({"put off": {2: 2, 3: 4}, "whole": {2: 4, 3: 8}}, {"one": {2: 2, 3: 4}, "other": {2: 3, 3: 7}})}
    told = figures.two_bubbles(panels)
    assert says(told, "=", "3", "4.0", "whole", "8.0", "4.0", "7.0")
    (ax,) = drawn["pipelines_without_bubbles_formulas"].axes
    one, other, put_off, whole = ax.lines
    assert list(one.get_ydata()) == list(put_off.get_ydata()) == [2, 4]
    assert (list(other.get_ydata()), list(whole.get_ydata())) == ([3, 7], [4, 8])
    assert [line.get_linestyle() for line in ax.lines] == ["-", "--", "None", "None"]


def test_without_f_each_point_is_a_number_over_the_right_one(drawn):
    z, right, wrong = torch.arange(3.0), torch.tensor([1.0, -2, 3]), torch.tensor([0.5, 1, 1])
    assert figures.without_f({"Z": (z, z), "dX": (right, wrong)}, "rank 0")
    first, second = drawn["megatron_mlp_without_f"].axes
    assert second.collections[0].get_offsets().tolist() == [[1, 0.5], [-2, 1], [3, 1]]
    assert all(x == y for x, y in first.collections[0].get_offsets().tolist())
    assert first.get_xlim() == first.get_ylim()


def test_what_a_head_changes_is_counted_by_feature(out):
    told = figures.changed_features({"before B": [0, 0, 0.1, 0.2], "Z": [0.3, 0.1, 0.2, 0.1]}, 2).alt
    assert says(told, "before", "2", "4", "4", "4")


def test_parts_of_a_gradient_add_up_to_the_diamond(out):
    parts, whole = [[2.0, -1.0], [-0.5, -1.0]], [1.5, -2.0]
    assert says(figures.parts_of_gradient(parts, whole, [0.36, 0.96]).alt, "rank", "0", "36%", "1", "96%")


def test_layouts_are_shown_with_what_they_add_and_how_they_split_the_gpus(out):
    cases = {"8B, 8 H100": ("llama3-8b", "H100", 8, 50), "70B, slow": ("llama3-70b", "H100", 64, 3.125)}
    chosen = {name: choose(job_of(*case), 256) for name, case in cases.items()}
    text = figures.chosen_layouts(chosen).alt
    assert "8B, 8 H100: DP8 zero2 1×32, adds 0%; 70B, slow: PP" in text or "70B, slow: TP" in text
    text = figures.kinds_of_layouts(candidates(job_of("llama3-8b", "H100", 8, 50), 256), "8B, 8 H100").alt
    assert says(text, "8B", "8", "H100", "multiplications")
    assert "ZeRO-1, recomputed 34 %" in text
    assert text.endswith("The rule takes ZeRO-2.")


def test_pictures_of_traffic_tell_their_numbers_in_words(out):
    added = {T: zero_traffic.added(T, 16) for T in (1655, 3310)}
    assert added[1655]["ZeRO-3"] == pytest.approx(1, rel=0.01)  # r = 2
    assert added[3310] == pytest.approx({"ZeRO-1": 1 / 48, "ZeRO-2": 1 / 48, "ZeRO-3": 0}, abs=1e-3)  # r = 1
    assert says(figures.added_by_tokens(added, 16).alt, "ZeRO-2", "ZeRO-3", "100")
    steps = {"fast": {"ZeRO-1": 9.0, "HSDP": 8.6}, "slow": {"ZeRO-1": 17.2, "HSDP": 15.2}}
    told = figures.memory_and_steps({"ZeRO-1": 60.8e9, "HSDP": 27.8e9}, steps, 8.6).alt
    assert says(told, "60.8", "27.8", "8.6", "fast", "slow", "ZeRO-1", "17.2", "15.2")
    assert {file.stem for file in (out / "figures").iterdir()} == {
        "zero_communication_added",
        "zero_communication_which",
    }


def test_a_measured_script_is_told_in_multiples_of_its_formula(out):
    sums, logits = {"as it came": 12e6, "both mended": 6e6}, {"as it came": 6e6, "both mended": 0.0}
    told = figures.sent_by_line(sums, logits, 6e6).alt
    assert says(told, "12.00", "6.00", "3.00", "formula", "6.00", "0.00", "1.00")
    kinds = {"as it came": {"parameters": 4e6, "gathered": 4e6, "temporaries": 1e6}, "both mended": {"parameters": 4e6}}
    told = figures.held_at_the_peak(kinds).alt
    assert says(told, "9.0", "parameters", "4.0", "4.0", "4.0")
    parts = {"here": {"waits for bytes": 0.2, "computes": 0.1, "waits for ranks": 0.05}}
    told = figures.step_by_parts(parts, {"here": 0.25}).alt
    assert says(told, "200", "computes", "100", "50")
    told = figures.steps_on_gpus({"slow": {"as it came": (0.5, 1.0, 2.0), "both mended": (0.5, 0.25, 0)}}).alt
    assert says(told, "3.50", "mended", "0.75")
    assert says(
        figures.two_losses({"right": [3.0, 2.0], "alone": [3.0, 2.5]}).alt, "right", "3.000", "2.000", "3.000", "2.500"
    )
    assert len(list((out / "figures").iterdir())) == 5


def test_versions_of_a_script_are_told_by_what_is_wrong(out):
    losses = {"monday": [2.0, 1.0] * 20, "wednesday": [2.0, 1.0] * 20}
    assert figures.four_curves(losses).alt == "Losses of the last 20 steps, on average: monday 1.500, wednesday 1.500."
    told = figures.gaps_beside_noise({"monday": 1e-7, "tuesday": 0.02, "thursday": 0.001}, 0.25).alt
    assert says(told, "Monday", "1e-07", "0.02", "Thursday", "0.001", "0.25")
    right, half, other = (1.0, 0.0), (0.5, 0.0), (0.9, 0.3)
    versions = {
        "monday": {"a.weight": half, "a.bias": half, "b.weight": half},
        "faulty\nnorm": {"a.weight": right, "a.bias": other, "b.weight": right},
    }
    told = figures.map_of_modules(versions).alt
    assert told == "Modules with wrong gradients, of 2: monday: 2; faulty norm: 1."
    drawn = (out / "figures" / "is_it_right_map.svg").read_text()
    assert drawn.count("× 0.5") == 2
    told = figures.bug_beside_rounding({"fp32": 1e-7, "fp64": 1e-16}, {"fp32": 2e-5, "fp64": 2e-5}).alt
    assert says(told, "fp32", "1e-07", "fp64", "1e-16", "2e-05", "2e-05")
    assert len(list((out / "figures").iterdir())) == 4


def bar(name, begin_ms, end_ms, kind="cpu_op"):
    return Bar(name, kind, "thread 1", begin_ms / 1e3, end_ms / 1e3)


def test_pictures_of_a_trace_tell_their_numbers_in_words(out):
    sums = [bar("gloo:all_reduce", 30, 60, "user_annotation"), bar("gloo:all_reduce", 60, 70, "user_annotation")]
    work = [bar("backward", 0, 72, "user_annotation"), bar("aten::mm", 5, 40), bar("aten::mul", 45, 50)]
    told = figures.lanes_of_a_step([*work, *sums]).alt
    assert told == "A rank's step of 72 ms: 2 operators, of them 1 matmuls; 2 all-reduces."
    told = figures.exposed_parts({"two": [*work, *sums]}).alt
    assert told == "two: 2 all-reduces, 25 ms exposed.", "from 40 to 45 and from 50 to 70"
    late = [one._replace(begin_s=one.begin_s + 0.02) for one in sums[:1]]
    told = figures.late_rank({0: [*work, sums[0]], 1: [*work, *late]}).alt
    assert told == "Two ranks on one clock; the first all-reduce's bar is on rank 0 30 ms, on rank 1 10 ms."
    told = figures.own_times({"aten::mm": 0.03, "backward": 0.01}, {"aten::mm": 0.03, "backward": 0.07}).alt
    assert told == "Own time by name, ms: mm 30.0, backward 10.0."
    phases = [bar("ProfilerStep#5", 0, 100, "user_annotation"), bar("## backward ##", 0, 80, "user_annotation")]
    kernels = [bar("gemm", 10, 40, "kernel"), bar("ncclKernel_Sum", 30, 60, "kernel"), bar("late", 110, 120, "kernel")]
    told = figures.step_of_a_gpu([*phases, *kernels], "ProfilerStep#5").alt
    assert told == "A step of 100 ms on a GPU: 1 kernels with gaps; 1 of nccl's, of which 20 ms are exposed."


def test_pictures_of_optimizers_tell_their_numbers_in_words(out):
    two = {"Adam": 8.0, "Muon": 4.4}
    assert says(figures.kept_per_parameter(two, two, {"Adam": 64.0, "Muon": 36.0}).alt, "Adam", "8", "64", "GB")
    assert says(
        figures.singular_values([[0.9, 0.01], [1.1, 0.7]], (0.7, 1.2)).alt, "0.01", "0.9", "before", "0.7", "1.1"
    )
    assert "2 ranks 65%" in figures.rows_alone([1.0], {2: [1.2], 8: [1.5]}, {2: 0.65, 8: 0.9}).alt
    each = {"square": (0.75, 0.75, 0.75)}
    told = figures.sent_by_products(each, each, {"square": 0.375}).alt
    assert says(told, "square", "11.25", "once", "square", "0.38")
    assert "HSDP 4.0 + 0.0" in figures.across_hosts({"HSDP": (4.0, 0.0)}, {"HSDP": (4.0, 0.0)}).alt
    told = figures.training({"Adam": [3.0] * 9, "Muon": [2.0] * 9}, {"Adam": 2.0, "Muon": 12.0}).alt
    assert says(told, "3.00", "2", "Muon", "2.00", "12")
    assert len(list((out / "figures").iterdir())) == 6


def test_pictures_of_what_hides_tell_their_numbers_in_words(out):
    told = figures.over_pieces({1: 0.3, 2: 0.23, 4: 0.2}, {1: 0.31, 4: 0.21}, 0.16).alt
    assert told == "Milliseconds by number of pieces, measured: 1: 310, 4: 210; the line is the law."
    seconds, law = {"ring": 0.084, "all-gather first": 0.12}, {"ring": 0.08, "all-gather first": 0.11}
    told = figures.ways(seconds, law, dict.fromkeys(seconds, 0.08), "ring").alt
    assert told == "Milliseconds: ring 84, predicted 80; all-gather first 120, predicted 110."
    told = figures.prefetched({0: 0.5, 1: 0.34}, {0: 0.52, 1: 0.33}, {0: 4.5, 1: 6.0}).alt
    assert says(told, "0", "500", "4.5", "MiB", "1", "340", "6.0", "MiB")
    spans = [Span(0, "compute", "backward", 0, 0.1), Span(0, "communication", "", 0.05, 0.12)]
    told = figures.ddp_passes({2: spans, 25: spans}, {2: 0.12, 25: 0.12}, {2: 0.71, 25: 0.0}).alt
    assert told == "DDP's backward pass with buckets of 2 MiB: 71% hidden; 25 MiB: 0% hidden."
    assert len(list((out / "figures").iterdir())) == 4


def test_pictures_of_failures_tell_their_numbers_in_words(out):
    told = figures.hours_between_failures({16384: 3 * 3600.0}, 3 * 3600.0 * 16384).alt
    assert told == "Hours between failures by GPUs; published 3.0 at 16,384; the line is 1/N."
    told = figures.goodput_by_interval({0.1: 0.5, 0.2: 0.6, 0.4: 0.55}, 0.04, 0.8, 0.1).alt
    assert told == "Goodput by interval, measured: 0.1 s: 0.50, 0.2 s: 0.60, 0.4 s: 0.55; Young's interval is 0.25 s."
    spans = [Span(0, "compute", "", 0, 0.04), Span(0, "wait", "", 0.04, 0.1), Span(0, "send", "", 0.04, 0.1)]
    told = figures.held_up({"write at once": spans, "copy": spans[:2]}).alt
    assert told == "What the training waits for, for each way to save: write at once: 60 ms; copy: 60 ms."
    told = figures.resumed_without({"schedule": [1.0, 1.001], "batches": [1.2, 1.1]}, [1.0, 1.0], 15).alt
    assert told == "Losses after a resume; largest differences: schedule 0.001, batches 0.2."
    assert len(list((out / "figures").iterdir())) == 4
