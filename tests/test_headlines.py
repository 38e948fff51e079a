"""The data: the generated news, the converters, the seeded choice, the check; and every fault in what is read."""

import gzip
import hashlib
import json
import re
from collections import Counter

import pytest
from conftest import refused, says
from hypothesis import given
from hypothesis import strategies as st

from pardemo import cli, headlines, project
from pardemo.headlines import grammar, rows
from pardemo.headlines.build import LINES_LISTED, Limits, Selection

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 147000000\n"


def row(number, **changes):
    return {"instruction": "题", "input": f"正文{number}", "output": f"标题{number}", "source": "x"} | changes


# ---------------------------------------------------------------- the generated news


@pytest.fixture(scope="module")
def corpus():
    return headlines.corpus(train=20000, test=1000, seed=0, style="plain")


def test_twenty_thousand_distinct_pairs_and_none_in_both(corpus):
    train, test = corpus
    assert (len(train), len(test)) == (20000, 1000)
    for field in ("input", "output"):
        assert len({r[field] for r in train + test}) == 21000, f"no {field} twice"
    assert len({rows.key_of(r["input"]) for r in train + test}) == 21000
    assert Counter(r["source"] for r in train) == {"generated/seen": 20000}
    assert Counter(r["source"] for r in test) == {"generated/seen": 500, "generated/unseen": 500}


def test_what_rows_are_made_of(corpus):
    train, test = corpus
    for r in train[:5000] + test:
        assert 60 <= len(r["input"]) <= 140
        assert 10 <= len(r["output"]) <= 22
        assert 2 <= r["input"].count("。") <= 4
        assert not re.search(r"[{}()|@「」『』]", r["input"] + r["output"]), "no mark of the grammar is left"
        assert r["input"].split("。")[0] != r["output"]
    for r in test:
        framed = re.search(r"负责人\w+介绍说，|举行的发布会上，|。上述消息由|本报\w+电，", r["input"])
        assert bool(framed) == r["source"].endswith("/unseen"), "sentence patterns that training does not have"
    events = {kind: [e for e in grammar.load_grammar().events if e.kind == kind] for kind in grammar.KINDS}
    assert not {n for e in events["seen"] for n in e.news} & {n for e in events["unseen"] for n in e.news}
    assert {e.section for e in events["unseen"]} < {e.section for e in events["seen"]}


def test_the_corpus_is_the_same_everywhere():
    """What any machine and Python must give; it changes with the grammar, and then data/ is rebuilt."""
    ours = hashlib.sha256(json.dumps(headlines.corpus(300, 100, 7)).encode()).hexdigest()
    assert ours == "1bf1fc60c71c16d7802469a6249c787be10fbda65f95a792479b55471c8e9d98"
    assert headlines.corpus(20, 10, 1) != headlines.corpus(20, 10, 2)


def test_fewer_rows_are_the_first_of_more(corpus):
    train, test = corpus
    assert headlines.corpus(50, 1000, 0, "plain") == (train[:50], test)
    assert [r["source"][10:] for r in headlines.generate(4, 0)] == ["seen", "unseen"] * 2
    assert {r["source"] for r in headlines.generate(20, 3, ("unseen",))} == {"generated/unseen"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: headlines.generate(1, 0, ("new",)), "kinds are some of seen, unseen, not new"),
        (lambda: headlines.generate(-1, 0), "0 or more, not -1 and 0"),
        (lambda: headlines.corpus(1, -1), "0 or more, not 1 and -1 and 1"),
        (lambda: headlines.corpus(1, 1, -1), "0 or more, not 1 and 1 and -1"),
        (lambda: headlines.corpus(1, 1, 1, "loud"), "styles are plain and section, not loud"),
        (lambda: headlines.build(["generated"], "nowhere", seed=0), "seed 0 made the news that the tiny model was"),
    ],
)
def test_what_generate_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ------------------------------------------------- what the fine-tune asks for, and the tiny model has not read


