"""The page of ``pardemo measure --out``, its drawings, and those of a terminal."""

import json
import re
from html.parser import HTMLParser
from itertools import combinations

import pytest
import svgs
from conftest import says

from pardemo import cli, project
from pardemo.draw import palette
from pardemo.meters.snapshot import Block
from pardemo.script import blocks
from pardemo.script.report import drawings, sections
from pardemo.script.runtime.call_sites import CallSite
from pardemo.script.runtime.collectives import Call
from pardemo.script.runtime.steps import StepEnd
from pardemo.script.step import summary
from pardemo.script.step.group_kinds import groups_by_kind
from pardemo.script.step.parallelism import CutOptions, Fsdp2Options, Parallelism
from pardemo.script.step.rank_trace import RankTrace, RecordedMemory
from pardemo.script.step.script_memory import memory_timeline
from pardemo.tables import amount

MB = 1_000_000
SECTIONS = [
    "Findings",
    "What is running",
    "Bytes a step",
    "Memory",
    "Time",
    "What ran in another way",
    "Beside this page",
]
FORWARD = CallSite("train.py:12", "<b>layers</b>", "forward")
BLOCKS = [
    Block(4 * MB, "parameters", "train.py:5", "", 0, None),
    Block(3 * MB, "activations", "train.py:12", "<b>layers</b>", 1, 5, "forward"),
    Block(2 * MB, "gathered", "train.py:12", "<b>layers</b>", 2, 3, "forward"),
    Block(4 * MB, "gradients", "train.py:14", "", 4, None, "backward"),
    Block(1 * MB, "temporaries", "train.py:15", "", 6, 7, "step"),
]


def seen_by(rank, parallelisms=(), world=(0, 1), wire=True):
    """Three steps of a second after three of two; in each one a collective of 0.2 s, for which rank 0 comes last."""
    cuts = [StepEnd(2.0 * n if n < 3 else 1.0 + n, 0.5 * n, 1, (), 100 * n, 100 * n) for n in range(6)]
    calls = []
    for number, step in enumerate(range(3, 6)):
        begin = cuts[step - 1].at_s + (0.3 if rank == 0 else 0.2)
        calls.append(
            Call("all-reduce", world, number, "0", 1000, (10, 25), "float32", *FORWARD[:3], step, begin,
                 end_s=cuts[step - 1].at_s + 0.5, site=FORWARD, sent=50.0, gloo_bytes=50.0, shapes=((10, 25),))
        )  # fmt: skip
    kinds = {"parameters": 4 * MB, "activations": 3 * MB, "gradients": 4 * MB}
    largest = [
        {
            "kind": "activations", "bytes": 3 * MB, "shape": (3, 250_000), "dtype": "float32", "line": "train.py:12",
            "module": "<b>layers</b>",
        }
    ]  # fmt: skip
    memory = RecordedMemory(11 * MB, kinds, "train.py:14", largest, BLOCKS)
    model = {
        "classes": ["<i>Model</i>"], "parameters": MB, "frozen": 0, "dtypes": {"float32": MB}, "tied": [],
        "recomputed": [], "computed_in": [], "vocabularies": [],
    }  # fmt: skip
    notes = ["<script>alert(1)</script>"]
    return RankTrace(rank, "enough", cuts, calls, [], list(parallelisms), model, notes, memory, wire, "gloo")


def made(ranks=2, parallelisms=(), hosts=1, wire=True):
    """A summary, what its ranks saw, and the page."""
    seen = [seen_by(rank, parallelisms, tuple(range(ranks)), wire) for rank in range(ranks)]
    measured = summary.summarize(seen)
    measured.hosts = hosts
    measured.findings.append(summary.StepFinding('gathered twice: <img src="x">', "train.py:12", 3000))
    return measured, seen, sections.summary_page(measured, seen, "train.py")


def of(kind, *groups_of, replicas=()):
    options = Fsdp2Options(replicas=replicas) if replicas else CutOptions()
    return [Parallelism(kind, ranks, ("model",), {"model": 4 * MB}, options) for ranks in groups_of]


