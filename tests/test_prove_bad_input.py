"""What is wrong with layouts, with a script or with an engine: one clear line each, and exit status 2."""

import dataclasses
import json
import re
import textwrap
from collections import UserDict

import pytest
import torch
from conftest import few, says
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import nn

from pardemo import cli
from pardemo.prove import ProveError, prove, script
from pardemo.script.compare import run_layouts
from pardemo.script.record import rank_record

#: A script that trains on 2 ranks as on one; what stands for ``MODEL``, ``INPUT`` and ``SETUP`` is bad.
SCRIPT = """
import argparse, os, random, sys, numpy as np, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--kind", default="")
asked = parser.parse_args()
kind = asked.kind
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
SETUP
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
MODEL
wrapped = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 16)
for step in range(2):
    begin = (step * ranks + rank) * asked.batch
    samples = data[begin : begin + asked.batch]
    INPUT
    loss = wrapped(samples).square().mean()
    loss.backward()
    STEP
    optimizer.zero_grad()
"""


def write(folder, setup="", model="", input="", step="optimizer.step()"):
    parts = {"SETUP": setup, "MODEL": model, "    INPUT": textwrap.indent(textwrap.dedent(input), "    "), "STEP": step}
    text = SCRIPT
    for name, part in parts.items():
        text = text.replace(name, textwrap.dedent(part) if name != "    INPUT" else part, 1)
    (folder / "train.py").write_text(text)
    return text


