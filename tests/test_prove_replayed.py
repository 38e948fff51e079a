"""``pardemo prove --record`` and ``--replay``: layouts, and other engines, on the inputs of one run."""

import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import few, says
from safetensors.torch import load_file, save_file

from pardemo import cli, project
from pardemo.script.compare.token_outputs import compare_calls
from pardemo.script.record.input_follower import leaves_of, with_leaves
from pardemo.script.record.model_outputs import REFERENCE, token_logits
from pardemo.script.record.recorded_inputs import INDEX, RecordedInputs, read_recorded_inputs
from pardemo.script.record.recorded_rows import SampleRows, same_rows, token_rows

SCRIPTS = project.root() / "tests" / "replayed"
PPO = f"{SCRIPTS / 'ppo.py'} --batch {{batch}} --accumulate {{accumulate}} --wrong {{wrong}}"


def prove(capsys, *options, layouts=(), script=()):
    """The exit status and the JSON of a command, or what it says on the error stream."""
    words = [word for layout in layouts for word in ("--layout", layout)]
    status = cli.main(["prove", *options, *words, "--json", "--", *script])
    printed = capsys.readouterr()
    return status, json.loads(printed.out) if printed.out else printed.err.strip().rpartition("\n")[2]


@pytest.fixture
def replayed(tmp_path, capsys):
    """Records a script in one layout, and replays that in others: findings and errors by layout, and the notes."""

    def run(line, reference, *layouts, double=True, steps=2):
        options = [*["--double"] * double, "--steps", str(steps)]
        folder = str(tmp_path / "recorded")
        assert prove(capsys, *options, "--record", folder, layouts=[reference], script=line.split())[0] == 0
        status, verdict = prove(capsys, *options, "--replay", folder, layouts=layouts, script=line.split())
        assert verdict["replayed"]
        assert status == (0 if verdict["equal"] else 2 if not verdict["findings"] else 1)
        found = {layout: [one for one in verdict["findings"] if one["layout"] == layout] for layout in layouts}
        return found, {one["layout"]: one["error"] for one in verdict["layouts"]}, "\n".join(verdict["notes"])

    return run


# --- samples that are drawn on each rank


def at(part):
    """``ppo.py:95``: the last line there with these words."""
    lines = (SCRIPTS / "ppo.py").read_text().splitlines()
    return f"ppo.py:{max(number for number, line in enumerate(lines, 1) if part in line)}"


def test_faults_of_a_ppo_loop_whose_ranks_sample_for_themselves(replayed):
    causes = ("nothing", "advantages", "old", "tokens")
    layouts = {wrong: f"ranks=2 batch=2 accumulate=2 wrong={wrong}" for wrong in causes}
    found, errors, notes = replayed(PPO, "ranks=1 batch=8 accumulate=1 wrong=nothing", *layouts.values())
    assert not any(errors.values())
    assert found[layouts["nothing"]] == []
    (finding,) = found[layouts["tokens"]]
    assert (finding["cause"], finding["step"], finding["what"]) == ("loss", 1, "gradients")
    for wrong in ("advantages", "old"):
        (finding,) = found[layouts[wrong]]
        assert (finding["cause"], finding["step"], finding["what"]) == ("loss", 1, "gradients")
        read = {"old": f"{at('- old[part]')} (sub)", "advantages": f"{at('gain = ')} (mul)"}
        assert f"what the loss reads at {read[wrong]} is not what it was" in finding["why"]
    assert says(notes, f"{layouts['nothing']}: replayed: random numbers at ppo.py:", "(multinomial)")


@pytest.mark.nightly
def test_without_replay_nothing_is_known_of_it(capsys):
    layouts = ["ranks=1 batch=8 accumulate=1 wrong=nothing", "ranks=2 batch=4 accumulate=1 wrong=nothing"]
    status, verdict = prove(capsys, "--double", layouts=layouts, script=PPO.split())
    assert (status, verdict["findings"]) == (2, [])
    assert says(verdict["layouts"][1]["error"], f"{at('chosen = ')} (multinomial)", "draws other random numbers")


