"""Our sharded Muon against torch's in one process, and what both send."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import functional as F

from pardemo import WireMeter
from pardemo.optimizers import ShardedMuon, orthogonalised
from pardemo.optimizers.muon import owners
from pardemo.small_models import gpt

SHAPES = [(24, 16), (16, 24), (7, 5), (3, 40), (64, 64)]  # also such that do not divide, and fewer rows than ranks


def matrices(seed):
    return [gpt.numbers(*shape, seed=seed + place) for place, shape in enumerate(SHAPES)]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("how", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "lr": 0.1}])
def test_it_is_torchs_in_one_process(rank, world_size, how):
    mesh = init_device_mesh("cpu", (world_size,))
    alone = [nn.Parameter(one) for one in matrices(0)]
    ours = [nn.Parameter(distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None)) for one in matrices(0)]
    theirs, sharded = torch.optim.Muon(alone, **how), ShardedMuon(ours, **how)
    for step in range(3):
        for one, other, gradient in zip(alone, ours, matrices(100 + 10 * step), strict=True):
            one.grad, other.grad = gradient, distribute_tensor(gradient, mesh, [Shard(0)], src_data_rank=None)
        theirs.step()
        sharded.step()
    for one, other in zip(alone, ours, strict=True):
        assert torch.equal(other.full_tensor(), one), "to the last bit"


@pytest.mark.ranks(2, 4)
def test_it_sends_what_it_must_under_fsdp(rank, world_size):
    def model():
        return nn.Sequential(nn.Linear(256, 512, bias=False), nn.GELU(), nn.Linear(512, 256, bias=False))

    plain = gpt.seeded(model)
    sent = {}
    for kind in (ShardedMuon, torch.optim.Muon):
        module = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (world_size,)))
        optimizer = kind(module.parameters(), lr=0.02)
        x = gpt.numbers(8, 256, seed=rank)
        F.mse_loss(module(x), x).backward()
        with WireMeter() as wire:
            optimizer.step()
        sent[kind] = wire.sent_bytes
    each, n = [p.numel() for p in plain.parameters()], world_size
    whose = owners([tuple(p.shape) for p in plain.parameters()], n)
    to_owners = sum(numbers / n for numbers, owner in zip(each, whose, strict=True) if owner != rank)
    back = sum((n - 1) / n * numbers for numbers, owner in zip(each, whose, strict=True) if owner == rank)
    assert sent[ShardedMuon] == pytest.approx(2 * (to_owners + back), rel=0.02)
    assert sent[torch.optim.Muon] > 5 * sent[ShardedMuon]


@pytest.mark.ranks(4)
def test_copies_of_a_model_step_on_their_own(rank, world_size):
    """HSDP, two copies on two ranks each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    how = [Replicate(), Shard(0)]
    alone = [nn.Parameter(one) for one in matrices(0)]
    ours = [nn.Parameter(distribute_tensor(one, mesh, how, src_data_rank=None)) for one in matrices(0)]
    for one, other, gradient in zip(alone, ours, matrices(7), strict=True):
        one.grad, other.grad = gradient, distribute_tensor(gradient, mesh, how, src_data_rank=None)
    torch.optim.Muon(alone).step()
    ShardedMuon(ours).step()
    assert all(torch.equal(other.full_tensor(), one) for one, other in zip(alone, ours, strict=True))


@pytest.mark.ranks(2)
def test_what_is_no_matrix_in_shards_is_one_line(rank, world_size):
    mesh = init_device_mesh("cpu", (2,))

    def placed(shape, how):
        return nn.Parameter(distribute_tensor(torch.zeros(shape), mesh, [how], src_data_rank=None))

    for message, parameter in (
        ("is no DTensor; where all ranks have it whole, torch.optim.Muon is right", nn.Parameter(torch.zeros(2, 2))),
        (r"a parameter \(4,\) is for another optimizer", placed((4,), Shard(0))),
        ("its rows are to be cut over one dimension of the mesh", placed((4, 4), Shard(1))),
        ("its rows are to be cut over one dimension of the mesh", placed((4, 4), Replicate())),
    ):
        with pytest.raises(ValueError, match=message):
            ShardedMuon([parameter])
    good = placed((4, 4), Shard(0))
    with pytest.raises(ValueError, match=r"least.*0.*-1"):
        ShardedMuon([good], lr=-1)
    with pytest.raises(ValueError, match=r"adjust_lr_fn.*match_rms_adamw.*'other'"):
        ShardedMuon([good], adjust_lr_fn="other")
    ShardedMuon([good]).step()  # no gradient: nothing to do
    assert ShardedMuon([good]).step(lambda: 3) == 3


def test_singular_values_come_near_1():
    for shape in SHAPES:
        values = torch.linalg.svdvals(orthogonalised(gpt.numbers(*shape, seed=1)).float())
        assert values.max() < 1.5
        assert values.median() > 0.5
    assert orthogonalised(torch.zeros(3, 4)).abs().max() == 0


def test_work_is_shared_out():
    assert owners([(8, 8), (8, 8), (8, 8), (8, 8)], 2) in ([0, 1, 0, 1], [0, 1, 1, 0])
    assert owners([(100, 100), (8, 8), (8, 8)], 2) == [0, 1, 1]