def line_of(text, part):
    return f"train.py:{1 + next(number for number, line in enumerate(text.splitlines()) if part in line)}"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys, *arguments):
    """The last line of what is said on the error stream of a command that could not be run."""
    assert cli.main(["prove", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.rstrip().splitlines()[-1]


def told(capsys, *arguments):
    """The verdict of a command of which a layout could not be compared."""
    assert cli.main(["prove", "--json", *arguments]) == 2
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["equal"] is False
    assert verdict["findings"] == []
    return {row["layout"]: row["error"] for row in verdict["layouts"]}


TWO = ("--layout", "ranks=1 batch=8", "--layout", "ranks=2 batch=4", "--steps", "1")
LINE = ("--", "train.py", "--batch", "{batch}")
BAD, GOOD = "ranks=2 batch=4 kind=b", "ranks=2 batch=4 kind=a"
KINDS = ("--layout", "ranks=1 batch=8 kind=a", "--layout", BAD, "--layout", GOOD, *TWO[-2:], *LINE, "--kind", "{kind}")


# --- layouts and prove.toml


@pytest.mark.parametrize(
    ("texts", "line", "message"),
    [
        (["ranks=1"], "train.py", "a proof needs two layouts or more: the first is the reference"),
        (["ranks=1", "ranks=1"], "train.py", "two layouts are the same, ranks=1 and ranks=1"),
        (["ranks=2 tp=1", "ranks=2 tp=2"], "train.py", "two layouts are the same, ranks=2 tp=1 and ranks=2 tp=2"),
        (["ranks=1", ""], "train.py", "--layout '': say how many ranks, as ranks=4"),
        (["ranks=1", "batch=4"], "train.py {batch}", "--layout 'batch=4': say how many ranks"),
        (["ranks=1", "ranks=0"], "train.py", r"ranks must be a number from 1 to \d+, not 0"),
        (["ranks=1", "ranks=two"], "train.py", "must be a number from 1 to .*, not 'two'"),
        (["ranks=1", "ranks=100000"], "train.py", "must be a number from 1 to .*, not 100000"),
        (["ranks=1", "4 ranks"], "train.py", "--layout takes \"ranks=4 batch=8\", not '4 ranks'"),
        (["ranks=1", "ranks="], "train.py", "--layout takes \"ranks=4 batch=8\", not 'ranks='"),
        (["ranks=1", "ranks=2 ranks=4"], "train.py", "says ranks twice"),
        (["ranks=1", "ranks=2 tp=0"], "train.py", "tp must be a number from 1 on, not 0"),
        (["ranks=1", "ranks=2 tp=x"], "train.py", "tp must be a number from 1 on, not 'x'"),
        (["ranks=1", "ranks=2"], "train.py {batch}", "line has {batch}, which the layout 'ranks=1' does not say"),
        (["ranks=1 lr=1", "ranks=2 lr=1"], "train.py", "says lr, which is nowhere in the script's line as {lr}"),
    ],
)
def test_layouts_on_the_line(folder, capsys, texts, line, message):
    flags = [word for text in texts for word in ("--layout", text)]
    assert re.search(message, refused(capsys, *flags, "--", *line.split()))


LAYOUTS = "\n[[layout]]\nranks = 1\n[[layout]]\nranks = 2\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("script = ", "prove.toml is no TOML: "),
        (LAYOUTS, r'prove.toml needs script = "train.py …"'),
        ('script = ""' + LAYOUTS, "prove.toml needs script"),
        ("script = 3" + LAYOUTS, "prove.toml needs script"),
        ('script = "train.py"', r"prove.toml needs a \[\[layout\]\] for the reference"),
        ('script = "train.py"\nlayout = 3', r"needs a \[\[layout\]\]"),
        ('script = "train.py"\nlayout = [3]', r"needs a \[\[layout\]\]"),
        ('script = "train.py"\n[[layout]]\nranks = 1', "a proof needs two layouts or more"),
        ('script = "train.py"\n[[layout]]\nbatch = 1', "prove.toml: say how many ranks"),
        ('script = "train.py"\n[[layout]]\nranks = true', "ranks must be a number from 1 to .*, not True"),
        ('script = "train.py"\n[[layout]]\nranks = 1.5', "ranks must be a number from 1 to .*, not 1.5"),
        ('script = "train.py {x}"\n[[layout]]\nranks = 1\nx = [1]', r"x must be a number or a text, not \[1\]"),
        ('script = "train.py {x}"\n[[layout]]\nranks = 1\nx = true', "x must be a number or a text, not True"),
        ('script = "train.py {x}"' + LAYOUTS, "line has {x}, which the layout 'ranks=1' does not say"),
        ('script = "train.py \'x"' + LAYOUTS, "the script's line cannot be read, no closing quotation: train.py 'x"),
        (
            'script = "train.py"\nstep = 3' + LAYOUTS,
            "'step' is not known; it may say double, layout, resume, script, search, steps",
        ),
        ('script = "train.py"\nsteps = 0' + LAYOUTS, "steps must be a number from 1 on, not 0"),
        ('script = "train.py"\nsteps = "3"' + LAYOUTS, "steps must be a whole number"),
        ('script = "train.py"\ndouble = 1' + LAYOUTS, "double must be true or false"),
        ('script = "absent.py"' + LAYOUTS, "there is no script absent.py"),
        ('script = "srun train.py"' + LAYOUTS, "srun"),
    ],
)
def test_prove_toml(folder, capsys, text, message):
    (folder / "prove.toml").write_text(text)
    assert re.search(message, refused(capsys))


def test_there_is_no_prove_toml(folder, capsys):
    said = refused(capsys)
    assert says(said, "prove.toml", "--layout", "--")
    assert "there is no other.toml" in refused(capsys, "other.toml")
    assert "cannot be read" in refused(capsys, str(folder))
    (folder / "prove.toml").write_bytes(b"\xff\xfe\x00")
    assert "prove.toml cannot be read" in refused(capsys)


def test_what_the_command_misses(folder, capsys):
    assert says(refused(capsys, *TWO), "--", "--", "train.py", "--batch")
    assert says(refused(capsys, "--", "train.py", "--batch", "3"), "--layout")
    assert says(refused(capsys, *TWO[:-1], "0", *LINE), "--steps", "1", "0")
    assert says(refused(capsys, *TWO, *LINE), "train.py")


@drawn(st.text())
def test_any_text_is_read_or_refused_in_one_line(tmp_path_factory, text):
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"any\.toml") as caught:  # no text drawn here is a proof
        run_layouts.from_file(str(file))
    assert "\n" not in str(caught.value)