def test_the_tiny_model_has_read_no_row_and_no_form_of_the_fine_tunes_files():
    from itertools import islice

    import tiny_model as tiny

    read, _ = headlines.corpus(20000, 1000, grammar.PRETRAINED, "plain")
    known = {field: {r[field] for r in read} for field in ("input", "output")}
    for name in ("train", "test"):
        ours = headlines.read(project.root() / "data" / "headlines" / f"{name}.json")
        assert not known["input"] & {r["input"] for r in ours}
        plain = {"，".join(reversed(r["output"][4:].split("，"))) for r in ours}
        assert len(known["output"] & plain) <= len(ours) // 50, "few by chance, of short ones: a name, a post"
    pages = "\n".join(islice(tiny.pages(read, 0), 5000))
    sections = {e.section for e in grammar.load_grammar().events}
    assert not any(f"《{section}》" in pages for section in sections)
    assert not any(instruction in pages for instruction in grammar.INSTRUCTIONS.values())


def test_the_part_in_data_is_what_the_command_builds(tmp_path, capsys):
    assert cli.main(["data", "build", "--out", str(tmp_path), "--train", "2000", "--test", "200"]) == 0
    there = project.root() / "data" / "headlines"
    for name in ("train.json", "test.json", "manifest.json"):
        assert (tmp_path / name).read_bytes() == (there / name).read_bytes(), f"rebuild data/headlines: {name}"
    assert sum(f.stat().st_size for f in there.iterdir()) < 1.5e6
    manifest = json.loads((there / "manifest.json").read_text())
    for name, file in manifest["files"].items():
        assert file["sha256"] == hashlib.sha256((there / name).read_bytes()).hexdigest()
        assert file["rows"] == len(headlines.read(there / name)) == sum(file["by_source"].values())
    assert "generated/unseen" in capsys.readouterr().out


# ---------------------------------------------------------------- the real sources

#: Rows as the sources have them, in words of our own.
CSL = {
    "doc_id": 1, "title": "稻田水分的遥感估算",
    "abstract": "利用卫星影像估算稻田水分，并与实测值作了比较，误差在允许范围之内。",
    "keywords": ["遥感", "稻田"], "category": "农学", "category_eng": "Agriculture", "discipline": "作物学类",
    "discipline_eng": "Crops",
}  # fmt: skip
LCSTS = {"text": "城东的新桥昨天通车，从此两岸往来只要五分钟，渡船也将在月底停航。", "summary": "城东新桥通车"}
XLSUM = {
    "id": "a1", "url": "https://example.org/a1", "title": "渡船停航", "summary": "最后一班渡船在月底开出。",
    "text": "运行了四十年的渡船将在月底停航，最后一班免费搭乘，许多老船客赶来道别。",
}  # fmt: skip


def numbered(template, field, count):
    return [template | {field: f"{template[field]}第{k}则"} for k in range(count)]


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def data_build(origin, out, *options):
    return cli.main(["data", "build", "--from", str(origin), "--out", str(out), *options])


def lcsts(folder):
    write_lines(folder / "train.jsonl", numbered(LCSTS, "text", 3))


@pytest.fixture
def downloads(tmp_path):
    """The three data sets in a folder, small, under the names they are published with."""
    folder = tmp_path / "downloads"
    write_lines(folder / "csl/data/csl.jsonl.gz", numbered(CSL, "abstract", 90))
    for k, name in enumerate(("train", "valid", "test_public")):
        write_lines(folder / f"LCSTS/{name}.jsonl", numbered(LCSTS | {"text": f"{k}：" + LCSTS["text"]}, "text", 20))
    write_lines(folder / "xlsum/chinese_simplified_train.jsonl", numbered(XLSUM, "text", 20))
    english = XLSUM | {"title": "Ferry stops", "text": "After forty years the ferry stops at the end of the month."}
    write_lines(folder / "xlsum/english_val.jsonl", numbered(english, "text", 20))
    return folder


