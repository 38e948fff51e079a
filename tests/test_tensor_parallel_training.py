"""What training code does to a model beside forward, backward and step: with parts of layers as with the full ones."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pardemo.small_models import gpt
from pardemo.tensor_parallel import gather_sequence, scatter_sequence
from pardemo.zero.gradient_norm import clip_grad_norm_

HIDDEN, HEADS, BATCH, SEQUENCE = 16, 4, 2, 8
CLOSE = 1e-5  # fp32 sums in another order: some 1e-7 of a tensor's norm


def full_block():
    return gpt.seeded(lambda: gpt.Block(HIDDEN, HEADS))


def data(seed=0):
    return gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=seed)


def parts_of(full):
    """What this rank's parameters should be, given the full block's."""
    return dict(gpt.parallel_block(copy.deepcopy(full)).named_parameters())  # a copy without its hooks


def worst(pairs):
    return max(gpt.relative_error(a, b) for a, b in pairs)


@pytest.mark.ranks(2)
def test_a_mean_of_the_weights_equals_one_process():
    """An exponential mean of the weights, as torch keeps it: a deep copy that is updated."""
    full = full_block()
    nets = [full, gpt.parallel_block(full)]
    means = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8)) for net in nets]
    for step in range(3):
        for net, mean in zip(nets, means, strict=True):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            net(data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(net)
    twin = copy.deepcopy(nets[1])
    assert worst([(means[1](data()), means[0](data())), (twin(data()), full(data()))]) < CLOSE


@pytest.mark.ranks(2, 4)
def test_autograd_grad_equals_one_process():
    """torch.autograd.grad: nothing is left in .grad, and the numbers are those of the full block."""
    full, x, mine = full_block(), data().requires_grad_(), data().requires_grad_()
    net = gpt.parallel_block(full)
    expected = torch.autograd.grad(full(x).square().sum(), [x, *full.parameters()])
    for parameter, gradient in zip(full.parameters(), expected[1:], strict=True):
        parameter.data = gradient
    truth = parts_of(full)
    results = torch.autograd.grad(net(mine).square().sum(), [mine, *net.parameters()])
    assert all(p.grad is None for p in net.parameters())
    names = [name for name, _ in net.named_parameters()]
    pairs = [(results[0], expected[0]), *((r, truth[name]) for name, r in zip(names, results[1:], strict=True))]
    assert worst(pairs) < CLOSE


def optimizer_in_backward(net, x):
    """Every parameter is stepped as soon as its gradient is there, which a hook has doubled."""
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)

        def step(p):
            p.data -= 0.1 * p.grad
            p.grad = None

        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        net(x).square().mean().backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("in_sequence", [False, True])
def test_hooks_on_parameters_equal_one_process(in_sequence):
    full = full_block()
    net = gpt.parallel_block(full, sequence_parallel=in_sequence)

    def whole(x):
        return gather_sequence(net(scatter_sequence(x)), whole_gradient=True) if in_sequence else net(x)

    whole.parameters = net.parameters
    optimizer_in_backward(full, data())
    optimizer_in_backward(whole, data())
    truth = parts_of(full)
    assert worst((p, truth[name]) for name, p in net.named_parameters()) < CLOSE


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["torch's", "inf", "a copy", "ours"])
@pytest.mark.parametrize("kv_heads", [None, 1])
def test_clipping_equals_torchs_in_one_process(way, kv_heads):
    """The norm and the gradients after clipping, against torch's in one process."""
    full = gpt.seeded(lambda: gpt.Block(HIDDEN, HEADS, kv_heads))
    net = gpt.parallel_block(full)
    net = copy.deepcopy(net) if way == "a copy" else net
    for model in (full, net):
        for _ in range(2):  # gradients add up
            (100 * model(data())).square().mean().backward()
    order = math.inf if way == "inf" else 2.0
    expected = torch.nn.utils.clip_grad_norm_(full.parameters(), 1.0, norm_type=order).item()
    if way == "ours":
        norm = clip_grad_norm_(net, 1.0)
    else:
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0, norm_type=order).item()
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(full)).named_parameters())
    assert abs(norm / expected - 1) < CLOSE
    assert worst((p.grad, truth[name]) for name, p in net.named_parameters()) < CLOSE


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3),
    "fused": partial(torch.optim.AdamW, lr=1e-2, eps=1e-3, fused=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_torchs_clipping_equals_one_process(name):
    """Gradients of the class of parts through torch's optimizers, for some steps."""
    full = full_block()
    net = gpt.parallel_block(full)
    for model in (full, net):
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            (10 * model(data(step))).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 0)
    truth = parts_of(full)
    assert worst((p, truth[name]) for name, p in net.named_parameters()) < CLOSE


@pytest.mark.ranks(2)
def test_torchs_scaler_skips_a_step_on_all_ranks(rank):
    """One rank's part of a gradient overflows: all skip the step, and halve the scale."""
    net = gpt.parallel_block(full_block())
    before = [p.detach().clone() for p in net.parameters()]
    optimizer, scaler = torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(net(data()).square().mean()).backward()
    if rank == 1:
        net.mlp.second.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(p, was) for p, was in zip(net.parameters(), before, strict=True))
    assert scaler.get_scale() == 4


class NormWithBuffer(nn.LayerNorm):
    def __init__(self, dtype):
        super().__init__(HIDDEN)
        self.register_buffer("table", torch.arange(-3, 5).to(dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool])
def test_buffers_of_small_types_are_compared_and_kept(rank, dtype):
    full = full_block()
    full.norm_1 = NormWithBuffer(dtype)
    assert gpt.relative_error(gpt.parallel_block(full)(data()), full(data())) < CLOSE
    if dtype != torch.bool:
        full.norm_1.table = full.norm_1.table.to(torch.float32).add(rank).to(dtype)
        with pytest.raises(ValueError, match=r"norm_1\.table"):
            gpt.parallel_block(full)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("wrap", ["NaiveDataParallel", "BucketedDataParallel"])
def test_clipping_in_a_group_of_one_replica_equals_one_process(wrap):
    """DDP keeps its gradients in buckets all the same; several replicas are in tests/test_wrappers_and_layers.py."""
    from pardemo import data_parallel
    from pardemo.groups import Groups, ParallelDims

    full = full_block()
    with Groups(ParallelDims(tp=4)) as groups:
        net = gpt.parallel_block(full, groups.tp)
        net = getattr(data_parallel, wrap)(net, groups.dp)
        norms, errors = [], []
        for step in range(2):
            net.zero_grad()
            full.zero_grad()
            (100 * net(data(step))).square().mean().backward()
            (100 * full(data(step))).square().mean().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
            expected = torch.nn.utils.clip_grad_norm_(full.parameters(), 1.0).item()
            truth = dict(gpt.parallel_block(gpt.gradients_as_weights(full), groups.tp).named_parameters())
            errors.append(abs(norms[-1] / expected - 1))
            errors.append(worst((p.grad, truth[name.removeprefix("module.")]) for name, p in net.named_parameters()))
    assert max(errors) < CLOSE


@pytest.mark.ranks(2)
def test_a_gradient_elsewhere_is_a_plain_tensor():
    """Sent to another process, or copied, a part's gradient is a tensor like any other."""
    net = gpt.parallel_block(full_block())
    net(data()).sum().backward()
    gradient = net.mlp.first.weight.grad
    assert type(copy.deepcopy(gradient)) is torch.Tensor
    assert type(gradient + 1) is torch.Tensor
    sent = [None, None]
    dist.all_gather_object(sent, gradient)
    assert [type(each) for each in sent] == [torch.Tensor] * 2
