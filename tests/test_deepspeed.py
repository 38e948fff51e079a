"""DeepSpeed inside World: the stage that was asked for, many engines in one World, and an orderly end."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from pardemo import Cluster, RankFailed, World
from pardemo.peers.deepspeed import deepspeed_disk
from pardemo.small_models import gpt

PEERS = ["pardemo.peers.deepspeed.engine", "pardemo.peers.states"]
RUNS = int(os.environ.get("PARDEMO_DEEPSPEED_RUNS", "3"))  # 100 in a row were run by hand


@pytest.fixture(scope="module")
def world():
    with World(2, preload=PEERS, timeout_s=180) as ranks:
        yield ranks


def train(stage, steps=3):
    from pardemo.peers.deepspeed import engine as deepspeed

    engine = deepspeed.engine(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), deepspeed.zero_settings(stage))
    x = torch.ones(8, 64, dtype=torch.bfloat16)
    losses = []
    for _ in range(steps):
        loss = engine(x).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    running = engine.zero_optimization_stage(), engine.dp_world_size, engine.gradient_clipping()
    deepspeed.close(engine)
    return losses, running


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_world_serves_many_engines(world, stage):
    for losses, running in world.run(train, stage):
        assert running == (stage, 2, 0.0)
        assert losses[-1] < losses[0]


def test_stage_3_leaves_torch_as_it_was(world):
    """DeepSpeed replaces torch's linear function in the process and leaves it so: slower for frozen weights."""

    def replaced():
        from pardemo.peers.deepspeed import engine as deepspeed

        before = nn.functional.linear
        engine = deepspeed.engine(nn.Linear(8, 8), deepspeed.zero_settings(3))
        during = nn.functional.linear
        deepspeed.close(engine)
        return during is before, nn.functional.linear is before

    assert world.run(replaced) == [(False, True)] * 2


def test_nothing_is_compiled(tmp_path):
    """On a machine without a compiler, and beside the lock of a build that was killed."""
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    settings = {"TORCH_EXTENSIONS_DIR": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-compiler-here"}
    with World(2, preload=PEERS, env=settings, timeout_s=180) as bare:
        assert [running for _, running in bare.run(train, 2)] == [(2, 2, 0.0)] * 2
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["deepspeed_shm_comm", "lock"]


def another_stage():
    from pardemo.peers.deepspeed import engine as deepspeed

    engine = deepspeed.engine(nn.Linear(8, 8), deepspeed.zero_settings(1))
    try:
        deepspeed.assert_runs(engine, 2, 2)
    finally:
        deepspeed.close(engine)


def test_an_engine_of_another_stage_is_an_error(world):
    with pytest.raises(RankFailed, match="asked for stage 2 on 2 ranks, DeepSpeed runs stage 1 on 2"):
        world.run(another_stage)


def test_hpz_keeps_the_second_gather_inside_a_host():
    """Two layers on two hosts of two: a ring over all carries ¾ S, and gloo's reduce-scatter is two of them."""
    cluster, width, layers = Cluster(hosts=2, ranks_per_host=2), 256, 2

    def sent():
        from pardemo.book.chapters.zero_communication import measurements as zero_traffic

        return [zero_traffic.deepspeed_between_nodes(width, layers, cluster, hpz) for hpz in (False, True, True)]

    with World(4, cluster=cluster, preload=PEERS, timeout_s=60) as ranks:
        by_rank = ranks.run(sent)
    ring = 0.75 * 2 * layers * width**2
    for rank in by_rank:
        assert [nbytes / ring for nbytes in rank] == pytest.approx([4, 3, 3], rel=0.05), "one engine after the other"


@pytest.mark.parametrize("turn", range(RUNS))
def test_ranks_with_deepspeed_end_in_order(turn, monkeypatch):
    """Exit status 0, no abort: the ranks end without running what libraries registered in C++ for the exit."""
    world = World(2, preload=PEERS, timeout_s=200)
    world.run(train, turn % 4, 1)
    server, pids = world._ranks.fork_server, world.pids
    codes, wait = [], server.wait_exit

    def note(pid, timeout_s):
        codes.append(wait(pid, timeout_s))
        return codes[-1]

    monkeypatch.setattr(server, "wait_exit", note)
    world.close()
    assert [code for code in codes if code is not None] == [0] * len(pids)


def test_a_stale_build_lock_is_taken_away_and_a_live_one_left(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")  # processes know the folder by its real name
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "link"))
    assert not deepspeed_disk.readiness()[0]
    for name in (*deepspeed_disk.OPERATORS, "deepspeed_shm_comm"):  # whatever torch compiles here
        folder = deepspeed_disk.operators_folder() / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    assert deepspeed_disk.clear_stale_locks() == [], "they are too young to tell"
    monkeypatch.setattr(deepspeed_disk, "YOUNG_S", -1)
    assert not list(deepspeed_disk.operators_folder().rglob("*.so"))
    at_work = deepspeed_disk.operators_folder() / "async_io"
    compiler = subprocess.Popen([sys.executable, "-c", "input()"], cwd=at_work, stdin=subprocess.PIPE)
    try:
        assert deepspeed_disk.clear_stale_locks() == ["deepspeed_shm_comm", "pin_memory"]
        assert (at_work / "lock").exists()
    finally:
        compiler.communicate(b"\n", timeout=120)
    assert deepspeed_disk.clear_stale_locks() == ["async_io"]


def test_without_the_header_the_disk_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(deepspeed_disk, "_has_header", lambda: False)
    ready, reason = deepspeed_disk.readiness()
    assert not ready
    assert reason.startswith("not installed: libaio-dev")
    with pytest.raises(RuntimeError, match="not installed: libaio-dev"):
        deepspeed_disk.build_operators()


@pytest.mark.skipif(not deepspeed_disk.readiness()[0], reason=deepspeed_disk.readiness()[1])
def test_states_on_disk_train_alike(world, tmp_path):
    assert world.run(losses_on_disk, tmp_path) == world.run(losses_on_disk, None)
    files = deepspeed_disk.swapped(tmp_path)
    states = 2 * 1024**2 * (12 + 2)  # two layers: Adam's three in fp32, gradients in bf16 …
    assert files["optimizer"][1] == pytest.approx(states, rel=0.2)
    assert "bfloat16params" not in files


def losses_on_disk(folder):
    from pardemo.peers.deepspeed import engine as deepspeed

    settings = deepspeed.zero_settings(3) | {"aio": {"block_size": 1 << 20}}
    if folder is not None:
        os.environ["PATH"] = "/nowhere"  # no compiler is asked
        deepspeed_disk.use()
        settings["zero_optimization"] |= deepspeed_disk.to_disk(folder)
    layers = gpt.seeded(lambda: nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(2)]))
    engine = deepspeed.engine(layers, settings)
    losses = []
    for step in range(3):
        loss = (engine(gpt.numbers(8, 1024, seed=step).bfloat16()) - 1).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    deepspeed.close(engine)
    return losses