def test_samples_from_elsewhere_are_fed_to_the_model_and_its_loss(replayed):
    """What is computed of a layout's own samples before the model is called is nothing that a replay knows."""
    ends = "batch=2 accumulate=2"
    right, early, wrong = (
        f"ranks=2 {ends} {how}" for how in ("late=1 wrong=nothing", "late=0 wrong=nothing", "late=1 wrong=tokens")
    )
    line = f"{PPO} --outside 1 --late {{late}}"
    found, errors, notes = replayed(
        line, "ranks=1 batch=8 accumulate=1 late=1 wrong=nothing", right, early, wrong, steps=1
    )
    assert found[right] == []
    assert errors[right] is None
    assert found[early] == []
    line = at("loss * ranks / counted")
    assert says(errors[early], "what the script made of its own samples", f"{line} (div): the number")
    assert [one["cause"] for one in found[wrong]] == ["loss"]
    assert says(notes, f"{right}: replayed: the model's inputs (4 micro-batches)", f"{at('counted = ')} (sum)")


@pytest.mark.parametrize("how", few(["noise", "layers", "critic"], 0))
def test_what_a_model_draws_is_of_the_samples_that_it_has(replayed, how):
    """Noise of rows that ranks take in turn, also where it is computed again; layers left out; two backward passes."""
    line = f"{SCRIPTS / 'sampled.py'} --batch {{batch}} --accumulate {{accumulate}} --how {how}"
    whole, halves = "ranks=1 batch=8 accumulate=1", "ranks=1 batch=4 accumulate=2"
    other = "ranks=2 batch=4 accumulate=1" if how == "layers" else "ranks=2 batch=2 accumulate=2"
    layouts = [other, whole] if how == "layers" else [other]
    found, errors, notes = replayed(line, halves if how == "layers" else whole, *layouts)
    assert (found[other], errors[other]) == ([], None)
    if how == "layers":
        drawn = "sampled.py:43 (rand)"
        assert f"{drawn} draws other random numbers" in errors[whole], "its samples were in two micro-batches"
        assert f"{whole}: not replayed: {drawn}" in notes


LOADER = """
import random, sys, torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
class Mean(nn.Sequential):
    def forward(self, tokens, labels, count):
        return F.cross_entropy(super().forward(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / count
dist.init_process_group("gloo")
rank, ranks, how = dist.get_rank(), dist.get_world_size(), sys.argv[2]
torch.manual_seed(0)
net = (Mean if how == "count" else nn.Sequential)(nn.Embedding(9, 8), nn.Linear(8, 9))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
order, batch = random.Random(rank + ranks), int(sys.argv[1])
for step in range(3):
    rows = torch.tensor([[order.randrange(9) for _ in range(5)] for _ in range(batch)])
    if how == "pairs":
        better, worse = net(torch.cat([rows, 8 - rows])).square().mean((1, 2)).chunk(2)
        loss = F.softplus(worse - better).mean()
    if how != "pairs":
        tokens, labels = rows[:, :-1], rows[:, 1:].masked_fill(rows[:, 1:] == 0, -100)
    if how == "count":
        loss = net(tokens, labels, int((labels != -100).sum()))
    elif how == "labels":
        loss = F.cross_entropy(net(tokens).flatten(0, 1), labels.flatten())
        loss = loss * (labels != -100).sum() / dist.nn.all_reduce((labels != -100).sum()) * ranks
    loss.backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step(); optimizer.zero_grad()
"""