def grid(tensor, data):
    """Ranks under tensor parallelism, which lie beside one another, and FSDP2, of which one is in each."""
    ranks = range(tensor * data)
    return [
        *of("FSDP2", *(tuple(ranks[first::tensor]) for first in range(tensor))),
        *of("TP", *(tuple(ranks[begin : begin + tensor]) for begin in ranks[::tensor])),
    ]


WORLDS = {
    "one rank": lambda: made(1, of("DDP", (0,))),
    "two ranks": lambda: made(2, of("DDP", (0, 1))),
    "no parallelism": lambda: made(2),
    "no counts of the kernel": lambda: made(2, of("DDP", (0, 1)), wire=False),
    "FSDP2 and TP": lambda: made(4, grid(2, 2)),
    "HSDP on two hosts": lambda: made(
        8, of("HSDP", (0, 1, 2, 3), (4, 5, 6, 7), replicas=tuple((n, n + 4) for n in range(4))), hosts=2
    ),
    "DeepSpeed on three hosts": lambda: made(12, of("DeepSpeed ZeRO-3", tuple(range(12))), hosts=3),
    "64 ranks": lambda: made(64, grid(8, 8), hosts=8),
    "64 ranks on a host": lambda: made(64, grid(4, 16)),
}


@pytest.fixture(scope="module", params=WORLDS)
def world(request):
    return request.param, *WORLDS[request.param]()


class Tags(HTMLParser):
    """The elements of a page, its text, and its visible headings."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.attributes, self.headings, self.open, self.text = [], [], [], [], ""
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "rect", "path", "polyline", "polygon"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def pictures(source):
    """The page's drawings; areas of many columns are no boxes, and are left out."""
    source = re.sub(r'<path d="[^"]*[HV][^"]*"[^>]*/>', "", source)
    return [svgs.Svg(one) for one in re.findall(r"<svg .*?</svg>", source, flags=re.S)]


def test_each_section_in_its_order_and_every_element_closed(world):
    _, measured, _, source = world
    tags = Tags(source)
    assert tags.headings == SECTIONS
    assert tags.open == []
    assert f"{sections.summary_head(measured, 'train.py')}." in source


def test_nothing_is_loaded_and_nothing_of_a_script_is_markup(world):
    _, _, _, source = world
    tags = Tags(source)
    assert {"script", "link", "img", "iframe", "b", "i"} & set(tags.tags) <= {"b", "i"}, "of ours"
    assert not {name for name, _ in tags.attributes} & {"src", "onload", "srcset"}
    assert not re.search(r"url\(|@import|https?:", source)
    assert "<b>layers</b>" not in source
    assert "&lt;b&gt;layers&lt;/b&gt;" in source
    assert "<i>Model</i>" not in source
    assert "<script>" not in source
    assert '<img src="x">' not in source


def test_texts_of_drawings_are_large_enough_and_lie_on_nothing(world):
    name, _, _, source = world
    there = pictures(source)
    assert len(there) >= 2
    for svg in there:
        whole = svgs.Box(0, 0, svg.width, svg.height, "none")
        assert svg.width == 640
        assert svg.alt
        assert min(one.size for one in svg.texts) >= 18
        assert [one.text for one in svg.texts if not whole.holds(one, 1)] == [], name
        assert [(a.text, b.text) for a, b in combinations(svg.texts, 2) if a.meets(b)] == [], name


def test_groups_are_drawn_with_each_rank_in_its_own():
    measured, _, source = made(4, grid(2, 2), hosts=2)
    kinds = groups_by_kind(measured.parallelism)
    assert [(kind.name, kind.groups, kind.letters) for kind in kinds] == [
        ("TP", ((0, 1), (2, 3)), ("a", "b")),
        ("FSDP2", ((0, 2), (1, 3)), ("c", "d")),
    ]
    assert shown(kinds, 4, 2) == ["rank 0 1 2 3", "node 0 0 1 1", "TP a a b b", "FSDP2 c d c d"]
    cells = re.findall(r"<mark[^>]*#(\w+);[^>]*>(\w+)</mark>", source)
    assert [letter for _, letter in cells] == [*"aabb", *"cdcd"]
    assert len(set(cells)) == 4, "each group has its colour"


def shown(kinds, ranks, hosts=1):
    """The groups' table as words."""
    (table,) = sections.groups(kinds, ranks, hosts)
    return [" ".join(line.split()) for line in table.screen(blocks.WIDE)]


