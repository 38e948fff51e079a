"""What training scripts do with a wrapped model beside forward and backward: right as in one process, or refused."""

import contextlib
import copy
import functools
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from pardemo.data_parallel import BucketedDataParallel, NaiveDataParallel

WRAPPERS = {
    "naive": NaiveDataParallel,
    "bucketed": BucketedDataParallel,
    "tiny buckets": lambda module: BucketedDataParallel(module, bucket_bytes=1),
    "no overlap": lambda module: BucketedDataParallel(module, overlap=False),
}
#: double precision: what remains is the order of a few additions
EXACT = {"rtol": 1e-11, "atol": 1e-11}
every_wrapper = pytest.mark.parametrize("variant", WRAPPERS)


def seeded(build, seed=3):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build().double()


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))


def batch(step, rank):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def values(module):
    return [p.detach().clone() for p in module.parameters()]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, **EXACT)


def compare_training(world, variant, train, build=mlp):
    """``train(model, net, losses)`` in the ranks and in this process; ``losses(step)``: the mean loss of the samples
    that this process has, to call ``backward()`` on."""
    size = world.size

    def check():
        rank = dist.get_rank()
        net = seeded(build, 3 + rank)  # rank 0's is to count
        model = WRAPPERS[variant](net)
        return train(model, net, lambda step: model(batch(step, rank)).square().mean()) or values(net)

    net = seeded(build)
    alone = train(net, net, lambda step: sum(net(batch(step, r)).square().mean() for r in range(size)) / size)
    for found in world.run(check):
        assert_equal(found, alone or values(net))


# ---------------------------------------------------------------- hooks on parameters


@every_wrapper
def test_an_optimizer_in_backward_is_refused_and_without_it_training_goes_on(world_of, variant):
    """Its step would use this rank's gradient: copies would drift apart without a word."""

    def check():
        rank, net = dist.get_rank(), seeded(mlp)
        model = WRAPPERS[variant](net)
        optimizer = torch.optim.SGD([net[2].weight], 0.1)

        def step(parameter):
            optimizer.step()
            optimizer.zero_grad()

        hook = net[2].weight.register_post_accumulate_grad_hook(step)
        before = values(net)
        with pytest.raises(RuntimeError, match=r"2\.weight.*register_post_accumulate_grad_hook"):
            model(batch(0, rank)).square().mean().backward()
        with model.no_sync(), pytest.raises(RuntimeError, match=r"^2\.weight has a hook"):
            model(batch(0, rank)).square().mean().backward()
        assert_equal(values(net), before)
        hook.remove()
        model.zero_grad()
        model(batch(0, rank)).square().mean().backward()
        return [p.grad for p in net.parameters()]

    net = seeded(mlp)
    (sum(net(batch(0, rank)).square().mean() for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for p in net.parameters()])


@pytest.mark.parametrize("everywhere", [True, False])
def test_a_hook_from_before_wrapping_is_refused_on_all_ranks(world_of, everywhere):
    def check():
        net = mlp()
        if everywhere or dist.get_rank() == 1:
            net[0].bias.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2))
        with pytest.raises(
            ValueError, match=rf"^{'' if everywhere else 'rank 1: '}0\.bias has a hook by register_post"
        ):
            BucketedDataParallel(net)

    world_of(2).run(check)


@every_wrapper
def test_a_hook_on_the_gradient_as_it_comes_is_right(world_of, variant):
    """``Tensor.register_hook`` changes a rank's contribution; a factor is that of the mean."""

    def train(model, net, losses):
        net[0].weight.register_hook(lambda gradient: 2 * gradient)
        losses(0).backward()
        return [p.grad for p in net.parameters()]

    compare_training(world_of(2), variant, train)


# ---------------------------------------------------------------- parameters that are frozen later


