"""Checkpoints of the engines: training goes on bit by bit, on any number of ranks; a folder is whole, or not there, or
refused in one line on every rank, which leaves the engine as it was; and none of it runs code."""

import copy
import itertools
import json
import os
import pickle
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from conftest import RunsCode, few
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_zero_optimizers import Plainly
from torch import nn
from torch.distributed import checkpoint as dcp

from pardemo import RankError, World
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, checkpoint, load, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
ADAMW = partial(torch.optim.AdamW, lr=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Net(nn.Module):
    """Layers to train of a size that does not divide, one that is frozen, a buffer."""

    def __init__(self, scale=(), dtype=torch.float32):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7)])
        self.frozen = nn.Linear(7, 3).to(dtype).requires_grad_(False)
        self.register_buffer("scale", torch.ones(scale))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (self.frozen(x) * self.scale.sum()).float().square().sum()


def make(stage, optimizer=ADAMW, net=Net, seed=0, dtype=torch.float32, **options):
    made = gpt.seeded(net, seed)
    return STAGES[stage](made if dtype == torch.float32 else made.to(dtype), optimizer, **options)


def steps(engine, count=1, begin=0):
    """Steps on a batch that all ranks share."""
    dtype, size = engine.module.frozen.weight.dtype, dist.get_world_size()
    for step in range(begin, begin + count):
        part = gpt.numbers(12, 5, seed=step).to(dtype)[dist.get_rank() :: size]
        (engine(part) * size).backward()
        engine.step()
    return engine


def everything(engine):
    """An engine's values on this rank, to compare."""

    def local(value):
        return getattr(value, "_local_tensor", value).tolist() if torch.is_tensor(value) else value

    shards = engine.shards().values()
    states = [{k: local(v) for k, v in engine.optimizer.state.get(shard.master, {}).items()} for shard in shards]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    masters = [local(shard.master.detach()) for shard in shards]
    with engine.full_parameters() as net:
        values = {name: tensor.tolist() for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    return states, str(groups), values, masters


def refuses(engine, folder, message, error=ValueError):
    """In one line, on every rank, and the engine is as it was."""
    before = everything(engine)
    with pytest.raises(error, match=message) as raised:
        load(engine, folder)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000
    assert everything(engine) == before
    dist.barrier()


def on_rank_0(call):
    dist.barrier()
    if dist.get_rank() == 0:
        call()
    dist.barrier()


def whole_values(engine):
    with engine.full_parameters() as net:
        return [p.detach().clone() for p in net.parameters()]


def written(stage, folder, dtype=torch.float32):
    engine = steps(make(stage, dtype=dtype), 2)
    engine.optimizer.param_groups[0]["lr"] = 0.05
    engine.module.scale.fill_(0.5)
    save(engine, folder)
    return whole_values(steps(engine, 3, begin=2))


def resumed(stage, folder, dtype=torch.float32):
    engine = make(stage, seed=1, dtype=dtype)
    load(engine, folder)
    return whole_values(steps(engine, 3, begin=2))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("before", "after"), few([(2, 4), (4, 1), (1, 3)], 0, 1))
def test_training_goes_on_on_another_number_of_ranks(world_of, tmp_path, stage, before, after):
    expected = world_of(before).run(written, stage, tmp_path / "at")[0]
    for found in world_of(after).run(resumed, stage, tmp_path / "at"):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert [p.name for p in tmp_path.iterdir()] == ["at"], "nothing half-written is left"


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_as_many_ranks_it_goes_on_bit_by_bit(world_of, tmp_path, stage, n, dtype):
    expected = world_of(n).run(written, stage, tmp_path / "at", dtype)
    for found, theirs in zip(world_of(n).run(resumed, stage, tmp_path / "at", dtype), expected, strict=True):
        assert all(map(torch.equal, found, theirs))


class CountsInStates(Plainly):
    """A step count that is a Python number in the state of each parameter, as older optimizers keep it."""

    def change(self, p):
        count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return p.grad / count