def test_groups_that_share_a_rank_stand_in_rows_of_their_own():
    """Two models under DDP, the second over some ranks of the first; a rank is in none of its groups."""
    near, far = groups_by_kind(of("DDP", (0, 1, 2), (1, 2)))
    assert (near.groups, far.groups) == (((1, 2),), ((0, 1, 2),))
    assert (near.letter_of(0), near.letter_of(1), far.letter_of(0)) == ("", "a", "b")
    assert shown([near, far], 3)[1] == "DDP · a a"


def test_a_terminal_has_the_groups_only_where_they_say_more_than_a_line():
    assert "a  a" not in sections.summary_screen(made(2, of("DDP", (0, 1)))[0], "train.py")
    screen = sections.summary_screen(made(8, grid(4, 2), hosts=2)[0], "train.py")
    assert says(screen, "TP", "2", "groups", "4", "4.00", "MB")
    assert says(screen, "train.py", "8", "2")
    wide = sections.groups(groups_by_kind(grid(8, 8)), 64, 8)
    lines = [line for table in wide for line in table.screen(blocks.WIDE)]
    assert (len(wide), len(lines)) == (2, 8)
    assert max(map(len, lines)) <= blocks.WIDE


def test_the_screen_is_one_screen(world):
    name, measured, _, _ = world
    lines = sections.summary_screen(measured, "train.py").splitlines()
    assert max(map(len, lines)) <= blocks.WIDE
    assert len(lines) <= 60 or "64" in name


def test_json_has_every_group_with_its_ranks():
    told = json.loads(json.dumps(WORLDS["HSDP on two hosts"]()[0].as_json()))
    assert told["hosts"] == 2
    assert told["groups"] == [
        {"kind": "HSDP shards", "groups": [[0, 1, 2, 3], [4, 5, 6, 7]]},
        {"kind": "HSDP replicas", "groups": [[0, 4], [1, 5], [2, 6], [3, 7]]},
    ]


def test_memory_from_change_to_change():
    of_blocks = memory_timeline(BLOCKS)
    assert of_blocks.peak_bytes == 11 * MB
    assert {k: n for k, n in of_blocks.columns[of_blocks.peak_column].items() if n} == {
        "parameters": 4 * MB, "activations": 3 * MB, "gradients": 4 * MB,
    }  # fmt: skip
    assert [phase for phase, _, _ in of_blocks.phases] == ["forward", "backward", "step"]
    few = memory_timeline(BLOCKS, columns=2)
    assert [sum(column.values()) for column in few.columns] == [9 * MB, 11 * MB], "the fullest moment of each"
    assert memory_timeline([]).columns == []
    picture = drawings.memory(of_blocks, "train.py:14")
    assert says(picture, "11.0", "MB", "train.py:14")


def test_time_is_drawn_as_it_was_measured():
    measured, seen, source = made(2, of("DDP", (0, 1)))
    first, second = measured.time
    assert (first.step_s, first.compute_s, first.idle_s) == (1.0, 0.5, 0.0)
    assert second.idle_s == pytest.approx(0.1), "it came a tenth of a second before rank 0"
    for bar in re.findall('class="bar">(.*?)</div>', source):
        width = {colour: float(share) for share, colour in re.findall(r"width: ([\d.]+)%; background: (#\w+)", bar)}
        parts = width[palette.DONE["communication"]] / width[palette.COMPUTED]
        assert parts == pytest.approx(first.exposed_s / first.compute_s, rel=0.02)
    step = next(svg for svg in pictures(source) if svg.alt.startswith("One step"))
    late = step.filled(palette.DONE["idle"])
    whole = step.filled(palette.COMPUTED)
    assert len(late) == 1
    assert len(whole) == 2
    assert late[0].y == whole[1].y, "rank 1 waits"
    assert (late[0].right - late[0].x) / (whole[1].right - whole[1].x) == pytest.approx(0.1, rel=0.02)