@every_wrapper
@pytest.mark.parametrize("size", [2, 3])
def test_a_parameter_frozen_on_one_rank_alone_is_refused_on_all(world_of, variant, size):
    def check():
        net = seeded(mlp)
        model = WRAPPERS[variant](net)
        model(batch(0, dist.get_rank())).sum().backward()
        if dist.get_rank() == 1:
            net[2].weight.requires_grad_(False)
        with pytest.raises(ValueError, match=r"2\.weight"):
            model(batch(1, dist.get_rank())).sum().backward()

    world_of(size).run(check)


@every_wrapper
def test_parameters_frozen_on_all_ranks_stay_as_they_are(world_of, variant):
    """Also under an optimizer that moves what has a gradient of zero."""

    def train(model, net, losses):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
        for step in range(4):
            net[0].requires_grad_(step in (0, 3))
            optimizer.zero_grad()
            losses(step).backward()
            optimizer.step()

    compare_training(world_of(2), variant, train)


# ---------------------------------------------------------------- autograd beside backward()


@every_wrapper
def test_a_graph_of_gradients_is_refused(world_of, variant):
    def check():
        model = WRAPPERS[variant](seeded(mlp))
        with pytest.raises(RuntimeError, match=r"backward\(create_graph=True\)"):
            model(batch(0, dist.get_rank())).square().mean().backward(create_graph=True)

    world_of(2).run(check)


@every_wrapper
def test_a_gradient_penalty_within_the_loss_is_right_and_nothing_warns(world_of, variant):
    def penalised(net, x):
        x = x.clone().requires_grad_()
        y = net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    def check():
        net = seeded(mlp)
        model = WRAPPERS[variant](net)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            penalised(model, batch(0, dist.get_rank())).backward()
        return [p.grad for p in net.parameters()]

    net = seeded(mlp)
    (sum(penalised(net, batch(0, rank)) for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for p in net.parameters()])


@every_wrapper
def test_autograd_grad_of_parameters_is_local_and_says_so_once(world_of, variant):
    def check():
        rank, net = dist.get_rank(), seeded(mlp)
        model = WRAPPERS[variant](net)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(2):
                loss = model(batch(0, rank)).square().mean()
                local = torch.autograd.grad(loss, [net[4].bias, net[0].weight])
        (warning,) = (w for w in told if "data-parallel" in str(w.message))
        assert says(str(warning.message), "torch.autograd.grad")
        return [ring_all_reduce(gradient.div_(2)) for gradient in local]

    net = seeded(mlp)
    (sum(net(batch(0, rank)).square().mean() for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [net[4].bias.grad, net[0].weight.grad])


# ---------------------------------------------------------------- copies


@every_wrapper
def test_an_average_of_weights_is_that_of_one_process(world_of, variant):
    """``AveragedModel`` makes a deepcopy of what it is given."""

    def train(model, net, losses):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6), use_buffers=True)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            losses(step).backward()
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            return [*values(average), average(batch(9, 0))]

    compare_training(world_of(2), variant, train, lambda: nn.Sequential(*mlp(), nn.BatchNorm1d(4, affine=False)).eval())


