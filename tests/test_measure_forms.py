"""Steps unlike the usual one: traffic to one rank, averages now and then, evaluations, sequence parallelism."""

import pytest

from pardemo import measure

HEAD = """
import time, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
"""

TO_ONE = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Linear(64, 64)); optimizer = torch.optim.SGD(model.parameters(), 0.1)
large = torch.ones(250_000)  # 1 MB
for step in range(10):
    model(torch.randn(4, 64)).sum().backward()
    dist.gather(large, [torch.empty_like(large) for _ in range(ranks)] if rank == 0 else None, dst=0)
    dist.reduce(large.clone(), dst=0)
    dist.broadcast(large.clone(), src=ranks - 1)
    optimizer.step(); optimizer.zero_grad()
"""

NOW_AND_THEN = """
model = nn.Linear(256, 256); optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(1, 20):
    model(torch.randn(8, 256)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    if step % 2 == 0:
        for parameter in model.parameters():
            dist.all_reduce(parameter.data); parameter.data /= ranks
"""

EVALUATED = """
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Linear(64, 64)); optimizer = torch.optim.SGD(model.parameters(), 0.1)
held = nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)]).eval().requires_grad_(False)
for layer in held:
    fully_shard(layer)
fully_shard(held)
for step in range(10):
    time.sleep(0.1)
    model(torch.randn(64, 64)).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
    with torch.no_grad():
        for _ in range(5):
            held(torch.randn(8, 512))
"""

SEQUENCES = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())
model = nn.Sequential(Block(), Block())
for block in model:
    parallelize_module(block, init_device_mesh("cpu", (ranks,)), {
        "norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    })
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    y = model(torch.randn(4, 64 // ranks, 64))
    (y.to_local() if hasattr(y, "to_local") else y).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""


@pytest.fixture
def measured(tmp_path):
    def run(text, ranks=2):
        script = tmp_path / "train.py"
        script.write_text(HEAD + text)
        return measure.script("train.py", ranks=ranks, folder=tmp_path)

    return run


def test_the_rank_that_sends_most_is_shown(measured):
    found = measured(TO_ONE, 4)
    rows = {row.kind: row for row in found.collectives}
    assert {kind: (rows[kind].bytes, rows[kind].rank) for kind in ("gather", "reduce", "broadcast")} == {
        "gather": (1e6, 1), "reduce": (1e6, 1), "broadcast": (1e6, 3),
    }  # fmt: skip
    assert rows["all-reduce"].rank is None, "all send as much"


def test_what_every_second_step_sends_is_its_mean(measured):
    (row,) = measured(NOW_AND_THEN).collectives
    whole = 4 * (256 * 256 + 256)  # two ranks' ring sends the array once
    assert row.bytes in (pytest.approx(whole / 3, rel=0.02), pytest.approx(2 * whole / 3, rel=0.02))
    assert "local SGD" in row.why


def test_an_evaluations_waits_are_no_steps(measured):
    for of in measured(EVALUATED).time:
        assert of.other_s >= 0.09, "it sleeps for 100 ms"
        assert of.exposed_s + of.idle_s + of.hidden_s < 0.05


def test_collectives_that_dtensor_waits_for_are_over(measured):
    found = measured(SEQUENCES)
    kinds = {row.kind for row in found.collectives}
    assert {"all-gather", "reduce-scatter"} <= kinds
    for of in found.time:
        assert of.exposed_s + of.idle_s < of.step_s
    assert found.memory["peak_bytes"] < 2e6, "no step's tensors are kept into the next"
