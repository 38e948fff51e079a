"""An engine that is refused leaves its module as it was, on every rank; and every rank hears of it."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pardemo import RankFailed
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3, elementwise

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


SAMPLES = {
    shape.numel()
    for shapes in (elementwise.SMALL, elementwise.SMALL_PIECES, elementwise.LARGE, elementwise.LARGE_PIECES)
    for shape in shapes
}


class WrongOptimizer(Exception):
    """What a factory of the user's may raise."""


def shards_only(shards):
    """Takes the samples that an engine tries, and refuses what has the size of a real shard."""
    shards = list(shards)
    if any(shard.numel() not in SAMPLES for shard in shards):
        raise WrongOptimizer("no room for states of this size")
    return SGD(shards)


class NoTorchOptimizer:
    def __init__(self, shards):
        self.inner = SGD(shards)
        self.param_groups, self.step = self.inner.param_groups, self.inner.step


def make():
    """Trained, frozen, tied and transposed parameters, a buffer, gradients and hooks from before; another seed on each
    rank."""

    def build():
        net = nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 12), nn.Linear(12, 12, bias=False))
        net[0].bias.requires_grad_(False)
        net[2].weight.data = net[2].weight.data.t()
        net[3].weight = net[0].weight
        return net

    net = gpt.seeded(build, dist.get_rank())
    net(gpt.numbers(4, 12, seed=dist.get_rank())).square().sum().backward()
    net[0].weight.register_hook(lambda gradient: gradient)
    net[1].register_forward_hook(lambda *_: None)
    return net


HOOKS = (
    "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip


def outside(net):
    """All that a module's owner can see of it; tensors by their place in memory, and by a copy of their values."""
    tensors = {}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        hooks = [list(getattr(tensor, kind, None) or ()) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        grad = None if tensor.grad is None else (tensor.grad.data_ptr(), tensor.grad.tolist())
        seen = (id(tensor), tensor.data_ptr(), tensor.untyped_storage().nbytes(), tensor.shape, tensor.stride())
        values = tensor.detach().tolist()
        tensors[name] = (type(tensor), tensor.requires_grad, *seen, values, grad, hooks, sorted(vars(tensor)))
    modules = {
        name: [sorted(vars(part)), *(list(getattr(part, kind)) for kind in HOOKS)] for name, part in net.named_modules()
    }
    return tensors, modules


def refuse(stage, case):
    net, other = make(), nn.Linear(2, 2)
    rank = dist.get_rank()
    foreign = partial(torch.optim.SGD, list(other.parameters()), lr=0.1)
    before = outside(net)
    options, optimizer, error, message = {
        "other parameters": ({}, lambda shards: foreign(), ValueError, "other parameters or groups"),
        "raises for shards": ({}, shards_only, WrongOptimizer, "no room for states"),
        "no optimizer of torch's": ({}, NoTorchOptimizer, AttributeError, "register_step_pre_hook"),
        "not element by element": ({}, lambda shards: torch.optim.Muon(shards, lr=0.1), ValueError, "flat|2D|matrix"),
        "max_norm": ({"max_norm": -1}, SGD, ValueError, "max_norm must be above 0"),
        "group": ({"param_groups": [{"params": [other.weight]}]}, SGD, ValueError, "not the module's"),
        "one rank alone": (
            {},
            shards_only if rank == 1 else SGD,
            WrongOptimizer if rank == 1 else RuntimeError,
            "no room for states" if rank == 1 else "rank 1: no room for states",
        ),
        "one rank alone, before": (
            {},
            SGD if rank == 0 else lambda shards: torch.optim.Muon(shards, lr=0.1),
            ValueError,
            "rank 1: " if rank == 0 else "flat|2D|matrix",
        ),
    }[case]
    with pytest.raises(error, match=message):
        STAGES[stage](net, optimizer, **options)
    assert outside(net) == before
    assert SGD(net.parameters()).step() is None, "and may be trained without the engine"
    engine = STAGES[stage](net, SGD)  # or by the next one, which starts from rank 0's values
    engine(gpt.numbers(4, 12)).square().sum().backward()
    engine.step()
    engine.close()
    weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(theirs, weights) for theirs in everywhere)


@pytest.mark.parametrize(
    "case",
    [
        "other parameters", "raises for shards", "no optimizer of torch's", "not element by element", "max_norm",
        "group", "one rank alone", "one rank alone, before",
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", STAGES)
def test_a_refused_engine_leaves_the_module_as_it_was(world_of, stage, case):
    world_of(2).run(refuse, stage, case)


def unlike_buckets():
    Zero2(nn.Linear(64, 64), partial(torch.optim.SGD, lr=0.1), bucket_bytes=1 << 20 if dist.get_rank() else 400)


def test_buckets_of_another_size_on_one_rank_are_refused_before_gloo_aborts(world_of):
    told = "engines differ: rank 0 has ZeRO-2, max_norm None, buckets of 400 B, rank 1 has ZeRO-2, .* of 1048576 B"
    with pytest.raises(RankFailed, match=told):
        world_of(2).run(unlike_buckets)
