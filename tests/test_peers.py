"""The frameworks beside pardemo's layers: same weights, same inputs, same numbers."""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from pardemo import CallMeter, World
from pardemo.book.chapters.megatron_attention import measurements as blocks
from pardemo.book.chapters.sequence_parallel import measurements as sequence_parallel
from pardemo.book.chapters.vocabulary import measurements as vocabulary
from pardemo.small_models import gpt

HIDDEN, HEADS = 64, 4


@pytest.fixture(scope="module", params=[2, 4])
def world(request):
    with World(
        request.param, preload=["pardemo.peers.megatron", "pardemo.peers.pytorch.dtensor"], timeout_s=120
    ) as found:
        yield found


def three_blocks(kv_heads, sequence_parallel):
    """Largest differences of Megatron-core's and DTensor's block from pardemo's: output and every gradient."""
    from pardemo.peers import megatron
    from pardemo.peers.pytorch import dtensor
    from pardemo.tensor_parallel import scatter_sequence

    n, rank = dist.get_world_size(), dist.get_rank()
    full = gpt.seeded(lambda: gpt.Block(HIDDEN, HEADS, kv_heads))
    x, gradient = gpt.numbers(2, 16, HIDDEN, seed=1), gpt.numbers(2, 16, HIDDEN, seed=2)
    ours = gpt.parallel_block(full, sequence_parallel=sequence_parallel)
    mine = (scatter_sequence(x) if sequence_parallel else x.clone()).requires_grad_()
    part = (lambda t: t.chunk(n, 1)[rank]) if sequence_parallel else (lambda t: t)
    y = ours(mine)
    y.backward(part(gradient))
    errors = {}
    with megatron.megatron(tp=n):
        if not sequence_parallel:
            theirs = megatron.Block(full)
            turned = x.transpose(0, 1).contiguous().requires_grad_()
            z = theirs(turned)
            z.backward(gradient.transpose(0, 1))
            errors["megatron"] = [
                (z.transpose(0, 1) - y).abs().max().item(),
                (turned.grad.transpose(0, 1) - mine.grad).abs().max().item(),
                gpt.largest_error(megatron.gradients(theirs), gpt.gradients(ours)),
            ]
    theirs = dtensor.block(full, dtensor.mesh(n), sequence_parallel)
    whole = part(x).clone().requires_grad_()
    z = theirs(whole)
    z.backward(part(gradient))
    full(x).backward(gradient)
    errors["dtensor"] = [
        (z - y).abs().max().item(),
        (whole.grad - mine.grad).abs().max().item(),
        gpt.largest_error(dtensor.gradients(theirs), gpt.gradients(full)),
    ]
    return errors


@pytest.mark.parametrize(("kv_heads", "sequence_parallel"), [(None, False), (4, False), (None, True)])
def test_blocks_are_equal(world, kv_heads, sequence_parallel):
    for errors in world.run(three_blocks, kv_heads, sequence_parallel):
        assert max(error for found in errors.values() for error in found) < 1e-5
        assert set(errors) == ({"dtensor"} if sequence_parallel else {"dtensor", "megatron"})