CUT = """
import sys, numpy as np, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, ranks, known = dist.get_rank(), dist.get_world_size(), sys.argv[1] == "ids"
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 8), nn.Embedding(8, 8)
    def forward(self, tokens, position_ids=None):
        return self.tokens(tokens) + self.places(mine if position_ids is None else position_ids)
torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
draw, blocks = np.random.default_rng(rank + ranks), torch.arange(8).chunk(2 * ranks)
mine = torch.cat([blocks[rank], blocks[-1 - rank]])[None]
for step in range(3):
    tokens = torch.from_numpy(draw.integers(0, 9, (4, 8)))[:, mine[0]]
    net(tokens, **({"position_ids": mine} if known else {})).square().mean().backward()
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize("how", few(["ids", "none"]))
def test_tokens_of_a_cut_sequence_are_those_of_the_position_ids(tmp_path, replayed, how):
    script = tmp_path / "train.py"
    script.write_text(CUT)
    found, errors, notes = replayed(f"{script} {how}", "ranks=1", "ranks=2 cp=2")
    assert found["ranks=2 cp=2"] == []
    if how == "ids":
        assert errors["ranks=2 cp=2"] is None
        assert "replayed: the model's inputs (4 micro-batches)" in notes
    else:
        assert "give the model position_ids" in errors["ranks=2 cp=2"]


@pytest.mark.parametrize("how", few(["labels", "pairs", "count"]))
def test_a_loader_of_ones_own(tmp_path, replayed, how):
    script = tmp_path / "train.py"
    script.write_text(LOADER)
    layouts = "ranks=1 batch=8", "ranks=2 batch=4"
    found, errors, notes = replayed(f"{script} {{batch}} {how}", *layouts)
    assert found[layouts[1]] == []
    if how == "pairs":
        assert says(errors[layouts[1]], "train.py:", "takes half of the model's rows")
    elif how == "count":
        assert says(errors[layouts[1]], "of its own samples, at the model's call, 0.2: the number", "was recorded")
    else:
        assert errors[layouts[1]] is None
        assert "(cross_entropy)" in notes


def test_routes_are_those_of_the_reference(replayed):
    layouts = [f"ranks=2 batch=4 wrong={wrong}" for wrong in ("nothing", "sum", "auxiliary")]
    line = f"{SCRIPTS / 'experts.py'} --batch {{batch}} --wrong {{wrong}}"
    found, errors, notes = replayed(line, "ranks=1 batch=8 wrong=nothing", *layouts)
    assert not any(errors.values())
    assert found[layouts[0]] == [], "without their routes outputs would differ"
    assert [(one["cause"], one["factor"]) for one in found[layouts[1]]] == [("sum-for-mean", pytest.approx(2))]
    assert [(one["cause"], one["module"]) for one in found[layouts[2]]] == [("loss", "2.router.scores")]
    assert says(notes, "routes of 0.router (topk):", "would be others")


# --- trainers


@pytest.mark.nightly
def test_a_trainers_loss_is_fed_its_whole_batch(tmp_path, replayed):
    right, wrong = "ranks=2 batch=2 accumulate=2 wrong=nothing", "ranks=2 batch=4 accumulate=1 wrong=ranks"
    words = f"--out {tmp_path / 'out'} --batch {{batch}} --accumulate {{accumulate}} --wrong {{wrong}}"
    reference = "ranks=1 batch=8 accumulate=1 wrong=nothing"
    found, errors, notes = replayed(f"{SCRIPTS / 'trainer.py'} {words}", reference, right, wrong, double=False)
    assert not any(errors.values())
    assert found[right] == []
    assert [(one["cause"], one["factor"]) for one in found[wrong]] == [("sum-for-mean", pytest.approx(2))]
    assert says(notes, f"{right}: replayed: the model's inputs")


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not among this environment's packages")
@pytest.mark.parametrize("trainer", ["grpo", "dpo"])
def test_trls_trainers_at_their_defaults(tmp_path, replayed, trainer):
    words = f"--trainer {trainer} --out {tmp_path / 'out'} --batch {{batch}} --accumulate {{accumulate}}"
    other = "ranks=2 batch=4 accumulate=1"
    found, errors, notes = replayed(
        f"{SCRIPTS / 'trl_trainers.py'} {words}", "ranks=1 batch=8 accumulate=1", other, double=False
    )
    assert (found[other], errors[other]) == ([], None)
    assert ("(multinomial)" in notes) == (trainer == "grpo")


# --- another engine


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("recorded") / "decoder")
    assert cli.main(["prove", "--record", folder, "--layout", "ranks=1", "--", str(SCRIPTS / "decoder.py")]) == 0
    return folder


@pytest.mark.parametrize("wrong", few(["nothing", "mask", "temperature", "weights"], 0, 1))
def test_another_engine_token_by_token(decoder, capsys, wrong):
    script = [str(SCRIPTS / "engine.py"), "{samples}", "--wrong", wrong]
    status, verdict = prove(capsys, "--replay", decoder, "--outputs", script=script)
    assert (status, verdict["equal"], verdict["tokens"]) == (int(wrong != "nothing"), wrong == "nothing", 36)
    assert verdict["allowed"] < 1e-3
    modules = {"mask": ("blocks.1.linear_proj", "layers.1.o"), "temperature": ("(root)", "(root)")}
    assert (verdict["module"], verdict["reference_module"]) == modules.get(wrong, ("", ""))
    assert bool(verdict["unmatched"]) == (wrong == "weights")
    assert verdict["first"] == (None if wrong == "nothing" else [0, 1])
    assert (verdict["largest"] > 1) == (wrong != "nothing")


def _call(chances, outputs=(), ways=1):
    """What a call of a model leaves: log-probabilities [b, s - 1], and outputs of modules without parameters."""
    kept = {f"output|{number}|{name}|0": value for number, name, value in outputs}
    return kept | {"log-probabilities": torch.stack([chances] * ways)}


def test_padding_is_not_compared():
    truth, mask = -torch.rand(2, 5).double(), torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    outputs = torch.randn(2, 6, 3).double()
    other, wrong = truth.clone(), outputs.clone()
    other[0, :2], wrong[0, :2] = 0, 0
    made = compare_calls("e.py", "", _call(truth), _call(other), mask)
    assert (made.equal, made.tokens) == (True, 8)
    assert compare_calls("e.py", "", _call(truth), _call(other), torch.ones_like(mask)).different == 2
    other[1, 3], wrong[1, 4] = -9, 9
    reference = _call(truth, [(0, "a", outputs), (1, "b", outputs)])
    made = compare_calls("e.py", "", reference, _call(other, [(9, "b", wrong), (10, "a", outputs)]), mask)
    assert (made.different, made.first, made.module) == (1, (1, 4), "b")


def test_the_first_module_is_the_first_that_ran():
    truth, mask, outputs = -torch.rand(1, 3).double(), torch.ones(1, 4).bool(), torch.randn(1, 4, 3).double()
    names = [(99, "early", outputs), (100, "late", outputs)]
    wrong = [(number, name, output + 1) for number, name, output in names]
    made = compare_calls("e.py", "", _call(truth, names), _call(truth - 1, reversed(wrong)), mask)
    assert made.module == "early"


def test_as_many_samples_as_tokens_may_be_either_way():
    tokens, logits = torch.randint(7, (4, 4)), torch.randn(4, 4, 7)
    assert [bool((way == logits).all()) for way in token_logits(logits, tokens)] == [True, False]
    assert token_logits(logits[..., :1], tokens) == []
    assert len(token_logits(logits[:2].transpose(0, 1), tokens[:2])) == 1
    right, other = -torch.rand(2, 4, 3).double()
    engine = {"log-probabilities": torch.stack([other, right])}
    assert compare_calls("e.py", "", _call(right), engine, torch.ones(4, 4).bool()).equal


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"log-probabilities": torch.full((1, 4, 9), float("nan")).double()}, "of the reference are not finite"),
        ({"vocabulary": torch.tensor(48)}, "24 logits of each token, and the reference 48: have it gather"),
    ],
)
def test_outputs_that_nothing_compares_with_are_refused(decoder, tmp_path, capsys, tensors, message):
    other = tmp_path / "other"
    shutil.copytree(decoder, other)
    (other / INDEX).unlink()
    save_file(load_file(other / REFERENCE) | tensors, other / REFERENCE)
    RecordedInputs(str(other), {"ranks": 1}, 1, 1, 2, False).write()
    script = [str(SCRIPTS / "engine.py"), "{samples}"]
    status, line = prove(capsys, "--replay", str(other), "--outputs", script=script)
    assert (status, message in line) == (2, True), line


@pytest.mark.nightly
def test_megatron_core_against_transformers(tmp_path, capsys):
    folder, status = str(tmp_path), {}
    assert prove(capsys, "--record", folder, layouts=["ranks=1"], script=[str(SCRIPTS / "gpt2.py")])[0] == 0
    for wrong in ("nothing", "gelu"):
        script = [str(SCRIPTS / "megatron_engine.py"), "{samples}", "--wrong", wrong]
        status[wrong], verdict = prove(capsys, "--replay", folder, "--outputs", script=script)
        assert verdict["unmatched"] == {}
    assert status == {"nothing": 0, "gelu": 1}
    assert verdict["different"] == 44
    there = ("decoder.layers.0.mlp.linear_fc2", "transformer.h.0.mlp.c_proj")
    assert (verdict["module"], verdict["reference_module"]) == there, "whose input is what differs"


def test_an_engine_that_is_called_with_other_samples(decoder, capsys):
    status, line = prove(capsys, "--replay", decoder, "--outputs", script=[str(SCRIPTS / "decoder.py"), "{samples}"])
    # it trains on the same samples, of which its first step is the reference's
    assert (status, line["equal"]) == (0, True)
    status, line = prove(capsys, "--replay", decoder, "--outputs", script=[str(SCRIPTS / "experts.py")])
    assert (status, "calls no model with the recorded samples" in line) == (2, True)


@pytest.mark.nightly
def test_the_examples_print_what_the_page_shows(tmp_path):
    page = (project.root() / "docs" / "prove.md").read_text(encoding="utf-8")
    (tmp_path / "tests").symlink_to(project.root() / "tests")
    words = page[page.index("<!-- example of a replay:") :]
    for commands, printed in (re.findall(r"```\w+\n(.*?)```", words, flags=re.S)[at : at + 2] for at in (0, 2)):
        lines = [shlex.split(line) for line in commands.replace("\\\n", " ").splitlines()]
        runs = [
            subprocess.run([sys.executable, "-m", *line], cwd=tmp_path, capture_output=True, text=True, check=False)
            for line in lines
        ]
        assert [run.returncode for run in runs] == [0, 1], runs[-1].stderr
        assert "".join(run.stdout for run in runs).endswith(printed)


# --- folders, and what is refused


@pytest.fixture
def folder(tmp_path):
    """A folder as it is recorded, of one rank and two steps."""
    for step in (1, 2):
        save_file({"0|call/0/0.0": torch.arange(8)}, tmp_path / f"step{step}.rank0.safetensors")
    RecordedInputs(str(tmp_path), {"ranks": 1, "batch": 8}, 1, 1, 2, False).write()
    return tmp_path


def _changed(folder, **values):
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(index | values))


def _forged(folder, content):
    """Another file in place of a step's, with an index that has its checksum."""
    (folder / "step1.rank0.safetensors").write_bytes(content)
    (folder / INDEX).unlink()
    RecordedInputs(str(folder), {"ranks": 1, "batch": 8}, 1, 1, 2, False).write()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / INDEX).unlink(), "has no recorded inputs"),
        (lambda folder: (folder / INDEX).write_text("{"), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: (folder / INDEX).write_text("[]"), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: _changed(folder, format="another"), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: _changed(folder, version=1), "was recorded in version 1, and this one reads 2"),
        (lambda folder: _changed(folder, ranks=0), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: _changed(folder, replicas="two"), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: _changed(folder, steps=3), "cannot be read as pardemo prove --record writes it"),
        (lambda folder: (folder / "step2.rank0.safetensors").unlink(), "step2.rank0.safetensors is missing"),
        (lambda folder: (folder / "step1.rank0.safetensors").write_bytes(b"\x80"), "is not what was written"),
        (lambda folder: _forged(folder, b"\x80"), "step1.rank0.safetensors has no recorded inputs of a step"),
        (lambda folder: _forged(folder, b"\2\0\0\0\0\0\0\0[]"), "step1.rank0.safetensors has no recorded inputs"),
        (shutil.rmtree, "has no recorded inputs"),
    ],
)
def test_folders_that_are_broken_are_refused_in_one_line(folder, capsys, change, message):
    assert read_recorded_inputs(str(folder)).name == "ranks=1 batch=8"
    change(folder)
    status, line = prove(capsys, "--replay", str(folder), layouts=["ranks=2 batch=4"], script=["t.py", "{batch}"])
    assert status == 2
    assert line.startswith("pardemo prove: ")
    assert message in line


