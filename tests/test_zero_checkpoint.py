"""A checkpoint that is being replaced when its writer fails, between any two of its files."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, checkpoint_folder, load, save

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}


class Crash(Exception):
    """The writer ends here."""


def crash(*_, **__):
    raise Crash


def after(function):
    def then_crash(*args, **kwargs):
        function(*args, **kwargs)
        raise Crash

    return then_crash


class Nth:
    """A method whose n-th call crashes."""

    def __init__(self, function, n):
        self.function, self.left = function, n

    def __get__(self, instance, _):
        return lambda *args, **kwargs: self(instance, *args, **kwargs)

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == 0:
            raise Crash
        return self.function(*args, **kwargs)


#: Where, in the order of events: (object, attribute, what it becomes)
MOMENTS = {
    "before the tensors": lambda: (checkpoint_folder, "save_file", crash),
    "after the tensors": lambda: (checkpoint_folder, "save_file", after(checkpoint_folder.save_file)),
    "before the manifest": lambda: (Path, "write_text", crash),
    "after the manifest": lambda: (Path, "write_text", after(Path.write_text)),
    "before the old one is moved": lambda: (Path, "rename", Nth(Path.rename, 1)),
    "before the new one is moved": lambda: (Path, "rename", Nth(Path.rename, 2)),
}


def weights(engine):
    with engine.whole() as net:
        return torch.cat([p.detach().flatten().clone() for p in net.parameters()])


def replaced(stage, moment, folder):
    def make():
        return STAGES[stage](gpt.seeded(lambda: nn.Linear(9, 9)), partial(torch.optim.AdamW, lr=0.1))

    def step(engine):
        engine(torch.ones(2, 9)).square().sum().backward()
        engine.step()

    engine = make()
    step(engine)
    save(engine, folder)
    old, reader = weights(engine), make()
    step(engine)
    where, name, instead = MOMENTS[moment]()
    kept = getattr(where, name)
    setattr(where, name, instead)
    try:
        with pytest.raises(Crash):
            save(engine, folder)
    finally:
        setattr(where, name, kept)
    load(reader, folder)
    assert torch.equal(weights(reader), old), "the old values, and all of them"
    save(engine, folder)  # and what the crash left is in nobody's way
    load(reader, folder)
    assert torch.equal(weights(reader), weights(engine))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_writer_that_fails_leaves_the_old_checkpoint_readable(world_of, tmp_path, stage, moment):
    """On one rank: what the others would wait for is told by their World."""
    world_of(1).run(replaced, stage, moment, tmp_path / "at")
    assert [path.name for path in tmp_path.iterdir()] == ["at"]


def read_in_bf16(stage, folder):
    """By an engine that began elsewhere; its masters, and the parameters in bf16 that they are rounded to."""
    adamw = partial(torch.optim.AdamW, lr=0.1)
    writer, reader = (STAGES[stage](gpt.seeded(lambda: nn.Linear(9, 9), seed).bfloat16(), adamw) for seed in (0, 1))

    def step(engine):
        engine(torch.ones(2, 9, dtype=torch.bfloat16)).float().square().sum().backward()
        engine.step()

    step(writer)
    save(writer, folder)
    load(reader, folder)
    for _ in range(3):
        assert torch.equal(weights(reader), weights(writer))
        for mine, theirs in zip(reader.trained, writer.trained, strict=True):
            assert torch.equal(mine.master, theirs.master)
        step(writer)
        step(reader)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_training_in_bf16_goes_on_from_a_checkpoint_bit_by_bit(world_of, tmp_path, stage, n):
    world_of(n).run(read_in_bf16, stage, tmp_path / "at")
