"""Each wrapper around each layer that is cut: right over the data-parallel group, refused over the group that cuts."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel
from pardemo.expert_parallel import ExpertParallel, Router
from pardemo.groups import cut_of, cut_within
from pardemo.tensor_parallel import ColumnParallelLinear, ParallelMLP, RowParallelLinear, VocabParallelEmbedding
from pardemo.tensor_parallel.module import on_shards
from pardemo.zero import Zero1, Zero2, Zero3
from pardemo.zero.gradient_norm import clip_grad_norm_

SGD = partial(torch.optim.SGD, lr=0.1)
WRAPPERS = {
    "naive": NaiveDataParallel,
    "bucketed": BucketedDataParallel,
    "zero1": lambda module, group=None: Zero1(module, SGD, group=group),
    "zero2": lambda module, group=None: Zero2(module, SGD, group=group),
    "zero3": lambda module, group=None: Zero3(module, SGD, group=group),
}


def experts(group=None):
    router, each = Router(8, 4, 2), [nn.Linear(8, 8, bias=False) for _ in range(4)]
    return ExpertParallel(router, each, group)


LAYERS = {
    "columns": lambda group=None: ColumnParallelLinear(nn.Linear(8, 16), group),
    "rows": lambda group=None: RowParallelLinear(nn.Linear(8, 16), group),
    "MLP": lambda group=None: ParallelMLP(nn.Linear(8, 32), nn.Linear(32, 8), group),
    "vocabulary": lambda group=None: VocabParallelEmbedding(nn.Embedding(12, 8), group),
    "experts": experts,
    "experts within a model": lambda group=None: nn.Sequential(nn.Linear(8, 8), experts(group)),
}


def made(layer, group=None):
    with torch.random.fork_rng():  # ranks are shared, and have seeds of their own
        torch.manual_seed(0)
        return LAYERS[layer](group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_over_the_group_that_cuts_it_is_refused_and_no_part_is_overwritten(rank, wrapper, layer):
    module = made(layer)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    cut = [name for name, parameter in module.named_parameters() if cut_of(parameter)]
    assert cut, "the layer marks what is cut"
    with pytest.raises(ValueError, match=rf"{cut[0]}.*\[0, 1\].*data-parallel"):
        WRAPPERS[wrapper](module)
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_over_the_data_parallel_group_each_rank_keeps_its_own_part(rank, wrapper, layer):
    """Ranks 0, 1 and 2, 3 share a layer; 0, 2 and 1, 3 have the same part of it."""
    cuts, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    replicas, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    module = made(layer, cuts)
    wanted = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    assert cut_within(module, replicas) == ""
    wrapped = WRAPPERS[wrapper](module, replicas)
    with wrapped.whole() if wrapper == "zero3" else contextlib.nullcontext():
        own = dict(module.named_parameters())
        assert all(torch.equal(own[name], value) for name, value in wanted.items())
    if hasattr(wrapped, "close"):
        wrapped.close()


def whole_norm():
    """The gradient's norm of the same experts in one process, on both ranks' tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        router, each = Router(8, 4, 2), [nn.Linear(8, 8, bias=False) for _ in range(4)]
    tokens = torch.cat([torch.randn(6, 8, generator=torch.Generator().manual_seed(3 + rank)) for rank in range(2)])
    routing = router(tokens)
    out = torch.zeros_like(tokens)
    for place in range(2):
        made = torch.stack([each[e](tokens[row]) for row, e in enumerate(routing.experts[:, place].tolist())])
        out = out + routing.weights[:, place : place + 1] * made
    out.square().mean().backward()
    grads = [p.grad for one in (router, *each) for p in one.parameters() if p.grad is not None]
    return float(torch.stack([grad.norm() for grad in grads]).norm())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("ours", [True, False])
def test_experts_are_clipped_by_the_whole_models_norm_on_every_rank(rank, ours):
    """By our function, and by torch's, which walks over ``.grad``."""
    module = made("experts")
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(3 + rank))
    module(tokens).square().mean().backward()
    module.average_gradients()
    norm = clip_grad_norm_(module, 1e-3) if ours else nn.utils.clip_grad_norm_(module.parameters(), 1e-3).item()
    assert norm == pytest.approx(whole_norm(), rel=1e-5)
    norms = [None, None]
    dist.all_gather_object(norms, norm)
    assert norms[0] == norms[1]


@pytest.mark.ranks(2)
def test_a_copy_of_experts_talks_to_the_same_ranks(rank):
    module = made("experts")
    tokens = torch.randn(6, 8, generator=torch.Generator().manual_seed(3 + rank))
    wanted = module(tokens)
    copied = copy.deepcopy(module)
    assert copied.group is module.group
    assert torch.equal(copied(tokens), wanted)
    assert copied.experts[0].weight is not module.experts[0].weight


@pytest.mark.ranks(2)
def test_a_norm_over_all_tokens_is_refused_where_ranks_have_their_own(rank):
    """Its statistics would be this rank's: 0.73 off where that was tried."""
    x = torch.randn(2, 6, 8)
    with pytest.raises(ValueError, match=r"BatchNorm1d.*LayerNorm"):
        on_shards(nn.Sequential(nn.BatchNorm1d(6)), None, x)
    assert on_shards(nn.LayerNorm(8), None, x).shape == x.shape