@pytest.mark.parametrize(
    ("options", "layouts", "message"),
    [
        (["--record", "new"], [], "say one layout to record"),
        (["--record", "new"], ["ranks=1 batch=8", "ranks=2 batch=4"], "say one layout to record"),
        (["--record", "new", "--replay", "{folder}"], ["ranks=1 batch=8"], "leave --replay away"),
        (["--record", "{script}"], ["ranks=1 batch=8"], "is a file"),
        (["--record", "{other}"], ["ranks=1 batch=8"], "has other things in it, as notes"),
        (["--record", "{mixed}"], ["ranks=1 batch=8"], "has other things in it, as notes"),
        (["--record", "new"], ["ranks=2 pp=2 batch=8"], "without pipeline stages"),
        (["--replay", "{folder}"], [], "say the layouts that are fed"),
        (["--replay", "{folder}"], ["ranks=1 batch=8"], "two layouts are the same"),
        (["--replay", "{folder}"], ["ranks=4 pp=2 batch=4"], "are not replayed over pipeline stages"),
        (["--replay", "{folder}", "--stop"], ["ranks=2 batch=4"], "leave --record and --replay away"),
        (["--outputs"], ["ranks=1 batch=8"], "say one script beside recorded inputs"),
        (["--replay", "{folder}", "--outputs"], ["ranks=1 batch=8"], "it has nothing of a model's call"),
    ],
)
def test_what_the_command_refuses(folder, tmp_path_factory, capsys, options, layouts, message):
    other = tmp_path_factory.mktemp("other")
    (other / "notes").touch()
    mixed = tmp_path_factory.mktemp("mixed") / "recorded"
    shutil.copytree(folder, mixed)
    (mixed / "notes").touch()
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.touch()
    words = {"folder": folder, "other": other, "mixed": mixed, "script": script}
    options = [str(other / "new") if word == "new" else word.format(**words) for word in options]
    status, line = prove(capsys, *options, layouts=layouts, script=[str(script), "{batch}"])
    assert status == 2
    assert message in line