def test_all_sources_become_rows_without_overlap(downloads, tmp_path):
    manifest = headlines.build([str(downloads)], tmp_path / "a", train=150, test=40, seed=1)
    train, test = (headlines.read(tmp_path / "a" / f"{name}.json") for name in ("train", "test"))
    assert (len(train), len(test)) == (150, 40)
    assert len({rows.key_of(r["input"]) for r in train + test}) == 190
    assert {r["source"]: r["output"] for r in train + test} == {
        "csl/title": CSL["title"], "csl/keywords": "遥感；稻田", "csl/category": "农学", "lcsts/title": "城东新桥通车",
        "xlsum-en/title": "Ferry stops", "xlsum-zh/title": "渡船停航",
    }  # fmt: skip
    instructions = {r["source"]: r["instruction"] for r in train + test}
    assert instructions["xlsum-en/title"].isascii()
    assert len(set(instructions.values())) == 6, "each task is asked for in its own words"
    assert sum(entry["rows"] for entry in manifest["inputs"]) == 190
    for entry in manifest["inputs"]:
        assert entry["sha256"] == hashlib.sha256((tmp_path / entry["name"]).read_bytes()).hexdigest()
    assert manifest["files"]["test.json"]["by_source"] == Counter(r["source"] for r in test)


def test_a_seed_decides_and_nothing_else(downloads, tmp_path):
    def built(name, origins, **options):
        headlines.build([str(o) for o in origins], tmp_path / name, **({"train": 60, "test": 20} | options))
        return [(tmp_path / name / f"{part}.json").read_bytes() for part in ("train", "test")]

    first = built("a", [downloads])
    assert built("b", [downloads]) == first
    assert built("c", [downloads / "xlsum", downloads / "csl", downloads / "LCSTS"]) == first, "the order is no matter"
    assert built("d", [downloads], seed=5) != first
    assert built("e", [downloads], train=30)[1] == first[1], "the test rows do not depend on the number of others"
    assert built("f", [downloads], tasks=["category", "title", "keywords"]) == first


def test_tasks_and_sources_are_chosen(downloads, tmp_path):
    headlines.build([str(downloads)], tmp_path / "a", train=60, test=10, tasks=["category"], wanted=["csl"])
    assert {r["source"] for r in headlines.read(tmp_path / "a/train.json")} == {"csl/category"}
    manifest = headlines.build([str(downloads)], tmp_path / "b", train=20, test=5, wanted=["xlsum-en", "xlsum-zh"])
    assert {entry["source"] for entry in manifest["inputs"]} == {"xlsum-en", "xlsum-zh"}


def test_asking_for_more_than_there_is(downloads, tmp_path, capsys):
    assert data_build(downloads, tmp_path / "a", "--train", "400", "--test", "9") == 2
    assert says(capsys.readouterr().err, "409", "190", "distinct")
    assert not (tmp_path / "a").exists()


def test_duplicates_by_normalised_input_are_one_row(tmp_path):
    text = "Ｔｈｅ ferry stops 在月底停航，从此两岸往来只要五分钟。"
    same = [text, text.replace(" ", "\u3000 "), text.casefold(), text.replace("Ｔｈｅ", "THE")]
    records = [LCSTS | {"text": t} for t in same] + numbered(LCSTS, "text", 3)
    write_lines(tmp_path / "in/train.jsonl", records)
    manifest = headlines.build([str(tmp_path / "in")], tmp_path / "out", train=3, test=1)
    assert manifest["duplicates_of_chosen"] == 3
    with pytest.raises(ValueError, match=r"5.*4.*distinct"):
        headlines.build([str(tmp_path / "in")], tmp_path / "out", train=4, test=1)


def test_bad_rows_are_counted_by_reason_with_file_and_line(tmp_path, capsys):
    good = [json.dumps(r, ensure_ascii=False).encode() for r in numbered(LCSTS, "text", 6)]
    bad = {
        "broken JSON": good[0][:-5],
        "not UTF-8": good[0].decode().encode("gb18030"),
        "not an object": b"[1, 2]",
        "missing field summary": b'{"text": "' + "很长的一段正文".encode() * 5 + b'"}',
        "empty text": b'{"text": " ", "summary": "x"}',
        "summary is not text": b'{"text": "' + "很长的一段正文".encode() * 5 + b'", "summary": 3}',
        "text holds half a surrogate pair": b'{"text": "\\ud800", "summary": "x"}',
        "input not of 20 to 4000 characters": '{"text": "短", "summary": "短"}'.encode(),
    }
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(b"\n".join([good[0], *bad.values(), *good[1:], *[b"{"] * 99]) + b"\n")
    assert data_build(folder, tmp_path, "--train", "5", "--test", "1") == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    reasons = {entry["reason"]: (entry["file"], entry["count"], entry["first_lines"]) for entry in manifest["left_out"]}
    expected = {reason: ("in/train.jsonl", 1, [line]) for line, reason in enumerate(bad, start=2)}
    expected["broken JSON"] = ("in/train.jsonl", 100, [2, *range(15, 14 + LINES_LISTED)])
    assert reasons == expected, "all are counted, the first are told"
    assert says(capsys.readouterr().err, "in/train.jsonl", "1", "UTF-8", "3")
    assert manifest["inputs"][0]["rows"] == 113