def test_a_receiver_waits_for_its_sender_until_it_sends_and_for_bytes_from_then_on():
    """Rank 1 stands still from 0.1 s of each step to 0.8 s; the message is sent at 0.5 s."""
    seen = [seen_by(rank) for rank in range(2)]
    for one in seen:
        one.calls.clear()
        for number, step in enumerate(range(3, 6)):
            begin = one.cuts[step - 1].at_s + (0.5 if one.rank == 0 else 0.1)
            kind = "send" if one.rank == 0 else "receive"
            one.calls.append(
                Call(kind, (0, 1), number, "0", 9, (9,), "float32", *FORWARD[:3], step, begin, site=FORWARD, sent=9.0,
                     gloo_bytes=9.0)
            )  # fmt: skip
            if one.rank == 1:
                one.waits.append((begin, begin + 0.7))
    first, second = summary.summarize(seen).time
    assert first.idle_s == first.exposed_s == 0.0
    assert second.idle_s == pytest.approx(0.4)
    assert second.exposed_s == pytest.approx(0.1)  # half of the step was computed: no more was stood still


def test_a_bar_of_characters_ends_where_its_seconds_do():
    measured, _, _ = made(2, of("DDP", (0, 1)))
    bars = [line.rsplit(None, 1)[-1] for line in sections.summary_screen(measured, "x").splitlines() if "█" in line][1:]
    for bar, one in zip(bars, measured.time, strict=True):
        assert len(bar) == blocks.BAR
        assert bar.count("█") == round(blocks.BAR * one.compute_s / one.step_s)
        assert bar.count("░") == round(blocks.BAR * one.idle_s / one.step_s)


def test_a_reckoned_step_and_a_planned_memory_stand_on_the_page_and_say_what_they_are():
    measured, seen, plain = made(2, of("DDP", (0, 1)))
    assert "On H100" not in plain
    times = [summary.Times(rank, 0.25, 0.125, 0.0625, 0.03, 0.0, 0.0625) for rank in range(2)]
    measured.paced = summary.PacedStep("H100", "450 GB/s <a GPU>", times, 0.1875, ["no time for data"])
    measured.memory["full_size"] = {
        "model": "llama3-8b", "gpus": 64, "layout": "DP64", "peak_bytes": 20 * 10**9, "why_not": "",
        "kinds": {"parameters": 16 * 10**9}, "measured": {"parameters": {"peak": 4000, "most": 5000}},
        "taken_over": ["AdamW"], "assumed": ["fused attention"], "command": "pardemo plan --explain dp=64",
    }  # fmt: skip
    source = sections.summary_page(measured, seen, "train.py")
    words = re.sub(r"<[^>]+>|\s+", " ", source).replace("\N{NO-BREAK SPACE}", " ")
    headings = Tags(source).headings
    assert headings.index("On H100") == headings.index("Time") + 1
    assert "Reckoned, not run:" in words
    assert says(words, "250.00", "187.50", "communication")
    assert "&lt;a GPU&gt;" in source
    assert says(words, "assumed", "time")
    assert says(words, "llama3-8b", "64", "GPUs", "DP64", "20.0", "GB", "GPU")
    assert re.search(r"parameters +4.00 kB +5.00 kB +16.0 GB", words)
    measured.memory["full_size"] |= {"peak_bytes": None, "why_not": "frozen parameters have no counterpart"}
    assert says(sections.summary_page(measured, seen, "train.py"), "parameters", "counterpart")


def test_out_writes_the_page_of_a_script_on_two_hosts(tmp_path, capsys):
    script = str(project.root() / "tests" / "scripts" / "hsdp.py")
    asked = ["measure", "--cluster", "2x2", "--steps", "1", "--json", "--out", str(tmp_path), "--", script]
    for left in ("standstill.json", "memory_rank7.pickle"):
        (tmp_path / left).write_text("an earlier run's")
    assert cli.main(asked) == 0
    assert not {"standstill.json", "memory_rank7.pickle"} & {path.name for path in tmp_path.iterdir()}
    told = json.loads(capsys.readouterr().out)
    assert [kind["kind"] for kind in told["groups"]] == ["HSDP shards", "HSDP replicas"]
    assert sorted(rank for group in told["groups"][0]["groups"] for rank in group) == [0, 1, 2, 3]
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert Tags(source).headings == SECTIONS
    assert "<td>node</td><td>0</td>" in source
    assert f"peak {amount(told['memory']['peak_bytes'])} at hsdp.py:" in source, "as the course of its blocks says"