def test_an_earlier_recording_makes_room_for_a_new_one(folder, tmp_path_factory, capsys):
    script = tmp_path_factory.mktemp("scripts") / "train.py"
    script.write_text(LOADER)
    words = [str(script), "{batch}", "labels"]
    record = ["--steps", "2", "--record", str(folder)]
    status, index = prove(capsys, *record, layouts=["ranks=2 batch=4"], script=words)
    assert (status, index["layout"], index["replicas"]) == (0, {"ranks": 2, "batch": 4}, 2)
    names = {f"step{step}.rank{rank}.safetensors" for step in (1, 2) for rank in (0, 1)}
    assert {entry.name for entry in folder.iterdir()} == {*names, INDEX}
    step = read_recorded_inputs(str(folder)).step(0)
    assert [part.shape for part in step.parts("call/0/0.0")] == [(4, 4), (4, 4)]


# --- parts


def test_arguments_are_replaced_wherever_they_are():
    given = ([torch.zeros(2)], {"mask": torch.ones(2), "more": (None, 3)})
    leaves = dict(leaves_of(given))
    assert set(leaves) == {"0.0", "1.mask", "1.more.0", "1.more.1"}
    assert with_leaves(given, leaves) is given
    changed = with_leaves(given, leaves | {"1.mask": None, "1.more.1": 4})
    assert changed[0] is given[0]
    assert changed[1] == {"mask": None, "more": (None, 4)}
    assert given[1]["more"] == (None, 3), "what was given is left as it is"