class PerRank(torch.optim.SGD):
    """Keeps a number that is no part of any parameter, and differs from rank to rank."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = dist.get_rank()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_is_refused(stage, tmp_path):
    folder = tmp_path / "at"
    for optimizer in (ADAMW, CountsInStates):
        for count in (0, 2):  # before the first step there are no states
            engine, again = steps(make(stage, optimizer), count), make(stage, optimizer, seed=1)
            save(engine, folder)
            load(again, folder)
            assert everything(again) == everything(engine)
            assert everything(steps(again, 2)) == everything(steps(engine, 2))
    engine = steps(make(stage))
    save(engine, folder)
    refuses(make(stage % 3 + 1), folder, rf"has stage {stage}, this engine {stage % 3 + 1}")
    refuses(make(stage, net=partial(Net, scale=2)), folder, r"of another model.*scale")
    refuses(make(stage, net=partial(Net, dtype=torch.bfloat16)), folder, r"of another model.*frozen.*bfloat16")
    refuses(make(stage, dtype=torch.bfloat16), folder, "of another model.*bfloat16")
    refuses(make(stage, SGD), folder, r"optimizer AdamW, this engine SGD")
    refuses(steps(make(stage, SGD)), folder, r"optimizer AdamW, this engine SGD")
    net = gpt.seeded(Net)
    groups = [{"params": net.layers[1].parameters()}, {"params": net.layers[0].parameters()}]
    refuses(STAGES[stage](net, ADAMW, param_groups=groups), folder, "parameter groups 1, this engine 2")
    if stage < 3:
        refuses(make(stage, bucket_bytes=40), folder, r"bucket size.*unit 0")
    with pytest.raises(ValueError, match=r"rank 0 and rank 1"):
        save(steps(make(stage, partial(PerRank, lr=0.1))), folder)
    load(again := make(stage, seed=1), folder)  # the one before is still there
    assert everything(again) == everything(engine)
    engine.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        save(engine, folder)


def damage(folder, how):
    """Done to a whole checkpoint."""
    manifest, tensors = folder / "pardemo.json", next(folder.glob("shard-00001*"))
    whole, text = tensors.read_bytes(), manifest.read_text()
    bomb, middle = pickle.dumps(RunsCode(str(folder.parent / "mark"))), len(whole) // 2

    def moved(path, instead):
        path.rename(folder.parent / path.name)
        instead(path)

    return {
        "changed": lambda: tensors.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]),
        "cut off": lambda: tensors.write_bytes(whole[:middle]),
        "a pickle": lambda: tensors.write_bytes(bomb),
        "missing": tensors.unlink,
        "a link": lambda: moved(tensors, lambda path: path.symlink_to(folder.parent / path.name)),
        "a pipe": lambda: moved(tensors, os.mkfifo),
        "more tensors": lambda: (folder / "more.safetensors").write_bytes(whole),
        "torch's index": lambda: (folder / ".metadata").write_bytes(bomb),
        "another setting": lambda: manifest.write_text(text.replace('"lr": 0.1', '"lr": 0.2')),
        "half a manifest": lambda: manifest.write_text(text[:-9]),
        "nested without end": lambda: manifest.write_text("[" * 100_000),
        "a pickled manifest": lambda: manifest.write_bytes(bomb),
        "older": lambda: manifest.write_text(text.replace('"format": 3', '"format": 2')),
        "a linked manifest": lambda: moved(manifest, lambda path: path.symlink_to(folder.parent / path.name)),
        "a pipe of manifests": lambda: moved(manifest, os.mkfifo),
    }[how]()


#: What is said of each.
DAMAGES = {
    **dict.fromkeys(("changed", "cut off", "a pickle", "missing", "a link", "a pipe"), "shard-00001"),
    "more tensors": r"more\.safetensors",
    "torch's index": r"\.metadata",
    **dict.fromkeys(
        ("another setting", "half a manifest", "nested without end", "a pickled manifest"),
        r"pardemo\.json is not the file that was written",
    ),
    "older": "is of format 2, here 3 is read",
    **dict.fromkeys(("a linked manifest", "a pipe of manifests"), r"pardemo\.json is a link or a device"),
}


@pytest.mark.ranks(2)
def test_a_damaged_checkpoint_is_refused_and_runs_no_code(tmp_path):
    folder = tmp_path / "at"
    for how, says in DAMAGES.items():
        save(steps(make(1)), folder)
        on_rank_0(lambda how=how: damage(folder, how))
        refuses(make(1, seed=1), folder, says)
        on_rank_0(lambda: [path.unlink() for path in folder.iterdir()])
    assert not (folder.parent / "mark").exists()
    refuses(make(1), folder, "no whole checkpoint in at", FileNotFoundError)


class Crash(Exception):
    """The writer ends here."""


def crash_at(call, function):
    """A function whose call of that number crashes."""
    numbers = itertools.count(1)

    def called(*args, **kwargs):
        if next(numbers) == call:
            raise Crash
        return function(*args, **kwargs)

    return called


#: Where, in the order of events: (object, attribute, what it becomes)
MOMENTS = {
    "before the tensors": lambda: (dcp, "save", crash_at(1, dcp.save)),
    "before the manifest": lambda: (json, "dump", crash_at(1, json.dump)),
    "after the manifest": lambda: (os, "fsync", crash_at(2, os.fsync)),
    "before the old one is moved": lambda: (Path, "rename", crash_at(1, Path.rename)),
    "before the new one is moved": lambda: (Path, "rename", crash_at(2, Path.rename)),
}


def replaced(stage, moment, folder):
    engine = steps(make(stage))
    save(engine, folder)
    old, reader = whole_values(engine), make(stage, seed=1)
    steps(engine)
    with mock.patch.object(*MOMENTS[moment]()), pytest.raises(Crash):
        save(engine, folder)
    load(reader, folder)
    assert all(map(torch.equal, whole_values(reader), old)), "the old values, and all of them"
    save(engine, folder)  # and what the crash left is in nobody's way
    load(reader, folder)
    assert all(map(torch.equal, whole_values(reader), whole_values(engine)))


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_that_fails_leaves_the_old_checkpoint_readable(world_of, tmp_path, stage, moment):
    """On one rank: what the others would wait for is told by their World."""
    world_of(1).run(replaced, stage, moment, tmp_path / "at")
    assert [path.name for path in tmp_path.iterdir()] == ["at"]


def die_while_saving(folder):
    engine = steps(make(2))
    save(engine, folder)
    if dist.get_rank() == 1:
        os.fsync = lambda _: os._exit(9)  # killed in the middle of the second one
    save(engine, folder)


def test_a_rank_that_dies_while_saving_leaves_the_previous_checkpoint(world_of, tmp_path):
    with World(2, timeout_s=120) as world, pytest.raises(RankError):
        world.run(die_while_saving, tmp_path / "at")
    world_of(2).run(resumed, 2, tmp_path / "at")


@pytest.mark.ranks(2)
def test_an_error_on_one_rank_is_raised_on_all(rank, tmp_path):
    """Rank 1 cannot write its part, or read it: rank 0 hears of it and waits for nothing."""
    folder, engine = tmp_path / "at", steps(make(1))
    save(engine, folder)
    before, kept = everything(engine), (os.fsync, checkpoint._size_and_digest)

    def full(*_):
        raise OSError(28, "No space left on device")

    if rank == 1:
        os.fsync = checkpoint._size_and_digest = full
    try:
        with pytest.raises(OSError, match=r"at cannot be written: rank 1: OSError.*No space left"):
            save(engine, folder)
        with pytest.raises(OSError, match="No space left" if rank else r"rank 1: .*No space left"):
            load(make(1), folder)
    finally:
        os.fsync, checkpoint._size_and_digest = kept
    load(again := make(1, seed=1), folder)
    assert everything(again) == before
    blocked = folder.parent / "file"
    on_rank_0(lambda: blocked.write_text("a file where a folder should be"))
    with pytest.raises((NotADirectoryError, FileExistsError)):
        save(engine, blocked / "at")


PATHS = ["..", "../outside", "/etc/passwd", "rank-00000.safetensors/../../outside", "\\\\host\\share", "~", "file:///x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.just(10**400) | st.floats() | st.text(max_size=8)
    | st.sampled_from([*PATHS, "torch.float32", "torch.float64", "os.system", "\ud800", "two\nlines"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(PATHS) | st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip
CODE = ("os.system", "subprocess.Popen", "ctypes.dlopen", "os.mkdir", "os.exec")
_events: list | None = None


def _audit(event, arguments):
    if _events is not None and (event == "open" or event in CODE):
        _events.append((event, str(arguments[0])))


def places(value, above=()):
    """The ways to everything within a JSON value."""
    yield above
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*above, key))


@st.composite
def mutations(draw, original):
    """Some values of a JSON object replaced, removed or added."""
    value = copy.deepcopy(original)
    for _ in range(draw(st.integers(1, 3))):
        if not value:  # all of it has been removed
            return value
        *way, last = draw(st.sampled_from([place for place in places(value) if place]))
        inside = value
        for key in way:
            inside = inside[key]
        how = draw(st.sampled_from(["replace", "replace", "remove", "add", "twice"]))
        if how == "replace":
            inside[last] = draw(VALUES)
        elif how == "remove":
            del inside[last]
        elif isinstance(inside, dict):
            inside[draw(st.sampled_from([*PATHS, "params", "0.parameters"]))] = draw(VALUES)
        else:
            inside.append(copy.deepcopy(inside[last]) if how == "twice" else draw(VALUES))
    return value


def signed(folder, content):
    """A manifest by somebody who knows how it is built."""
    whole = {"format": checkpoint.FORMAT, "sha256": checkpoint._digest(content), "content": content}
    (folder / "pardemo.json").write_text(json.dumps(whole))


def fuzzed(stage, folder):
    global _events
    save(steps(make(stage)), folder)
    load(make(stage), folder)  # what is imported at first use is there
    original = json.loads((folder / "pardemo.json").read_text())["content"]
    refusals = set()
    sys.addaudithook(_audit)

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(mutations(original))
    def check(content):
        global _events
        signed(folder, content)
        engine, _events = make(stage, seed=1), []
        before, refused = everything(engine), ""
        try:
            load(engine, folder)
        except ValueError as error:
            refused = str(error)
        finally:
            events, _events = _events, None
        if refused:
            refusals.add(refused)
            assert refused.startswith("checkpoint at")
            assert refused.isprintable()
            assert len(refused) < 1000
            assert everything(engine) == before
        assert not [event for event in events if event[0] in CODE]
        assert {Path(path).parent for event, path in events if event == "open"} <= {folder}

    check()
    assert len(refusals) > 10, "the cases are of many kinds"


@pytest.mark.parametrize("stage", few([1, 3], 1))
def test_a_manifest_may_hold_anything(world_of, tmp_path, stage):
    """Whoever signed it: it is read, or refused in one line. No other file, no code, no change."""
    world_of(1).run(fuzzed, stage, tmp_path / "at")
