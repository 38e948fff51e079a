"""What ``pardemo prove --out`` leaves: the page and its map, the verdict for programs, tensors that nobody explains."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
import yaml
from conftest import says
from safetensors.torch import load_file
from test_measure_page import Tags
from test_prove_causes import comparison, drawn, of

from pardemo import cli, project
from pardemo.script.compare import differences, module_map, runs
from pardemo.script.compare.differences import ComparedOutput, Finding
from pardemo.script.compare.module_map import DIFFERENT, EQUAL, NOT_COMPARED, NOTHING, Cell, ModelMap, ModuleRow
from pardemo.script.compare.results import LayoutResult, Proof
from pardemo.script.compare.run_layouts import RunLayout
from pardemo.script.record.rank_record import ModuleCall, ParameterShard, RankRecord, Step
from pardemo.script.report import annotations, model_map, proof_page

G = drawn(6, 4)
EVIL = "<img src=x onerror=alert(1)>\"'&"


def layout(name, *line):
    ranks, _, rest = name.partition(" ")
    values = {"ranks": int(ranks.removeprefix("ranks="))} | dict(one.split("=") for one in rest.split())
    return RunLayout(values["ranks"], values, line)


def proof(*findings, rows=(), error="", notes=(), name="ranks=4 batch=2"):
    of_map = ModelMap(1, tuple(rows), {"forward": (3, 4), "gradient": (2, 2), "update": (2, 2)})
    results = [
        LayoutResult(layout("ranks=1 batch=8", "train.py"), steps_run=3),
        LayoutResult(layout(name, "train.py", "--batch", "2"), error, findings=list(findings), model=of_map),
    ]
    return Proof(results, list(notes), parameters=5, tolerance=1e-9)


def finding(cause="", parameters=("head.weight",), module="head", why="nobody here knows why", **more):
    return Finding("ranks=4 batch=2", 1, "gradients", cause, why, 2.0, 0.0, parameters, module, **more)


# --- the map


def reference_of(parameters, modules, kinds=None):
    """As much of a reference as a map is made of: parameters with gradients, modules in the order in which they end."""
    calls = [ModuleCall(name, (kinds or {}).get(name, "Linear"), 0, 0, "", ()) for name in modules]
    pieces = [ParameterShard(name, (6, 4)) for name in parameters]
    record = RankRecord(0, "", [Step(calls=calls, pieces=pieces)], [], [], [], optimizer="SGD")
    whole = SimpleNamespace(before=dict.fromkeys(parameters, G), gradients=dict.fromkeys(parameters, G))
    return SimpleNamespace(
        run=SimpleNamespace(records=[record]), order=[{name: at for at, name in enumerate(modules)}], whole=[whole]
    )


def map_of(gradients, updates, parted=(), alike=(), parameters=("embed.weight", "head.weight", "head.bias"), more=()):
    modules = ["embed", "loss", *more, "head", "Model"]
    truth = reference_of(parameters, modules, {"Model": "Model"})
    made = comparison(*(of(G, ours, name) for name, ours in gradients.items()))
    made.order = truth.order[0]
    made.updates = {name: of(G, ours, name) for name, ours in updates.items()}
    made.parted = [ComparedOutput(0, name, "Linear", 0, True, G[:, :3], G[:, :3], None) for name in parted]
    made.optimizer, made.steps, made.reference_step = "SGD", [Step()], truth.run.records[0].steps[0]
    drawn_map = module_map.step_map(truth, 0, made, alike)
    return {row.module: row.cells for row in drawn_map.rows}, drawn_map


def states(cells):
    return [cell.state for cell in cells]


def test_each_cell_says_what_was_compared_of_the_module_itself():
    same = {"embed.weight": G, "head.weight": G, "head.bias": G}
    rows, of_map = map_of(same | {"head.bias": 2 * G}, same | {"head.bias": 2 * G}, alike=["embed", "head", "Model"])
    assert list(rows) == ["Model", "embed", "loss", "head"], "the whole first, then what is in it as it runs"
    assert states(rows["embed"]) == [EQUAL, EQUAL, EQUAL]
    assert states(rows["head"]) == [EQUAL, DIFFERENT, DIFFERENT], "one of its two parameters is wrong"
    assert rows["head"][1].factor == pytest.approx(2)
    assert states(rows["loss"]) == [NOT_COMPARED, NOTHING, NOTHING]
    assert states(rows["Model"]) == [EQUAL, NOTHING, NOTHING], "parameters of others do not count"
    assert dict(of_map.counts) == {"forward": (3, 4), "gradient": (3, 3), "update": (3, 3)}


def test_a_gradient_that_nobody_has_is_not_grey():
    zero = torch.zeros_like(G)
    rows, _ = map_of({"head.weight": G, "head.bias": G}, {"embed.weight": zero, "head.weight": G, "head.bias": G})
    assert states(rows["embed"])[1:] == [DIFFERENT, DIFFERENT], "it has none, and is not trained"
    rows, of_map = map_of({"head.weight": G}, {"head.weight": G})
    assert states(rows["embed"])[1:] == states(rows["head"])[1:] == [NOT_COMPARED, NOT_COMPARED]
    assert of_map.counts["gradient"] == (1, 3)


def test_behind_a_wrong_output_nothing_is_looked_at():
    both = {"embed.weight": G, "head.weight": 2 * G}
    rows, of_map = map_of(both, both, parted=["head"], alike=["embed"])
    assert states(rows["embed"]) == [EQUAL, NOT_COMPARED, NOT_COMPARED]
    assert states(rows["head"]) == [DIFFERENT, NOT_COMPARED, NOT_COMPARED]
    assert of_map.counts["gradient"] == (0, 3)


def test_of_a_step_with_other_samples_nothing_is_compared():
    rows = module_map.step_map(reference_of(["head.weight"], ["head"]), 0).rows
    assert [states(row.cells) for row in rows] == [[NOT_COMPARED] * 3]


def grid(names, wrong=()):
    def cell(bad):
        return Cell(DIFFERENT, 2.0) if bad else Cell(EQUAL)

    rows = [ModuleRow("blocks", "", (Cell(), Cell(), Cell()))]
    for name in names:
        rows.append(ModuleRow(f"blocks.{name}", "Block", (Cell(EQUAL), Cell(), Cell())))
        rows.append(ModuleRow(f"blocks.{name}.up", "Linear", (Cell(EQUAL), cell(name in wrong), Cell(EQUAL))))
    return ModelMap(1, tuple(rows), {})


@pytest.mark.parametrize(
    ("numbers", "wrong", "labels"),
    [
        (12, (), ["blocks.0 … blocks.11", "up"]),
        (12, (5,), ["blocks.0 … blocks.4", "up", "blocks.5", "up", "blocks.6 … blocks.11", "up"]),
        (2, (), ["blocks.0", "up", "blocks.1", "up"]),
        (3, (2,), ["blocks.0", "up", "blocks.1", "up", "blocks.2", "up"]),
    ],
)
def test_numbered_siblings_that_are_alike_are_one_row(numbers, wrong, labels):
    assert [line.label for line in model_map.map_lines(grid(range(numbers), wrong))] == labels


def test_the_first_module_is_marked_and_not_folded():
    lines = model_map.map_lines(grid(range(6)), ["blocks.5.up"])
    assert [line.label for line in lines] == ["blocks.0 … blocks.4", "up", "blocks.5", "up"]
    assert [line.first for line in lines] == [False, False, False, True]


def test_a_state_is_a_sign_too():
    table, _ = model_map.map_blocks(grid([0], wrong=[0]), ["blocks.0.up"])
    assert re.findall(r'class="cell (\w+)"[^>]*>([^<]+)<', table.page()) == [
        ("equal", "="), ("equal", "="), ("different", "×\N{NO-BREAK SPACE}2"), ("equal", "="),
    ]  # fmt: skip
    assert "◀ first" in table.page()


# --- the page


def test_what_comes_from_a_script_is_never_markup():
    bad = replace(finding("sum-for-mean", (EVIL,), EVIL, EVIL), layout=f"ranks=4 batch={EVIL}".replace(" src=x ", ""))
    made = proof(rows=[ModuleRow(EVIL, EVIL, (Cell(EQUAL), Cell(DIFFERENT), Cell(NOT_COMPARED)))], notes=[EVIL])
    made.layouts[1].findings.append(replace(bad, layout=made.layouts[1].name))
    made.layouts[1].layout = replace(made.layouts[1].layout, line=(EVIL,))
    made.layouts.append(LayoutResult(layout("ranks=2 batch=4"), EVIL))
    html = proof_page.proof_page(made, EVIL)
    read = Tags(html)
    assert not {"img", "script"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name.startswith("on")]
    assert read.text.count(EVIL) >= 7, "title and heading, line, module and class, sentence, parameter, note, error"


def test_the_page_asks_nothing_of_a_network_and_its_links_lead_somewhere():
    html = proof_page.proof_page(proof(finding("sum-for-mean")), "train.py")
    read = Tags(html)
    ids, links = ({value for name, value in read.attributes if name == wanted} for wanted in ("id", "href"))
    assert links
    assert {link.removeprefix("#") for link in links} <= ids
    assert "http" not in html
    assert not {"link", "img", "script"} & set(read.tags)


def test_the_verdict_has_a_line_and_a_link_for_each_layout():
    made = proof(finding())
    made.layouts += [
        LayoutResult(layout("ranks=2 batch=4"), "rank 1 raised"), LayoutResult(layout("ranks=8 batch=1"))
    ]  # fmt: skip
    shown = proof_page.proof_page(made, "train.py").partition("<h2")[2].partition("</section>")[0]
    assert re.findall(r'">(.)</strong> <a href="#(layout-\d)">(.*?)</a>: (\w+ \w+)', shown) == [
        ("✗", "layout-1", "ranks=4 batch=2", "step 1"),
        ("?", "layout-2", "ranks=2 batch=4", "could not"),
        ("✓", "layout-3", "ranks=8 batch=1", "trains as"),
    ]


def test_what_was_not_looked_at_is_said():
    wrong = replace(finding(), what="data")
    assert says(proof_page.proof_page(proof(wrong), "a.py"), "samples", "parameters")
    assert says(proof_page.proof_page(proof(replace(wrong, what="forward")), "a.py"), "outputs", "gradients")
    text = Tags(proof_page.proof_page(proof(), "train.py")).text
    assert says(text, "3", "4", "gradients", "2", "2")
    assert says(text, "Trains", "reference")
    assert "wrong" not in text
    html = proof_page.proof_page(proof(error="rank 1 raised"), "train.py")
    assert "Rank 1 raised." in html
    assert "trains as" not in html


# --- tensors


def test_tensors_of_what_nobody_explains_are_kept(monkeypatch):
    versions = {0: drawn(6, 4, seed=1), 1: drawn(6, 4, seed=2)}
    made = comparison(of(G, versions[0], "head.weight", versions), of(G, 2 * G, "head.bias"))
    run = SimpleNamespace(records=[SimpleNamespace(steps=[Step(pieces=[ParameterShard("head.weight", (6, 4))])])])
    known, unknown = finding("sum-for-mean", ("head.bias",)), finding("", ("head.weight", "head.bias"))
    explained, open_ = differences.with_tensors([known, unknown], made, run)
    assert explained.tensors is None
    assert set(open_.tensors.tensors) == {
        *(f"gradient/head.weight/{one}" for one in ("reference", "layout", "rank 0", "rank 1")),
        *(f"gradient/head.bias/{one}" for one in ("reference", "layout")),
    }
    assert open_.tensors.sketches == ("head.bias",), "the whole has another shape"
    assert open_.explained("loss", "it is the loss").tensors is None, "it is known by now"
    monkeypatch.setattr(differences, "MOST_BYTES", 2 * G.nbytes)
    (open_,) = differences.with_tensors([unknown], made, run)
    assert open_.tensors.left_out == ("head.weight",)
    assert len(open_.tensors.tensors) == 2


def test_outputs_of_what_nobody_explains_are_kept():
    made = comparison()
    made.parted = [
        ComparedOutput(rank, name, "Linear", 0, True, G[:, :3], 2 * G[:, :3], None)
        for rank, name in ((0, "up"), (0, "up"), (1, "up"), (0, "down"))
    ]
    unknown = replace(finding("", (), "up"), what="forward")
    run = SimpleNamespace(records=[SimpleNamespace(steps=[Step()])])
    tensors = differences.with_tensors([unknown], made, run)[0].tensors.tensors
    assert {key.rpartition("/")[0] for key in tensors} == {
        "output/up/rank 0/0", "output/up/rank 0/1", "output/up/rank 1/0",
    }  # fmt: skip
    assert torch.equal(tensors["output/up/rank 1/0/layout"], 3 * G[:, :3])


def written(tmp_path, **more):
    unknown = finding()
    tensors = {"gradient/head.weight/reference": G, "gradient/head.weight/layout": G.t()}
    made = proof(finding("sum-for-mean"), replace(unknown, tensors=differences.KeptTensors(tensors, **more)))
    proof_page.write_proof(tmp_path, made, "train.py")
    return made, tensors


def test_files_are_named_and_read_back_equal(tmp_path):
    _, tensors = written(tmp_path, left_out=("embed.weight",))
    verdict = json.loads((tmp_path / "prove.json").read_text())
    assert [one["tensors"] for one in verdict["findings"]] == [None, "tensors/finding2.safetensors"]
    read = load_file(tmp_path / "tensors" / "finding2.safetensors")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    html = (tmp_path / "prove.html").read_text()
    assert 'href="tensors/finding2.safetensors"' in html
    assert "without embed.weight" in html
    assert "finding1" not in html
    assert sorted(one.name for one in tmp_path.iterdir()) == ["prove.html", "prove.json", "tensors"]


def test_an_earlier_proof_makes_room(tmp_path):
    written(tmp_path)
    assert proof_page.proof_folder(str(tmp_path)) == tmp_path
    proof_page.write_proof(tmp_path, proof(), "other.py")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["prove.html", "prove.json"], "no tensors of before"
    assert "other.py" in (tmp_path / "prove.html").read_text()


def test_what_a_killed_proof_has_left_goes(tmp_path):
    (left := tmp_path / ".prove-half").mkdir()
    (left / proof_page.PAGE).write_text("half of a page")
    proof_page.write_proof(proof_page.proof_folder(str(tmp_path)), proof(), "train.py")
    assert not left.exists()
    assert (tmp_path / proof_page.PAGE).exists()


def test_a_page_is_whole_or_not_there(tmp_path, monkeypatch):
    written(tmp_path)
    before = (tmp_path / "prove.html").read_text(), (tmp_path / "prove.json").read_text()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(proof_page, "proof_page", full)
    with pytest.raises(OSError, match="No space"):
        proof_page.write_proof(tmp_path, proof(), "other.py")
    assert ((tmp_path / "prove.html").read_text(), (tmp_path / "prove.json").read_text()) == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["prove.html", "prove.json", "tensors"]


def test_a_folder_with_other_things_is_refused_before_anything_runs(tmp_path, capsys):
    line = ["prove", "--layout", "ranks=1", "--layout", "ranks=2", "--out"]
    (tmp_path / "notes.txt").write_text("mine")
    assert cli.main([*line, str(tmp_path), "--", __file__]) == 2
    assert f"--out: {tmp_path} has other things in it, as notes.txt" in capsys.readouterr().err
    assert cli.main([*line, str(tmp_path / "notes.txt"), "--", __file__]) == 2
    assert "is a file" in capsys.readouterr().err
    own = tmp_path / "own"
    (own / "tensors").mkdir(parents=True)
    (own / "tensors" / "weights.safetensors").write_text("mine")
    assert cli.main([*line, str(own), "--", __file__]) == 2
    assert says(capsys.readouterr().err, "things", "tensors")


# --- the whole way

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
batch, times = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
for step in data:
    model(step[dist.get_rank() * batch :][:batch]).square().mean().backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    if dist.get_world_size() > 1:
        model[0].weight.grad *= times
        if times == 3:
            model[0].weight.grad += torch.linspace(0, 1, 1024).view(32, 32)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("elements", [runs.SKETCHED, 100], ids=["small", "compared by sketches first"])
def test_a_bug_a_right_layout_and_one_that_nobody_explains(elements, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(runs, "SKETCHED", elements)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    texts = ["ranks=1 batch=8 times=1", "ranks=2 batch=4 times=1", "ranks=2 batch=4 times=2", "ranks=2 batch=4 times=3"]
    words = [word for text in texts for word in ("--layout", text)]
    line = ["prove", *words, "--double", "--json", "--out", "out", "--", "train.py", "{batch}", "{times}"]
    assert cli.main(line) == 1
    out = tmp_path / "out"
    verdict = json.loads((out / "prove.json").read_text())
    assert verdict == json.loads(capsys.readouterr().out)
    assert [one["equal"] for one in verdict["layouts"]] == [True, True, False, False]
    text = re.sub(r"\s+", " ", Tags((out / "prove.html").read_text()).text)
    right, wrong, unknown = (
        text.split(mark)[-1] for mark in ("✓ ranks=2", "✗ ranks=2 batch=4 times=2", "✗ ranks=2 batch=4 times=3")
    )
    assert says(right, "Trains", "reference")
    assert says(wrong, "1", "gradients", "2", "0")
    assert says(wrong, "2", "=", "number")
    assert "nobody here knows why" in unknown
    named = [one["tensors"] for one in verdict["findings"]]
    assert named == [None, "tensors/finding2.safetensors"]
    kept = load_file(out / named[1])
    off = kept["gradient/0.weight/layout"] - 3 * kept["gradient/0.weight/reference"]
    torch.testing.assert_close(off, torch.linspace(0, 1, 1024, dtype=torch.float64).view(32, 32), rtol=1e-6, atol=1e-6)
    assert [one.name for one in (out / "tensors").iterdir()] == ["finding2.safetensors"]


# --- where a pull request is read

ROOT = project.PACKAGE.parent
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
BUG = "no_sync_over_the_last_micro_batch.py"


def as_json(made):
    """What ``--json`` prints, as a program reads it."""
    return json.loads(json.dumps(made.as_json()))


def test_an_annotation_stands_at_the_line_that_json_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    found = finding("sum-for-mean", why="100 % of it,\nsummed")
    located = replace(found, line="sub/train.py:31")
    made = proof(located, finding("", module=""), error="ended with 1, at train.py:9")
    told = annotations.annotations(as_json(made), "sub/train.py", tmp_path)
    first = (
        "::error file=sub/train.py,line=31,title=pardemo prove%2C ranks=4 batch=2::step 1, gradients (× 2), first at "
    )
    assert told[0].startswith(first + "head: [sum-for-mean] 100 %25 of it,%0Asummed (1 parameter: head.weight). What")
    assert told[0].endswith("/docs/prove.md#each-cause")
    assert told[1].startswith("::error file=sub/train.py,title="), "the script, where no line is known"
    assert told[2].startswith("::error file=sub/train.py,line=9,title=")
    monkeypatch.chdir(tmp_path / "sub")
    assert "file=" not in annotations.annotations(as_json(proof(found)), "../elsewhere.py", tmp_path / "sub")[0]


def test_junit_has_a_case_for_each_layout_and_what_xml_cannot_hold_is_left_out():
    suites = annotations.junit(as_json(proof(finding(why=f"{EVIL}\x1b[31m"))), "train.py", Path())
    read = ElementTree.fromstring(ElementTree.tostring(suites))
    assert read.attrib == {"tests": "1", "failures": "1", "errors": "0"}
    (case,) = read.iter("testcase")
    assert (case.get("classname"), case.get("name")) == ("train.py", "ranks=4 batch=2")
    assert EVIL in case.find("failure").text
    equal = annotations.junit(as_json(proof()), "train.py", Path())
    assert (equal.get("failures"), len(list(equal.iter("testcase")))) == ("0", 1)
    failed = annotations.junit(as_json(proof(error="it hung")), "train.py", Path())
    assert failed.find("testsuite/testcase/error").get("message") == "it hung"


def test_the_summary_fences_whatever_the_screen_has():
    told = annotations.summary(as_json(proof(finding())), "a\n````\nb")
    assert told == "### pardemo prove: different\n\n`````text\na\n````\nb\n`````\n"
    assert annotations.summary(as_json(proof()), "").startswith("### pardemo prove: equal")


def test_an_error_before_any_verdict_is_annotated_too(tmp_path, capsys):
    (tmp_path / "log.txt").write_text("[0] Traceback\npardemo prove: the script is not the same twice\n")
    given = [str(tmp_path / "prove.json"), "--log", str(tmp_path / "log.txt"), "--junit", str(tmp_path / "junit.xml")]
    assert annotations.main([*given, "--summary", str(tmp_path / "summary.md")]) == 0
    assert capsys.readouterr().out == "::error title=pardemo prove::pardemo prove: the script is not the same twice\n"
    assert ElementTree.parse(tmp_path / "junit.xml").getroot().get("errors") == "1"
    assert (tmp_path / "summary.md").read_text().startswith("### pardemo prove: could not be made\n")


def run_action(repository, **inputs):
    """The action's steps but for the installation, as a runner takes them: status, stdout, outputs, summary."""
    given = {name: rows.get("default", "") for name, rows in ACTION["inputs"].items()} | inputs
    files = {name: repository.parent / f"{name}.txt" for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    environment = os.environ | {name: str(path) for name, path in files.items()} | {
        "GITHUB_WORKSPACE": str(repository), "PYTHONPATH": str(ROOT),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
    }  # fmt: skip
    for path in files.values():
        path.write_text("")

    def filled(text):
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: given[found[1]], text)

    status, printed = 0, ""
    for step in ACTION["runs"]["steps"]:
        if "run" not in step or step["id"] == "install" or status:
            continue
        script = repository.parent / "step.sh"
        script.write_text(step["run"])
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", str(script)],
            cwd=repository / filled(step.get("working-directory", ".")), capture_output=True, text=True, timeout=300,
            env=environment | {name: filled(value) for name, value in step.get("env", {}).items()}, check=False,
        )  # fmt: skip
        status, printed = done.returncode, printed + done.stdout
    outputs = dict(line.split("=", 1) for line in files["GITHUB_OUTPUT"].read_text().splitlines())
    return status, printed, outputs, files["GITHUB_STEP_SUMMARY"].read_text()