def test_rows_outside_the_length_limits_are_counted(tmp_path):
    write_lines(tmp_path / "in/train.jsonl", numbered(LCSTS, "text", 6) + numbered(LCSTS, "summary", 2))
    limits = Limits(max_output=6)
    manifest = headlines.build([str(tmp_path / "in")], tmp_path / "out", train=5, test=1, limits=limits)
    (entry,) = manifest["left_out"]
    assert (entry["reason"], entry["count"], entry["first_lines"]) == ("output not of 2 to 6 characters", 2, [7, 8])
    assert {r["output"] for r in headlines.read(tmp_path / "out/train.json")} == {LCSTS["summary"]}
    assert manifest["limits"]["max_output"] == 6


@pytest.mark.parametrize("keep", [0.3, 0.99])
def test_a_truncated_download_is_said(downloads, tmp_path, keep, capsys):
    file = downloads / "csl/data/csl.jsonl.gz"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    assert data_build(file.parent, tmp_path / "a") == 2
    assert says(capsys.readouterr().err, "csl.jsonl.gz")
    file.write_bytes(content[:20] + bytes(8) + content[28:])
    with pytest.raises(ValueError, match="cut off or damaged"):
        headlines.build([str(file.parent)], tmp_path / "a")


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (None, {}, "neither a folder nor one of generated, neuclir/csl"),
        (lambda f: f.mkdir(), {}, "no .jsonl or .jsonl.gz file in"),
        (lambda f: write_lines(f / "train.jsonl", [{"a": 1}]), {}, "of none of the sources csl, lcsts.*: it has a"),
        (lambda f: write_lines(f / "french_train.jsonl", [XLSUM]), {}, "neither chinese_simplified nor english by its"),
        (lambda f: write_lines(f / "train.jsonl", ["text"]), {}, "no row among the first hundred"),
        (lambda f: f.write_text(POINTER), {}, "in is a git-lfs pointer, not the data: run `git lfs pull`"),
        (lcsts, {"tasks": ["titel"]}, "no task named titel; there are: title, keywords, category"),
        (lcsts, {"wanted": ["cls"]}, "no source named cls; there are: csl"),
        (lcsts, {"wanted": []}, "no source named at all"),
        (lcsts, {"train": 0}, "at least one row each"),
        (lcsts, {"wanted": ["csl"]}, "holds lcsts, nothing of csl"),
    ],
)
def test_what_build_refuses(tmp_path, prepare, options, message):
    if prepare is not None:
        prepare(tmp_path / "in")
    with pytest.raises(ValueError, match=message):
        headlines.build([str(tmp_path / "in")], tmp_path / "out", **options)


def test_by_name_through_datasets(tmp_path, monkeypatch):
    import datasets

    def load_dataset(name, configuration, **options):
        assert name == "csebuetnlp/xlsum"
        assert options == {"revision": "refs/convert/parquet", "streaming": True}, "no code of a data set is run"
        text = XLSUM["text"] if configuration == "chinese_simplified" else "The last ferry leaves at noon"
        return {split: iter(numbered(XLSUM | {"text": split + text}, "text", 10)) for split in ("train", "validation")}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    manifest = headlines.build(["csebuetnlp/xlsum"], tmp_path, train=30, test=10)
    assert [(entry["name"], entry["rows"]) for entry in manifest["inputs"]] == [
        ("csebuetnlp/xlsum/chinese_simplified", 20),
        ("csebuetnlp/xlsum/english", 20),
    ]
    assert all(len(entry["sha256"]) == 64 for entry in manifest["inputs"])