def test_rows_are_the_same_without_padding():
    recorded = torch.tensor([[9, 8, 7], [5, 6, 0], [6, 7, 0]])
    own = torch.tensor([[5, 6], [6, 7]])
    assert same_rows(own, recorded).tolist() == [[False, True, False], [False, False, True]]
    assert same_rows(recorded, own).tolist() == [[False, False], [True, False], [False, True]]
    assert same_rows(torch.tensor([[1, 6, 7]]), torch.tensor([[6, 7]])).tolist() == [[True]], "padded in front"
    assert same_rows(own, torch.tensor([[6, 8]])).tolist() == [[False], [False]]


def test_rows_of_a_router_are_those_of_the_ranks_tokens():
    rows = torch.tensor([2, 3])
    first = next(token_rows(SampleRows(rows, 4, False), 24, 12, 1))  # 4 samples of 6 tokens, as [b, s]
    assert first.tolist() == list(range(12, 24))
    zigzag = SampleRows(rows, 4, False, torch.tensor([0, 1, 4, 5]))
    assert next(token_rows(zigzag, 24, 8, 1)).tolist() == [12, 13, 16, 17, 18, 19, 22, 23]
    assert list(token_rows(zigzag, 16, 8, 1)) == [], "position 5 of 4"


def test_a_tensor_of_a_micro_batch_is_of_the_one_that_has_the_samples():
    parts = [torch.tensor(0.0), torch.tensor(1.0)]
    assert SampleRows(torch.tensor([5, 6]), 8, False).part_of(parts) is parts[1]
    assert SampleRows(torch.tensor([3, 4]), 8, False).part_of(parts) is None