@pytest.fixture
def repository(tmp_path):
    """A user's: a script with a known bug, and a module of it, in a folder."""
    made = tmp_path / "repository"
    (made / "training").mkdir(parents=True)
    for name in (BUG, "common.py"):
        shutil.copy(ROOT / "tests" / "zoo" / name, made / "training" / name)
    return made


def test_the_action_annotates_the_line_of_a_known_bug(repository):
    arguments = f"""--double --steps 1 --layout "ranks=1 batch=4 accumulate=2"
        --layout "ranks=2 batch=2 accumulate=2" --layout 'ranks=2 batch=4 accumulate=1'
        -- {BUG} --batch {{batch}} --accumulate {{accumulate}}"""
    status, printed, outputs, summary = run_action(
        repository, arguments=arguments, **{"working-directory": "training"}
    )  # fmt: skip
    assert (status, outputs["verdict"]) == (1, "different")
    line = (repository / "training" / BUG).read_text().splitlines().index("            loss.backward()") + 1
    (error,) = [told for told in printed.splitlines() if told.startswith("::error ")]
    assert error.startswith(
        f"::error file=training/{BUG},line={line},title=pardemo prove%2C ranks=2 batch=2 accumulate=2::"
    )
    assert "[not-summed]" in error
    tests = list(ElementTree.parse(outputs["junit"]).iter("testcase"))
    assert {test.get("file") for test in tests} == {f"training/{BUG}"}, "from the repository's root"
    assert tests[0].find("failure").text.startswith(f"training/{BUG}:{line}: ")
    cases = {test.get("name"): [one.tag for one in test] for test in tests}
    assert cases == {"ranks=2 batch=2 accumulate=2": ["failure"], "ranks=2 batch=4 accumulate=1": []}
    assert summary.startswith("### pardemo prove: different\n\n```text\nreference  ranks=1 batch=4 accumulate=2")
    assert (repository / "training" / "pardemo-prove" / "proof" / "prove.html").is_file()


def test_the_action_says_what_could_not_be_run(repository):
    status, printed, outputs, summary = run_action(
        repository, arguments='--layout "ranks=1" --layout "ranks=2" -- no.py'
    )
    assert (status, outputs["verdict"]) == (2, "not compared")
    assert "::error title=pardemo prove::pardemo prove: there is no script no.py" in printed
    assert "could not be made" in summary


def test_the_workflow_on_the_page_uses_the_action_as_it_is():
    page = (ROOT / "docs" / "pull-requests.md").read_text()
    workflow = yaml.safe_load(re.search(r"<!-- workflow:.*?```yaml\n(.*?)```", page, re.S)[1])
    (ours,) = [step for step in workflow["jobs"]["prove"]["steps"] if step.get("uses", "").startswith("pardemo/")]
    assert ours["uses"].partition("@")[0] == project.REPOSITORY.removeprefix("https://github.com/")
    assert set(ours["with"]) <= set(ACTION["inputs"])
    rows = re.findall(r"^\| `([\w-]+)` \| ", page, re.M)
    assert rows == list(ACTION["inputs"])
    assert {step["id"] for step in ACTION["runs"]["steps"]} == {"install", "prove"}