def test_no_network_is_one_line(tmp_path, monkeypatch, capsys):
    import datasets

    def load_dataset(*_, **__):
        raise RuntimeError("no route\n to host")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert data_build("neuclir/csl", tmp_path) == 2
    progress, error = capsys.readouterr().err.splitlines()
    assert progress == "reading neuclir/csl …"
    assert "neuclir/csl cannot be read by name (no route to host)" in error


@given(st.lists(st.text(max_size=8), max_size=60), st.integers(1, 20), st.randoms())
def test_the_choice_is_of_distinct_rows_in_any_order(texts, size, order):
    def chosen(items, size):
        selection = Selection(size, seed=3)
        for text in items:
            selection.offer(row(0, input=text))
        return [rows.key_of(json.loads(line)["input"]) for line in selection.rows()]

    distinct = {rows.key_of(text) for text in texts}
    keys = chosen(texts, size)
    assert len(keys) == len(set(keys)) == min(size, len(distinct))
    assert set(keys) <= distinct
    shuffled = list(texts)
    order.shuffle(shuffled)
    assert chosen(shuffled, size) == keys
    assert chosen(texts, size + 5)[:size] == keys


# ---------------------------------------------------------------- the check


def layouts(items):
    """The same rows as files have them: a row a line, spread out, as the article prints them, on one line, lines."""
    spread = json.dumps(items, indent=2, ensure_ascii=False)
    return {
        "array": "[\n" + ",\n".join(json.dumps(i, ensure_ascii=False) for i in items) + "\n]\n",
        "spread": spread,
        "article": "\n".join(line.strip() for line in spread.splitlines()),
        "single": json.dumps(items),
        "lines": "".join(json.dumps(i, ensure_ascii=False) + "\n" for i in items),
    }


@pytest.mark.parametrize("layout", ["array", "spread", "article", "single", "lines"])
def test_every_layout_is_read(tmp_path, layout):
    items = [row(1), row(2), row(3, input="三\n[{", extra=[{"a": 1}] if layout != "article" else 0)]
    file = tmp_path / "a.json"
    file.write_text("\ufeff" * (layout == "spread") + layouts(items)[layout], encoding="utf-8")
    assert headlines.read(file) == items
    assert headlines.check(file) == headlines.Report(rows=3, forms=Counter(article=3))