def test_a_copy_has_the_wrappers_names_and_none_of_its_exchanges(world_of):
    def check():
        rank, net = dist.get_rank(), seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        model = BucketedDataParallel(net)
        net[1].eval()
        copied, whole = copy.deepcopy(model), copy.deepcopy(nn.Sequential(model))
        assert list(copied.state_dict()) == list(model.state_dict())
        assert [part.training for part in copied.modules()] == [part.training for part in model.modules()]
        assert not copied.module[0].weight._post_accumulate_grad_hooks
        assert not isinstance(whole[0], BucketedDataParallel)
        x = batch(0, rank)
        with torch.no_grad():
            assert torch.equal(copied(x), model(x))
        with pytest.raises(RuntimeError, match=r"deepcopy.*gradients"):
            copied(x)
        assert torch.equal(copied.requires_grad_(False)(x), net(x))
        assert copied.eval().requires_grad_()(x).requires_grad
        again = BucketedDataParallel(copy.deepcopy(copied.module))
        model._left_out = 0  # of a forward that was only compared
        for wrapper in (again, model):
            wrapper.eval()(x).square().mean().backward()
        return [p.grad for p in [*again.parameters(), *model.parameters()]]

    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))).eval()
    (sum(net(batch(0, rank)).square().mean() for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, 2 * [p.grad for p in net.parameters()])


def test_a_wrapper_is_not_pickled(world_of):
    def check():
        for wrap in (NaiveDataParallel, BucketedDataParallel):
            with pytest.raises(TypeError, match=rf"^a {wrap.__name__} holds connections.* save its state_dict\(\)"):
                pickle.dumps(wrap(mlp()))

    world_of(2).run(check)


# ---------------------------------------------------------------- steps


@every_wrapper
@pytest.mark.parametrize("size", [2, 3])
def test_torchs_clipping_right_after_backward_clips_the_mean(world_of, variant, size):
    """Sums that overlap with the backward pass have ended when it returns."""

    def train(model, net, losses):
        optimizer, norms = torch.optim.SGD(net.parameters(), 1.0, momentum=0.9), []
        for step in range(4):
            optimizer.zero_grad()
            (10 * losses(step)).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
        return [*values(net), torch.stack(norms)]

    compare_training(world_of(size), variant, train)


@every_wrapper
def test_a_scaler_skips_a_step_on_all_ranks_where_one_has_no_number(world_of, variant):
    def train(model, net, losses):
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1), []
        for step in range(5):
            optimizer.zero_grad()
            last = not dist.is_initialized() or dist.get_rank() == 1
            factor = float("inf") if step == 2 and last else 1.0
            scaler.scale(losses(step) * factor).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [16.0, 32.0, 16.0, 32.0, 64.0]

    compare_training(world_of(2), variant, train)


@every_wrapper
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_with_a_closure(world_of, variant, optimizer):
    def train(model, net, losses):
        stepper = optimizer(net.parameters(), 0.05)
        for step in range(3):

            def closure(step=step):
                stepper.zero_grad()
                loss = losses(step)
                loss.backward()
                return loss

            stepper.step(closure)

    compare_training(world_of(2), variant, train)


@every_wrapper
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_reads_the_loss_is_given_the_ranks_mean(world_of, variant, line_search):
    def train(model, net, losses):
        stepper = torch.optim.LBFGS(net.parameters(), 0.5, max_iter=6, line_search_fn=line_search)

        def closure():
            stepper.zero_grad()
            loss = losses(0)
            loss.backward()
            loss = loss.detach()
            return ring_all_reduce(loss / dist.get_world_size()) if dist.is_initialized() else loss

        for _ in range(2):
            stepper.step(closure)

    compare_training(world_of(2), variant, train)


# ---------------------------------------------------------------- modules


class WithBuffers(nn.Module):
    """Buffers of types that few exchanges know."""

    def __init__(self, dtypes):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"buffer_{number}", torch.zeros(5).to(dtype))
        self.register_buffer("strided", torch.zeros(4, 4)[:, 1])
        self.register_buffer("nothing", torch.zeros(0, dtype=torch.int16))

    def forward(self, x):
        return self.linear(x)


BUFFERS = (torch.int16, torch.uint8, torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex64)
BUFFERS += (torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


@every_wrapper
def test_buffers_of_any_type_are_rank_0s(world_of, variant):
    def check():
        rank, net = dist.get_rank(), WithBuffers(2 * BUFFERS)  # two of each type are one message
        model = WRAPPERS[variant](net)
        for buffer in net.buffers():
            buffer.copy_(torch.full(buffer.shape, float(1 + rank)).to(buffer.dtype))
        model(torch.ones(2, 4)).sum().backward()
        return [buffer.to(torch.complex64) for buffer in net.buffers()]

    for found in world_of(3).run(check):
        assert all(torch.equal(values, torch.ones_like(values)) for values in found)


class Activation(nn.Sequential):
    """In-place activations at its beginning, in it and at its end."""

    def __init__(self):
        layers = [nn.ReLU(inplace=True), nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 4), nn.ReLU(inplace=True)]
        super().__init__(*layers)