@pytest.mark.parametrize("run", [blocks.ours, blocks.megatron, blocks.dtensor], ids=lambda run: run.__name__)
def test_a_block_beside_the_plain_one(world, run):
    n = world.size
    for found in world.run(run, 2, 64, 64, 8):
        assert found.error < 1e-5
        assert found.calls == 4
        assert found.parameter_bytes == 4 * ((12 * 64**2 + 7 * 64) // n + 6 * 64)


def sequence_parallel_mlps():
    from pardemo.peers import megatron

    n, rank = dist.get_world_size(), dist.get_rank()
    full = gpt.seeded(lambda: gpt.MLP(HIDDEN))
    x, gradient = (gpt.numbers(2, 16, HIDDEN, seed=s).chunk(n, 1)[rank] for s in (1, 2))
    mine = x.clone().requires_grad_()
    y = gpt.parallel_mlp(full, sequence_parallel=True)(mine)
    y.backward(gradient)
    with megatron.megatron(tp=n):
        theirs = megatron.MLP(full, sequence_parallel=True)
        turned = x.transpose(0, 1).contiguous().requires_grad_()
        with CallMeter() as calls:
            z = theirs(turned)
            z.backward(gradient.transpose(0, 1))
    errors = [(z.transpose(0, 1) - y).abs().max().item(), (turned.grad.transpose(0, 1) - mine.grad).abs().max().item()]
    return max(errors), calls.counts


def test_megatrons_sequence_parallel_mlp(world):
    for error, calls in world.run(sequence_parallel_mlps):
        assert error < 1e-5
        assert calls == {"all_gather": 3, "reduce_scatter": 2}, "it gathers the input again on the way back"


@pytest.mark.parametrize("library", ["pardemo", "Megatron-core", "DTensor"])
def test_losses_over_a_cut_vocabulary_and_layers_in_sequence_are_the_plain_ones(world, library):
    found = world.run(vocabulary.loss, library, 64, 96, 16)
    found += world.run(sequence_parallel.in_sequence, library, 2, 16, HIDDEN, HEADS)
    assert max(rank.error for rank in found) < 1e-5
    assert all(rank.sent_bytes and rank.kept_bytes for rank in found)


def losses(kind):
    from pardemo.peers import megatron

    with megatron.megatron(tp=dist.get_world_size()):
        assert torch.cuda.current_device() == torch.device("cpu")
        net = gpt.seeded(lambda: gpt.GPT(vocabulary=64, hidden=32))
        net = megatron.GPT(net) if kind == "megatron" else gpt.ParallelGPT(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        found = []
        for step in range(4):
            loss = net.loss(gpt.text(4, 17, 64, seed=step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
    return found, type(getattr(net, "model", net)).__name__, torch.cuda.current_device.__module__


def test_a_gpt_of_megatron_core_trains_the_same(world):
    theirs, ours = world.run(losses, "megatron"), world.run(losses, "pardemo")
    assert theirs[0][1] == "GPTModel"
    for (a, *_), (b, *_) in zip(theirs, ours, strict=True):
        assert a == pytest.approx(b, abs=1e-5)
    assert theirs[0][2] == "torch.cuda", "its answer for the current device is back"


def test_gradients_of_other_names_are_not_compared():
    with pytest.raises(ValueError, match=r"compared.*'b'\]"):
        gpt.largest_error({"a": torch.ones(1)}, {"b": torch.ones(1)})


def refused(tp):
    """What Megatron-core says of a layout that does not fit, and whether CUDA's function is its own afterwards."""
    from pardemo.peers import megatron

    before = torch.cuda.current_device
    try:
        with megatron.megatron(tp=tp):
            return "no error", False
    except RuntimeError as error:
        return str(error), torch.cuda.current_device is before


def test_a_layout_that_megatron_refuses_leaves_torch_as_it_was(world):
    for message, restored in world.run(refused, 3):
        assert "is not divisible by" in message
        assert restored


MEGATRON = """
import itertools, warnings
warnings.simplefilter("ignore")
from megatron.core.parallel_state import RankGenerator
from pardemo.groups import AXES, ParallelDims
compared = 0
orders = ["-".join(order) for order in itertools.permutations(("tp", "dp", "pp"))]
orders += ["tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "dp-tp-ep-cp-pp", "pp-dp-ep-cp-tp"]
sizes = [(2, 1, 1, 2, 4), (4, 1, 1, 2, 2), (8, 1, 1, 64, 1), (8, 1, 1, 8, 8), (3, 1, 1, 5, 2), (1, 1, 1, 1, 16)]
sizes += [(2, 2, 1, 2, 3), (1, 4, 1, 3, 1), (2, 1, 4, 2, 2), (1, 1, 8, 4, 1)]
kinds = ["-".join(axes) for size in range(1, 6) for axes in itertools.combinations(AXES, size)]
for size, order in itertools.product(sizes, orders):
    of = dict(zip(AXES, size))
    if all(of[axis] == 1 or axis in order for axis in AXES):
        theirs, ours = RankGenerator(**of, order=order), ParallelDims(**of, order=order)
        for axes in kinds:
            assert ours.groups(axes) == theirs.get_ranks(axes), (of, order, axes)
            compared += 1
print(compared)
"""


def test_groups_are_megatron_cores():
    done = subprocess.run([sys.executable, "-c", MEGATRON], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str((6 * 10 + 4 * 4) * 31)]
