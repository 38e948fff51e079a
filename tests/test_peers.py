"""The frameworks beside pardemo's layers: same weights, same inputs, same numbers."""

import itertools
import re

import nbformat
import pytest
import torch
import torch.distributed as dist

from pardemo import CallMeter, WireMeter, World, project
from pardemo.book.chapters.megatron_attention import measurements as blocks
from pardemo.book.chapters.sequence_parallel import measurements as sequence_parallel
from pardemo.book.chapters.vocabulary import measurements as vocabulary
from pardemo.groups import AXES, ParallelDims
from pardemo.small_models import gpt

HIDDEN, HEADS = 64, 4


@pytest.fixture(scope="module", params=[2, 4])
def world(request):
    preload = ["pardemo.peers.megatron", "pardemo.peers.pytorch.dtensor"]
    with World(request.param, preload=preload, timeout_s=120) as ranks:
        yield ranks


@pytest.mark.parametrize("library", ["pardemo", "Megatron-core", "DTensor"])
def test_a_block_beside_the_plain_one(world, library):
    n = world.size
    for rank in world.run(blocks.compare, library, 2, 64, 64, 8):
        assert rank.error < 1e-5
        assert rank.calls == 4
        assert rank.parameter_bytes == 4 * ((12 * 64**2 + 7 * 64) // n + 6 * 64)


def calls_in_sequence():
    from pardemo.peers import megatron

    n = dist.get_world_size()
    with megatron.megatron(tp=n):
        mlp = megatron.MLP(gpt.seeded(lambda: gpt.MLP(HIDDEN)), sequence_parallel=True)
        x = gpt.numbers(16 // n, 2, HIDDEN).requires_grad_()
        with CallMeter() as calls:
            mlp(x).sum().backward()
    return calls.counts


def test_megatrons_sequence_parallel_mlp_gathers_its_input_again_on_the_way_back(world):
    assert world.run(calls_in_sequence) == [{"all_gather": 3, "reduce_scatter": 2}] * world.size


@pytest.mark.parametrize("library", ["pardemo", "Megatron-core", "DTensor"])
def test_losses_over_a_cut_vocabulary_and_layers_in_sequence_are_the_plain_ones(world, library):
    ranks = world.run(vocabulary.loss, library, 64, 96, 16)
    ranks += world.run(sequence_parallel.in_sequence, library, 2, 16, HIDDEN, HEADS)
    assert max(rank.error for rank in ranks) < 1e-5
    assert all(rank.sent_bytes and rank.kept_bytes for rank in ranks)


def losses(kind):
    from pardemo.peers import megatron

    with megatron.megatron(tp=dist.get_world_size()):
        assert torch.cuda.current_device() == torch.device("cpu")
        net = gpt.seeded(lambda: gpt.GPT(vocabulary=64, hidden=32))
        net = megatron.GPT(net) if kind == "megatron" else gpt.ParallelGPT(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        values = []
        for step in range(4):
            loss = net.loss(gpt.text(4, 17, 64, seed=step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.item())
    return values, type(getattr(net, "model", net)).__name__, torch.cuda.current_device.__module__


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


def compared_groups():
    """Compares the ranks of each group in each order of axes; returns how many groups were compared."""
    from megatron.core.parallel_state import RankGenerator

    orders = ["-".join(order) for order in itertools.permutations(("tp", "dp", "pp"))]
    orders += ["tp-cp-ep-dp-pp", "tp-pp-cp-ep-dp", "dp-tp-ep-cp-pp", "pp-dp-ep-cp-tp"]
    sizes = [(2, 1, 1, 2, 4), (4, 1, 1, 2, 2), (8, 1, 1, 64, 1), (8, 1, 1, 8, 8), (3, 1, 1, 5, 2), (1, 1, 1, 1, 16)]
    sizes += [(2, 2, 1, 2, 3), (1, 4, 1, 3, 1), (2, 1, 4, 2, 2), (1, 1, 8, 4, 1)]
    kinds = ["-".join(axes) for size in range(1, 6) for axes in itertools.combinations(AXES, size)]
    compared = 0
    for size, order in itertools.product(sizes, orders):
        dims = dict(zip(AXES, size, strict=True))
        if all(dims[axis] == 1 or axis in order for axis in AXES):
            theirs, ours = RankGenerator(**dims, order=order), ParallelDims(**dims, order=order)
            for axes in kinds:
                assert ours.groups(axes) == theirs.get_ranks(axes), (dims, order, axes)
                compared += 1
    return compared


def test_groups_are_megatron_cores(world):
    assert world.run(compared_groups)[0] == (6 * 10 + 4 * 4) * 31


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_hsdp_program_of_the_page_trains_and_sends_weights_in_bf16(nodes):
    """*ZeRO's traffic*, "The real thing"; ``nodes``: of one or two ranks each."""
    cells = nbformat.read(project.notebooks()["12_zero_communication"], 4).cells
    (cell,) = (cell for cell in cells if "set_requires_all_reduce(last)" in cell.source)
    program = re.search(r"```python\n(.*?)```", cell.source, re.S).group(1)
    shards, training = program.replace('"cuda"', '"cpu"').split("\n\n")
    model = gpt.linear_stack(64, 3)
    model.blocks = list(model)
    before = [p.detach().clone() for p in model.parameters()]
    names = vars(torch.distributed.fsdp) | vars(torch.distributed.device_mesh) | {
        "torch": torch, "H": nodes, "G": 2 // nodes, "model": model,
        "micro_batches": [gpt.numbers(8, 64, seed=seed) for seed in range(2)],
        "loss_of": lambda model, batch: model(batch).float().square().mean(),
    }  # fmt: skip
    exec(shards, names)
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    with WireMeter(evidence="count") as sent:
        exec(training, names)
    numbers = 3 * 64**2
    rings = 2 * 3 if nodes == 1 else 2  # three a micro-batch inside the node, an all-reduce a step between nodes
    assert sent.sent_bytes == rings * 2 * numbers / 2
    after = [p.full_tensor() for p in model.parameters()]
    assert all(p.dtype == torch.float32 and not torch.equal(p, old) for p, old in zip(after, before, strict=True))