def test_every_bad_row_is_named_by_line_and_reason(tmp_path, capsys):
    lines = [json.dumps(row(k), ensure_ascii=False) for k in range(1, 12)]
    lines[1] = lines[1].replace(":", "", 1)
    lines[2] = json.dumps({"instruction": "题", "input": "正文"})
    lines[3] = json.dumps(row(4, output="  "))
    lines[4] = json.dumps(row(5, input=["正文"]))
    lines[5] = "\0"  # put in below
    lines[6] = lines[0]
    lines[7] = "17"
    lines[8] = lines[8][:-9]
    lines[9] = json.dumps(row(10, output="\ud83d"))
    content = ("[\n" + ",\n".join(lines) + "\n]\n").encode()
    file = tmp_path / "train.json"
    file.write_bytes(content.replace(b"\0", json.dumps(row(6), ensure_ascii=False).encode("gb18030")))
    with pytest.raises(json.JSONDecodeError):
        json.loads(file.read_bytes().decode(errors="replace"))
    report = headlines.check(file)
    reasons = {problem.line: problem.reason for problem in report.problems}
    expected = {
        3: "broken JSON: Expecting ':'",
        4: "missing field output; missing field source",
        5: "empty output",
        6: "input must be text, not a list",
        7: "not UTF-8: byte 0x",
        8: "duplicate input, as in line 2",
        9: "an object with the fields instruction, input, output, source is expected, not a number",
        10: "broken JSON: ",
        11: "output holds half a surrogate pair",
    }
    assert {line: reason[: len(expected[line])] for line, reason in reasons.items()} == expected
    assert report.rows == 11
    assert cli.main(["data", "check", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "11 rows, 9 bad" in printed
    assert all(reason in printed for reason in reasons.values())
    assert cli.main(["data", "check", str(file), "--json"]) == 1
    assert {b["line"]: b["reason"] for b in json.loads(capsys.readouterr().out)["bad"]} == reasons
    with refused("train.json line 3: broken JSON: "):
        headlines.read(file)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[\n{0},\n{1}\n", 3, "the array is not closed"),
        ("[\n{0}\n{1}\n]", 3, "no comma before this row"),
        ("[\n{0},\n{1},\n]", 4, "a comma too many"),
        ("[\n{0},\n{1}\n]\n{2}", 5, "text after the closing ]"),
        ("{0},\n{1}\n", 2, ", outside of an array"),
        ("{0}\n{1}\n]", 3, "] outside of an array"),
        ("{0} {1}\n", 1, "more than one value on a line"),
        ("[{0}, {1]}, {2}]", 1, "broken JSON"),
        ("[" * 100_000, 1, "broken JSON"),
    ],
)
def test_faults_between_the_rows(tmp_path, text, line, reason):
    for k in range(3):
        text = text.replace(f"{{{k}}}", json.dumps(row(k)))
    (tmp_path / "a.json").write_text(text)
    first = headlines.check(tmp_path / "a.json").problems[0]
    assert (first.line, first.reason[: len(reason)]) == (line, reason)


UNCLOSED, UNQUOTED, NO_UTF_8 = (b'"}', b'"'), (b'"source"', b"source"), (b"input", b"inp\xffut")


@pytest.mark.parametrize("fault", [UNCLOSED, UNQUOTED, NO_UTF_8, (b"}", b', "x": {"y": 1}, "z" 3}')])
@pytest.mark.parametrize("between", [", ", ",\n", "\n,", ",\n    ", "\n", " "])
def test_a_broken_row_takes_no_other_with_it(tmp_path, fault, between):
    rows = [json.dumps(row(k)).encode() for k in range(5)]
    rows[2] = rows[2].replace(*fault, 1)
    whole = between.encode().join(rows)
    (tmp_path / "a.json").write_bytes(b"[" + whole + b"]" if "," in between else whole)
    report = headlines.check(tmp_path / "a.json")
    assert report.rows == 5
    bad = [problem for problem in report.problems if "more than one value" not in problem.reason]
    assert [problem.line for problem in bad] == [1 + whole.count(b"\n", 0, whole.index(rows[2]))]
    assert ("not UTF-8: byte 0xff" in bad[0].reason) == (fault is NO_UTF_8)


def is_row(value):
    try:
        return bool(rows.row_of(value))
    except rows.BadRow:
        return False


@given(st.data())
def test_the_check_and_json_agree(tmp_path_factory, data):
    """Whatever one character is taken from or put into a file: what json.load refuses, the check does not pass."""
    text = layouts([row(k) for k in range(3)])[data.draw(st.sampled_from(["array", "spread", "single"]))]
    at = data.draw(st.integers(0, len(text) - 1))
    put = data.draw(st.sampled_from(["", ",", "]", "[", "{", "}", '"', "\\", "\n", " ", "1"]))
    changed = text[:at] + put + text[at + data.draw(st.integers(0, 1)) :]
    file = tmp_path_factory.mktemp("agree") / "a.json"
    file.write_text(changed, encoding="utf-8")
    try:
        good = not headlines.check(file).problems
    except ValueError:
        good = False
    try:
        value = json.loads(changed)
    except ValueError:
        value = None
    fine = isinstance(value, list) and len(value) > 0 and all(map(is_row, value))
    fine = fine and len({rows.key_of(r["input"]) for r in value}) == len(value)
    lines_fine = value is None or isinstance(value, dict)  # JSON lines, which json.loads refuses as a whole
    assert good == fine or (good and lines_fine and not changed.lstrip().startswith("["))


@pytest.mark.parametrize(
    ("content", "message"), [("", "holds no row"), ("[]\n", "holds no row"), (POINTER, "is a git-lfs pointer")]
)
def test_a_file_without_rows(tmp_path, capsys, content, message):
    (tmp_path / "a.json").write_text(content)
    assert cli.main(["data", "check", str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err


def test_the_picture_says_what_it_shows(tmp_path):
    from PIL import Image

    headlines.build(["generated"], tmp_path, train=30, test=10)
    with Image.open(tmp_path / "lengths.png") as image:
        assert "medians: train input" in image.info["Description"]
    assert sorted(f.name for f in tmp_path.iterdir()) == ["lengths.png", "manifest.json", "test.json", "train.json"]
