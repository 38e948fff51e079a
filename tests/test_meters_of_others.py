"""The meters on code that is not ours: first steps, wrapped optimizers, trainers; and how a meter comes home."""

import json
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from pardemo import MemoryMeter, WireMeter
from pardemo.meters import CallMeter

WIDTH = 256


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def size_of(net):
    return sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())


def step(net, optimizer):
    net(torch.ones(4, WIDTH)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("foreach", [False, True])
def test_states_that_the_first_step_makes_are_states_at_the_peak(foreach):
    """The example of the meter's own docstring: the peak is in the step, before any hook has named what it makes."""
    net, _ = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=foreach)
    with MemoryMeter(net, optimizer) as memory:
        step(net, optimizer)
    states = 2 * size_of(net)
    assert states <= memory.peak["optimizer states"] <= states + 4 * 4  # and the steps' counts
    assert memory.peak["activations"] <= states / 2, "temporaries of the step alone: at most one a parameter"
    assert memory.peak_bytes == sum(memory.peak.values())


def test_what_came_after_the_peak_is_not_put_into_it():
    net, optimizer = make()
    with MemoryMeter(net, optimizer) as memory:
        net(torch.ones(4, WIDTH)).square().mean().backward()
        large = torch.zeros(20 * WIDTH * WIDTH)
        at_peak = dict(memory.peak)
        del large
        optimizer.step()
    assert memory.peak == at_peak
    assert memory.peak["optimizer states"] == 0


def test_accelerates_optimizer_is_followed_to_the_one_inside():
    accelerate = pytest.importorskip("accelerate")
    from pardemo import compat

    compat.AcceleratorState_reset(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    net, optimizer = accelerator.prepare(*make())
    with MemoryMeter(net, optimizer) as memory:
        step(net, optimizer)
    assert memory.live["optimizer states"] >= 2 * size_of(net)
    compat.AcceleratorState_reset(reset_partial_state=True)


def test_a_trainer_s_own_model_and_optimizer_are_met():
    """What Hugging Face's Trainer does: the model was there before, the optimizer is made within the block."""
    net, _ = make()
    with MemoryMeter(meets=True) as memory:
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        step(net, optimizer)
        assert memory.live["gradients"] == size_of(net)
    assert memory.live["parameters"] == size_of(net)
    assert memory.live["optimizer states"] >= 2 * size_of(net)
    with MemoryMeter() as alone:
        step(*make())
    assert alone.live["parameters"] == 0, "unless it is asked to meet them"


def test_what_was_not_counted_is_not_nothing():
    with CallMeter() as calls:
        pass
    assert (calls.sent_bytes, calls.received_bytes) == (None, None)
    with CallMeter(bytes_too=True) as calls:
        pass
    assert (calls.sent_bytes, calls.received_bytes) == (0, 0)


def measured():
    import torch.distributed as dist

    net, optimizer = make()
    with WireMeter() as wire, CallMeter(bytes_too=True) as calls, MemoryMeter(net, optimizer) as memory:
        dist.all_reduce(torch.ones(1 << 18))
        step(net, optimizer)
    return wire, calls, memory


def test_meters_come_home_from_a_rank_with_their_figures(world_of):
    for wire, calls, memory in world_of(2).run(measured):
        assert wire.sent_bytes == pytest.approx(1 << 20, rel=0.01)
        assert wire.evidence == "wire"
        assert (
            repr(wire)
            == f"WireMeter(sent_bytes={wire.sent_bytes:,}, received_bytes={wire.received_bytes:,}, evidence='wire')"
        )
        assert calls.counts["all_reduce"] == 1
        assert calls.sent_bytes == 1 << 20
        assert memory.peak["optimizer states"] > 0
        assert memory.peak_bytes == sum(memory.peak.values())
        assert f"peak_bytes={memory.peak_bytes:,}" in repr(memory)
        assert memory.figures() == pickle.loads(pickle.dumps(memory)).figures()


@pytest.mark.nightly
def test_a_launched_rank_prints_a_meter_s_figures(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom pardemo.meters import CallMeter\n"
        "def counted():\n    with CallMeter() as calls:\n        torch.distributed.all_reduce(torch.ones(4))\n"
        "    return calls\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "pardemo.world", "mine:counted"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    shown = json.loads(done.stdout.strip().splitlines()[-1])
    assert shown == {"counts": {"all_reduce": 1}, "sent_bytes": None, "received_bytes": None}