@every_wrapper
def test_activations_in_place(world_of, variant):
    def train(model, net, losses):
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            losses(step).backward()
            optimizer.step()

    compare_training(world_of(2), variant, train, Activation)


@every_wrapper
def test_an_output_that_is_changed_in_place(world_of, variant):
    def check():
        net = seeded(mlp)
        F.leaky_relu_(WRAPPERS[variant](net)(batch(0, dist.get_rank())), 0.3).square().mean().backward()
        return [p.grad for p in net.parameters()]

    net = seeded(mlp)
    (sum(F.leaky_relu(net(batch(0, rank)), 0.3).square().mean() for rank in range(2)) / 2).backward()
    for found in world_of(2).run(check):
        assert_equal(found, [p.grad for p in net.parameters()])


class SharedInCheckpoints(nn.Module):
    """One layer three times, twice in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.begin, self.layer = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        x = checkpoint(self.layer, self.begin(x), use_reentrant=False)
        return self.layer(checkpoint(self.layer, x, use_reentrant=False))


@every_wrapper
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_layer_in_several_checkpoints(world_of, variant, accumulate):
    def train(model, net, losses):
        for micro in range(accumulate):
            early = micro < accumulate - 1 and model is not net
            with model.no_sync() if early else contextlib.nullcontext():
                losses(micro).backward()
        return [p.grad for p in net.parameters()]

    compare_training(world_of(2), variant, train, SharedInCheckpoints)


@every_wrapper
def test_sparse_gradients_are_one_line(world_of, variant):
    def check():
        model = WRAPPERS[variant](nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)))
        with pytest.raises(TypeError, match="sparse=False"):
            model(torch.tensor([1, 2])).sum().backward()

    world_of(2).run(check)


@pytest.mark.parametrize("buffers", [False, True], ids=["", "buffers"])
@pytest.mark.parametrize("where", ["inside", "a part", "around", "in place"])
def test_compiled_models(world_of, where, buffers):
    """Without a compiler's code, by its two tracers; fresh graphs for each wrapper."""

    def made():
        net = seeded(mlp)
        if buffers:  # rank 0's go to all before each forward pass: the compiler must not follow them there
            net.register_buffer("steps", torch.ones(3))
        return net

    def check():
        rank, results = dist.get_rank(), []
        compiled = functools.partial(torch.compile, backend="aot_eager")
        for variant in WRAPPERS:
            net = made()
            if where == "a part":
                net[2] = compiled(net[2])
            if where == "in place":
                net.compile(backend="aot_eager")
            model = WRAPPERS[variant](compiled(net) if where == "inside" else net)
            model = compiled(model) if where == "around" else model
            optimizer = torch.optim.SGD(net.parameters(), 0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step, rank)).square().mean().backward()
                optimizer.step()
            results.append(values(net))
            average = AveragedModel(model)
            average.update_parameters(model)
            results.append(values(average))
        return results

    net = made()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        (sum(net(batch(step, rank)).square().mean() for rank in range(2)) / 2).backward()
        optimizer.step()
    for results in world_of(2).run(check):
        for found in results:
            assert_equal(found, values(net))


def test_ranks_that_would_average_in_different_ways_are_told_at_once(world_of):
    """One's gradients would go round a ring, while another waits for a server."""

    def check():
        ways = {0: ring_all_reduce, 1: parameter_server_all_reduce}
        with pytest.raises(ValueError, match=r"1.*NaiveDataParallel.*parameter_server_all_reduce"):
            NaiveDataParallel(mlp(), all_reduce=ways[dist.get_rank()])

    world_of(2).run(check, timeout_s=30)
