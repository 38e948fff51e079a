"""A checkpoint from anywhere: it runs no code, reads no file outside its folder, and is refused in one line on every
rank when it does not fit; then the engine is as it was."""

import hashlib
import json
import os
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, checkpoint_folder, load, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
ADAMW = partial(torch.optim.AdamW, lr=0.1)


class Net(nn.Module):
    """A layer to train, one that is frozen, a buffer."""

    def __init__(self):
        super().__init__()
        self.linear, self.frozen = nn.Linear(5, 7), nn.Linear(7, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return (self.frozen(self.linear(x)) * self.scale).square().sum()


def make(stage=1, optimizer=ADAMW, net=Net, seed=0, **options):
    return STAGES[stage](gpt.seeded(net, seed), optimizer, **options)


def steps(engine, count=1):
    for step in range(count):
        engine(gpt.numbers(2, 5, seed=10 * step + dist.get_rank())).backward()
        engine.step()
    return engine


def everything(engine):
    """An engine's values, to compare."""
    states = [engine.optimizer.state.get(unit.master) for unit in engine.trained]
    states = [state and {k: v.tolist() if torch.is_tensor(v) else v for k, v in state.items()} for state in states]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    with engine.whole() as net:
        values = {name: tensor.tolist() for name, tensor in (*net.named_parameters(), *net.named_buffers())}
    return states, str(groups), values, [unit.master.tolist() for unit in engine.trained]


def refuses(engine, folder, error, message):
    """In one line, on every rank, and the engine is as it was."""
    before = everything(engine)
    with pytest.raises(error, match=message) as raised:
        load(engine, folder)
    assert "\n" not in str(raised.value)
    assert everything(engine) == before


class RunsCode:
    """A pickle that writes a file where it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def read_crafted(folder, mark):
    first = dist.get_rank() == 0
    pickled = pickle.dumps(RunsCode(str(mark)))
    save(make(), folder)
    fits = json.loads((folder / "pardemo.json").read_text())["content"]
    dist.barrier()
    if first:
        (folder / ".metadata").write_bytes(pickled)
        (folder / "__0_0.distcp").write_bytes(pickled)
    older = {key: fits[key] for key in ("stage", "parameter groups", "units")}
    older |= {"world_size": 2, "param_groups": [{}], "counts": [{} for unit in fits["units"] if unit["trained"]]}
    for sums in ({}, {".metadata": hashlib.sha256(pickled).hexdigest()}):
        if first:
            (folder / "pardemo.json").write_text(json.dumps(older | {"sha256": sums}))
        dist.barrier()
        refuses(make(), folder, ValueError, "is of the older format, whose index is a pickle")
        dist.barrier()
    if first:
        (folder / "rank-00001.safetensors").write_bytes(pickled)
        changed = fits["files"][1] | {"bytes": len(pickled), "sha256": hashlib.sha256(pickled).hexdigest()}
        sign(folder, fits | {"files": [fits["files"][0], changed]})
    dist.barrier()
    refuses(make(), folder, ValueError, r"rank-00001\.safetensors cannot be read")


def sign(folder, content):
    """Writes a manifest as somebody does who knows how it is built."""
    whole = {"format": checkpoint_folder.FORMAT, "sha256": checkpoint_folder._digest(content), "content": content}
    (folder / "pardemo.json").write_text(json.dumps(whole))


def test_a_crafted_checkpoint_runs_no_code(world_of, tmp_path):
    world_of(2).run(read_crafted, tmp_path / "at", tmp_path / "mark")
    assert not (tmp_path / "mark").exists()


def links(folder):
    save(make(), folder)
    names = ["pardemo.json", "rank-00001.safetensors"]
    for name in names:
        if dist.get_rank() == 0:
            (folder / name).rename(folder.with_name(name))
            (folder / name).symlink_to(folder.with_name(name))
        dist.barrier()
        refuses(make(), folder, ValueError, f"{name} is a link or a device, not a file of the folder")
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).unlink()
            os.mkfifo(folder / name)
        dist.barrier()
        refuses(make(), folder, ValueError, f"{name} is a link or a device, not a file of the folder")
        dist.barrier()
        if dist.get_rank() == 0:
            (folder / name).unlink()
            folder.with_name(name).rename(folder / name)
    dist.barrier()
    load(make(), folder)


def test_links_and_pipes_in_a_checkpoint_are_not_followed(world_of, tmp_path):
    """A link leads anywhere, and a pipe is read for ever."""
    world_of(2).run(links, tmp_path / "at")


class Wider(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.frozen = nn.Linear(5, 7), nn.Linear(7, 3).requires_grad_(False)
        self.register_buffer("scale", torch.ones(2 if kind == "another buffer" else ()))
        if kind == "one more buffer":
            self.register_buffer("other", torch.ones(()))
        if kind == "frozen in bf16":
            self.frozen.bfloat16()


class PerRank(torch.optim.SGD):
    """Keeps what is no part of any parameter, and differs from rank to rank."""

    def step(self):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = dist.get_rank()


def misfits(stage, folder):
    save(steps(make(stage)), folder)
    for kind in ("another buffer", "one more buffer", "frozen in bf16"):
        message = {"another buffer": "has scale as", "one more buffer": "only one of both has other"}.get(
            kind, "dtypes|as .*torch.float32"
        )
        refuses(make(stage, net=partial(Wider, kind)), folder, ValueError, message)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    for optimizer in (sgd, partial(torch.optim.SGD, lr=0.1)):
        message = "is of another optimizer: it kept exp_avg, exp_avg_sq, step, this engine's keeps"
        refuses(make(stage, optimizer), folder, ValueError, message)
        refuses(steps(make(stage, optimizer)), folder, ValueError, message)
    with pytest.raises(ValueError, match=r"1's.*0's.*checkpoint"):
        save(steps(make(stage, partial(PerRank, lr=0.1))), folder)
    load(make(stage), folder)  # the one before is still there


@pytest.mark.parametrize("stage", STAGES)
def test_what_does_not_fit_is_refused_and_changes_nothing(world_of, stage, tmp_path):
    world_of(2).run(misfits, stage, tmp_path / "at")


def saved_before_the_first_step(stage, folder):
    writer = make(stage)
    save(writer, folder)
    reader = make(stage, seed=1)
    load(reader, folder)
    assert everything(reader) == everything(writer)
    assert everything(steps(reader, 3)) == everything(steps(writer, 3)), "bit by bit, the bias correction too"
    other = make(stage, partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    refuses(other, folder, ValueError, "is of another optimizer: it kept nothing, this engine's keeps momentum_buffer")


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_of_before_the_first_step_is_a_beginning(world_of, stage, tmp_path):
    world_of(2).run(saved_before_the_first_step, stage, tmp_path / "at")


class Fails(Exception):
    """Not one of Python's own."""


def alone(stage, folder):
    """Rank 1 cannot read its part, or write it, or make its states: rank 0 hears of it and waits for nothing."""
    rank = dist.get_rank()
    writer = steps(make(stage))
    save(writer, folder)

    def fail(*_, **__):
        raise Fails("this rank's disk is gone")

    for name, use in (("checksum", load), ("write_tensors", save)):
        kept = getattr(checkpoint_folder, name)
        if rank == 1:
            setattr(checkpoint_folder, name, fail)
        try:
            with pytest.raises(Fails if rank == 1 else RuntimeError, match=r"rank's.*disk") as raised:
                use(steps(make(stage)), folder)
            assert rank == 1 or str(raised.value).startswith("rank 1: ")
        finally:
            setattr(checkpoint_folder, name, kept)
    closed = make(stage)
    closed.close()
    with pytest.raises(RuntimeError, match="this engine is closed"):
        save(closed, folder)
    read = make(stage, seed=1)
    load(read, folder)
    assert everything(read) == everything(writer)


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_on_one_rank_is_raised_on_all(world_of, stage, tmp_path):
    world_of(2).run(alone, stage, tmp_path / "at")


def unwritable(folder):
    """Rank 0 alone makes the folder: it used to leave the others in a barrier."""
    folder.write_text("a file where a folder should be")
    dist.barrier()
    with pytest.raises((NotADirectoryError, FileExistsError)):
        save(make(), folder / "at")


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(world_of, tmp_path):
    world_of(2).run(unwritable, tmp_path / "file")