@drawn(st.text(alphabet=st.sampled_from("ranks=tp 0123456789,;x")))
def test_any_layout_is_read_or_refused_in_one_line(text):
    said = ""
    try:
        made = run_layouts.for_function(["ranks=1 name=first", text])
    except ValueError as error:
        said = str(error)
    assert "\n" not in said
    assert said or made[1].ranks >= 1


# --- scripts


@pytest.mark.parametrize(
    ("line", "texts", "options", "message"),
    [
        ('train.py "open', ["ranks=1", "ranks=2"], {}, "the script's line cannot be read, no closing quotation: train"),
        ("train.py {batch}", ["ranks=1", "ranks=2"], {}, "{batch}, which the layout 'ranks=1' does not say"),
        ("train.py", ["ranks=1"], {}, "a proof needs two layouts or more"),
        ("train.py", ["ranks=1", "ranks=2"], {"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ("no_such.py", ["ranks=1", "ranks=2"], {}, "no_such.py"),
    ],
)
def test_a_script_from_python(folder, line, texts, options, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        script(line, texts, **options)
    assert "\n" not in str(caught.value)


def test_layouts_with_other_global_batches(folder, capsys):
    write(folder)
    flags = ("--layout", "ranks=1 batch=8", "--layout", "ranks=2 batch=2", "--layout", "ranks=2 batch=4", *LINE)
    said = told(capsys, *flags)
    assert said["ranks=2 batch=4"] is None
    assert said["ranks=2 batch=2"] == (
        "a step of ranks=2 batch=2 has 4 samples, and one of ranks=1 batch=8 has 8: choose layouts whose "
        "ranks × batch × accumulate are the same"
    )


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        ("model[0].weight.data *= random.random()", "random.random"),
        ("model[0].weight.data *= np.random.rand()", "numpy.rand"),
        ("model[0].weight.data *= np.random.default_rng().random()", "numpy.random.default_rng"),
    ],
)
def test_a_script_that_is_not_the_same_twice(folder, capsys, draw, name):
    text = write(folder, model=draw)
    said = refused(capsys, *TWO, *LINE)
    assert says(said, "ranks=1", "batch=8", "1")
    assert f"{line_of(text, draw)} ({name}" in said
    assert "draws without a seed" in said


def test_a_script_that_takes_no_step(folder, capsys):
    write(folder, step="pass")
    said = refused(capsys, *TWO, *LINE)
    assert says(said, "ranks=1", "batch=8")


def test_a_reference_that_fails(folder, capsys):
    text = write(folder, setup="raise OSError('no data')")
    said = refused(capsys, *TWO, *LINE)
    where = line_of(text, "no data")
    assert f"the reference, ranks=1 batch=8: train.py: rank 0 raised OSError: no data, at {where}" in said


@pytest.mark.parametrize(
    ("parts", "message"),
    few([
        ({"setup": "if kind == 'b' and rank: raise OSError('no data')"}, "^train.py: rank 1 raised OSError: no data"),
        ({"setup": "if kind == 'b': sys.exit('no data')"}, "^train.py ended by sys.exit: no data"),
        ({"step": "if kind == 'a': optimizer.step()"}, "^ranks=2 batch=4 kind=b took no step of an optimizer after"),
        ({"model": "if kind == 'b': model = torch.nn.Linear(16, 5)"},
         "^the model of ranks=2 batch=4 kind=b has other parameters than the reference's: it has bias, weight …, the "
         "reference 0.bias, 0.weight, 2.bias …$"),
        ({"model": "if kind == 'b': model.insert(1, torch.nn.Linear(32, 32))"},
         "^2 parameters match nowhere in the reference, as 1.weight: shape"),
        ({"model": "if kind == 'b': del model[2]"}, "^2 parameters of the reference are on no rank, as 2.weight$"),
    ]),
    ids=["raises", "exits", "no step", "other parameters", "one more", "one less"],
)  # fmt: skip
def test_the_others_are_reported_where_one_fails(folder, capsys, parts, message):
    write(folder, **parts)
    said = told(capsys, *KINDS)
    assert said[GOOD] is None
    assert re.search(message, said[BAD])
    assert "\n" not in said[BAD]


# --- data


class Graph:
    """An object of which nobody knows what is in it."""

    def __init__(self, x):
        self.x = x


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    name: str = "n"


def test_samples_within_other_things_are_seen():
    x = torch.arange(6.0).reshape(2, 3)
    for value in (x, [x], (1, [x]), {"k": {"x": x}}, Batch(x), x.numpy(), UserDict(x=x)):
        ((_, seen),) = rank_record.input_tensors((value,), {})
        assert torch.equal(seen, x)
    names = [name for name, _ in rank_record.input_tensors((x, "mode"), {"tokens": x, "other": x})]
    assert names == ["tokens", "input 0", "other"]
    ((_, texts),) = rank_record.input_tensors((["a", "b", "a"],), {})
    assert texts[0] == texts[2] != texts[1]
    ((_, numbers),) = rank_record.input_tensors(([3, 4],), {"flag": True})
    assert numbers.tolist() == [3, 4]
    assert rank_record.unseen_inputs((Graph(x), None, 3), {"also": [Graph(x)]}) == ["Graph"]


class OfGraphs(nn.Linear):
    def forward(self, graph):
        return super().forward(graph.x)


def test_data_that_cannot_be_hashed():
    with pytest.raises(ProveError) as caught:
        prove(lambda: OfGraphs(4, 4), lambda model, batch: model(Graph(batch)).mean(), [torch.ones(2, 4)])
    assert says(str(caught.value), "ranks=1", "Graph")


# --- engines


def build():
    return nn.Linear(4, 4)


def loss(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("batches", "texts", "options", "message"),
    [
        ([], ["ranks=1", "ranks=2"], {}, "0 steps need as many batches, and there are 0"),
        ([torch.ones(4, 4)], ["ranks=1", "ranks=2"], {"steps": 2}, "2 steps need as many batches, and there are 1"),
        ([torch.ones(6, 4)], ["ranks=1", "ranks=4"], {},
         "ranks=4: 6 samples of batch 1 do not divide into 4 data-parallel ranks and 1 micro-batch$"),
        ([torch.ones(6, 4)], ["ranks=1", "ranks=2 accumulate=2"], {},
         "into 2 data-parallel ranks and 2 micro-batches$"),
        ([(torch.ones(4, 4), torch.ones(3))], ["ranks=1", "ranks=2"], {}, r"batch 1 has tensors of \[3, 4\] samples"),
        (["text"], ["ranks=1", "ranks=2"], {}, "batch 1 has no tensor with an axis of samples"),
        ([torch.ones(4, 4)], ["ranks=1", "ranks=4 tp=3"], {}, "ranks=4 tp=3: 4 ranks do not divide into groups"),
        ([torch.ones(4, 4)], ["ranks=1", "ranks=2 tp=4"], {}, "ranks=2 tp=4: 2 ranks do not divide into groups"),
        ([torch.ones(4, 4)], ["ranks=1", 2], {}, "a layout is a text, .*, or a dict, not 2"),
        ([torch.ones(4, 4)], ["ranks=1", {"ranks": 1}], {}, "two layouts are the same, ranks=1 and ranks=1"),
        ([torch.ones(4, 4)], ["ranks=1"], {}, "a proof needs two layouts or more"),
    ],
)  # fmt: skip
def test_what_an_engine_is_given(batches, texts, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        prove(build, loss, batches, layouts=texts, **options)
    assert "\n" not in str(caught.value)


def neither(model, layout):
    return {"bad": 3}[layout.values["engine"]]


def test_an_engine_that_returns_no_module_or_fails():
    made = prove(build, loss, [torch.ones(4, 4)], neither, ["ranks=1", "ranks=2 engine=bad", "ranks=2 engine=absent"])
    assert made.failed["ranks=2 engine=bad"] == (
        "the training: rank 0 raised TypeError: parallelize returned int: it has to return a module, an engine that is "
        "one, or Parallel"
    )
    assert re.fullmatch(
        r"the training: rank 0 raised KeyError: 'absent', at test_prove_bad_input.py:\d+",
        made.failed["ranks=2 engine=absent"],
    )
    assert "Traceback" in next(one.details for one in made.layouts if one.name == "ranks=2 engine=absent")
