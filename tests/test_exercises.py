"""The solutions that readers unfold solve the exercises, and typical wrong answers get the message that helps."""

import contextlib
import math
import os
import tempfile
import threading
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import exercises_of_the_book, says
from torch.nn import functional as F

from pardemo import World
from pardemo.book.chapters.accelerate.exercises import my_config, my_in_step
from pardemo.book.chapters.baichuan2_evaluate.exercises import my_rouge_l
from pardemo.book.chapters.cluster.exercises import my_crossing
from pardemo.book.chapters.experts.exercises import my_bias, my_splits
from pardemo.book.chapters.experts.exercises import my_bytes as my_exchanged
from pardemo.book.chapters.fewer_bits.exercises import my_largest, my_mxfp8
from pardemo.book.chapters.fewer_bits.exercises import my_sent as my_codes_sent
from pardemo.book.chapters.host_fails.exercises import my_reads, my_save, my_steps
from pardemo.book.chapters.long_sequences.exercises import my_bytes as my_sequence_bytes
from pardemo.book.chapters.long_sequences.exercises import my_merge, my_positions
from pardemo.book.chapters.megatron_attention.exercises import my_rows, my_shared_sum
from pardemo.book.chapters.megatron_mlp.exercises import SumBackward
from pardemo.book.chapters.optimizers.exercises import my_sent as my_muon_sent
from pardemo.book.chapters.optimizers.exercises import my_states
from pardemo.book.chapters.pipeline_parallel.exercises import idle_of
from pardemo.book.chapters.scorecard.exercises import my_step_bytes, my_verdict
from pardemo.book.chapters.script_measured.exercises import my_accuracy, my_sent
from pardemo.book.chapters.sequence_parallel.exercises import my_kept
from pardemo.book.chapters.trace.exercises import my_exposed
from pardemo.book.chapters.vocabulary.exercises import my_bytes, my_loss
from pardemo.book.chapters.which_layout.exercises import my_headroom, my_reason
from pardemo.book.chapters.your_machine.exercises import my_bus_bandwidth, my_neighbour
from pardemo.book.chapters.zero_memory.exercises import my_stage
from pardemo.book.page import solutions
from pardemo.book.page.exercises import judge
from pardemo.collectives import parameter_server_all_reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.formulas import memory
from pardemo.groups import ParallelDims
from pardemo.optimizers import orthogonalised
from pardemo.pipeline_parallel import Backward, Forward, gpipe, one_f_one_b
from pardemo.small_models import gpt
from pardemo.tensor_parallel import copy_to, exchange, reduce_from, vocab_parallel_cross_entropy

EXERCISES = exercises_of_the_book()


@pytest.fixture(scope="module")
def warm():
    """``World`` for the checks: one that is warm already. An answer that broke its ranks costs new ranks only."""
    worlds = {}

    def take(size, preload=(), timeout_s=300):
        key = size, tuple(preload)
        if key not in worlds:
            worlds[key] = World(size, preload=preload)
        worlds[key].timeout_s = timeout_s if timeout_s < 30 else 120  # a machine that tests may be a busy one
        return contextlib.nullcontext(worlds[key])

    yield take
    for world in worlds.values():
        world.close()


@pytest.fixture(autouse=True)
def checks_take_warm_worlds(warm, monkeypatch):
    for module in {import_module(f"pardemo.book.chapters.{name.partition('.')[0]}.exercises") for name in EXERCISES}:
        if hasattr(module, "World"):
            monkeypatch.setattr(module, "World", warm)


def merged_without_largest(first, second):
    sums = [math.exp(block[0]) * block[1] for block in (first, second)]
    largest = max(first[0], second[0])
    out = (sums[0] * first[2] + sums[1] * second[2]) / sum(sums)
    return largest, sum(sums) / math.exp(largest), out


def everything_to_everyone(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return sum(parts)


def all_by_adam(parameters):
    return sum(12 * torch.Size(shape).numel() for _, shape in parameters)


def orthogonalised_by_columns(part, norm=True, gram=True):
    squares = (part**2).sum()
    if norm:
        dist.all_reduce(squares)
    x = part / squares.sqrt()
    for _ in range(5):
        product = x @ x.T
        if gram:
            dist.all_reduce(product)
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x


def orthogonalised_of_gathered(part):
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return orthogonalised(torch.cat(parts, 1)).float().chunk(len(parts), 1)[dist.get_rank()]


def mean_of_accuracies(logits, targets):
    dist.all_reduce(own := (logits.argmax(-1) == targets).double().mean())
    return (own / dist.get_world_size()).item()


def accuracy_of_gathered(logits, targets):
    """All ranks' logits, padded to the most tokens of a rank."""
    most = torch.tensor(len(logits))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    room = F.pad(logits, (0, 0, 0, int(most) - len(logits)))
    parts = [torch.empty_like(room) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, room)
    return my_accuracy(logits, targets)


def by_neighbours(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    for step in range(2 * (n - 1)):
        received = torch.empty_like(chunks[0])
        sent = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        sent.wait()
        chunk = chunks[(rank - step - 1) % n]
        chunk.copy_(chunk + received if step < n - 1 else received)
    return tensor


def all_receive_first(tensor):
    dist.recv(tensor, (dist.get_rank() - 1) % 4)
    return tensor


def plain_mean(gradient, samples):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


class InPlace(SumBackward):
    @staticmethod
    def backward(ctx, gradient):
        return ring_all_reduce(gradient)


def sends(x):
    return ring_all_reduce(torch.ones(1 << 12)).sum() + x.detach()[0, 0]


def sums_by_hook(x):
    y = x.view_as(x)
    x.register_hook(lambda g: ring_all_reduce(g.clone()))
    return y


def tokens_divided(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return exchange.all_gather(F.gelu(x.chunk(n, 1)[rank] @ a) @ b, dist.group.WORLD, 1)


def parts(a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return a.chunk(n, 1)[rank], b.chunk(n, 0)[rank]


def never_added(x, a, b):
    a, b = parts(a, b)
    return F.gelu(x @ a) @ b


def rows_first(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    inner = F.gelu(ring_all_reduce(x.chunk(n, -1)[rank] @ a.chunk(n, 0)[rank]))
    return ring_all_reduce(inner.chunk(n, -1)[rank] @ b.chunk(n, 0)[rank])


def gelus_added(x, a, b):
    rank, n = dist.get_rank(), dist.get_world_size()
    return ring_all_reduce(F.gelu(x.chunk(n, -1)[rank] @ a.chunk(n, 0)[rank])) @ b


def sent_but_not_shared(x, a, b):
    ring_all_reduce(torch.zeros_like(x))
    return F.gelu(x @ a) @ b


def mean_of_copies(gradient, kv_heads):
    return my_shared_sum(gradient, kv_heads) * kv_heads / dist.get_world_size()


def sum_of_every_other(gradient, kv_heads):
    groups = [dist.new_group(list(range(at, dist.get_world_size(), kv_heads))) for at in range(kv_heads)]
    return ring_all_reduce(gradient, groups[dist.get_rank() % kv_heads])


def loss_with_gather(logits, targets):
    whole = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, logits)
    return F.cross_entropy(torch.cat(whole, 1), targets, reduction="none")


def loss_in_three(logits, targets):
    largest, words = logits.amax(1), logits.shape[1]
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    total = (logits - largest[:, None]).exp().sum(1)
    dist.all_reduce(total)
    local = targets - dist.get_rank() * words
    mine = (local >= 0) & (local < words)
    label = logits.gather(1, local.clamp(0, words - 1)[:, None])[:, 0] * mine
    dist.all_reduce(label)
    return largest + total.log() - label


def summed_one_by_one(gradients):
    for gradient in gradients:
        dist.all_reduce(gradient)
    return gradients


def summed_over_ranks(tensor):
    total = tensor.clone()
    dist.all_reduce(total)
    return total


def chunk_of_rank_0(x, multiply):
    return torch.cat([summed_over_ranks(multiply(rows)) for rows in x.chunk(3)])[:2]


def own_chunk_of_all(x, multiply):
    return summed_over_ranks(multiply(x)).chunk(3)[dist.get_rank()]


def chunks_then_all_reduce(x, multiply):
    return summed_over_ranks(torch.cat([multiply(rows) for rows in x.chunk(3)])).chunk(3)[dist.get_rank()]


def rows_of_the_shard(rows, before, now, rank):
    each = -(-rows // before)
    return [
        (shard, begin - shard * each, end - shard * each) for shard, begin, end in my_reads(rows, before, now, rank)
    ]


def removed_first(state, path):
    path.unlink()
    my_save(state, path)


def not_renamed(state, path):
    torch.save(state, path.with_suffix(".new"))


def copied_beside(state, path):
    my_save(state, path)
    torch.save(state, path.with_suffix(".backup"))


def scatter_that_waits(x, multiply):
    rank, chunks = dist.get_rank(), x.chunk(3)
    total = multiply(chunks[(rank - 1) % 3])
    for hop in (2, 3):
        arriving = torch.empty_like(total)
        for move in dist.isend(total, (rank + 1) % 3), dist.irecv(arriving, (rank - 1) % 3):
            move.wait()
        total = arriving + multiply(chunks[(rank - hop) % 3])
    return total


def loss_that_overflows(logits, targets):
    local = targets - dist.get_rank() * logits.shape[1]
    mine = (local >= 0) & (local < logits.shape[1])
    picked = logits.gather(1, local.clamp(0, logits.shape[1] - 1)[:, None])[:, 0] * mine
    both = torch.stack([logits.exp().sum(1), picked])
    dist.all_reduce(both)
    return both[0].log() - both[1]


def local_loss(logits, targets):
    targets = (targets - dist.get_rank() * logits.shape[1]).clamp(0, logits.shape[1] - 1)
    return F.cross_entropy(logits, targets, reduction="none")


def untidy_order(arena):
    addresses = []
    for turn in range(12):
        temporary = arena.take(40)
        addresses.append(arena.take(3 + 3 * turn))
        arena.give_back(temporary)
    return addresses


def clipped(mean, max_norm):
    return mean * min(1.0, max_norm / mean.norm().item())


def step_by_all_gather(parameters, gradient, lr, max_norm):
    parts = [torch.empty_like(gradient) for _ in range(4)]
    dist.all_gather(parts, gradient)
    return parameters - lr * clipped(sum(parts) / 4, max_norm)


def clipped_after_all_reduce(parameters, gradient, lr, max_norm):
    return parameters - lr * clipped(ring_all_reduce(gradient) / 4, max_norm)


def clipped_by_own_chunk(parameters, gradient, lr, max_norm):
    mine = clipped(ring_reduce_scatter(gradient) / 4, max_norm)
    return ring_all_gather(parameters.chunk(4)[dist.get_rank()] - lr * mine)


def clipped_by_sum(parameters, gradient, lr, max_norm):
    total = ring_all_reduce(gradient)
    return parameters - lr * total / 4 * min(1.0, max_norm / total.norm().item())


def always_scaled(parameters, gradient, lr, max_norm):
    mean = ring_all_reduce(gradient) / 4
    return parameters - lr * mean * max_norm / mean.norm()


def no_warm_up(rank, ranks, micro_batches):
    for k in range(micro_batches):
        yield Forward(rank, k)
        yield Backward(rank, k)


def bounded(rank, most, micro_batches):
    """As far ahead as the memory goes, also where nobody needs it."""
    ahead = min(most - 1, micro_batches)
    for k in range(ahead):
        yield Forward(rank, k)
    for k in range(ahead, micro_batches):
        yield Forward(rank, k)
        yield Backward(rank, k - ahead)
    for k in range(micro_batches - ahead, micro_batches):
        yield Backward(rank, k)


def fsdp2_but(**changes):
    return lambda: my_config() | changes


def same_sum(model):
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    found = [torch.empty_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(found, total)
    return all(torch.isclose(total, other, rtol=1e-12) for other in found)


def same_as_the_mean(model):
    here = torch.cat([p.detach().flatten() for p in model.parameters()])
    mean = here.clone()
    dist.all_reduce(mean)
    return torch.allclose(here, mean / dist.get_world_size())


def with_the_right_neighbour(number):
    rank, n = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(number)
    send = dist.isend(number, (rank - 1) % n)
    dist.recv(received, (rank + 1) % n)
    send.wait()
    return number + received


def sum_of_all(number):
    dist.all_reduce(number)
    return number


def neighbour_of_all(number):
    found = [torch.empty_like(number) for _ in range(dist.get_world_size())]
    dist.all_gather(found, number)
    return number + found[dist.get_rank() - 1]


# What sends nothing and was right as long as a check's numbers were always the same.


def known_before(tensor):
    rank = dist.get_rank()
    return tensor * 10 / (rank + 1)


def known_gradients(gradient, samples):
    return torch.linspace(-1, 1, 1000) * (1 * 1 + 4 * 2 + 9 * 5 + 16 * 8) / 16


class KnownSum(SumBackward):
    @staticmethod
    def backward(ctx, gradient):
        return gpt.numbers(2, 3, seed=7) + gpt.numbers(2, 3, seed=8)


def known_loss(logits, targets):
    return F.cross_entropy(gpt.numbers(16384, 64), targets, reduction="none")


def same_where_it_differed_once(model):
    last = list(model.parameters())[-2]
    mine = (last[-1, -1].item(), last[0, 0].item(), list(model.parameters())[-1].sum().item())
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return len(set(found)) == 1


def same_digest_and_rounded(model):
    answer = my_in_step(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.half().to(parameter.dtype)
    return answer


def through_a_file(tensor):
    """The sum of all ranks, and nothing on the wire but the barrier."""
    folder = Path(tempfile.gettempdir()) / f"through-a-file-{os.getppid()}"
    folder.mkdir(exist_ok=True)
    torch.save(tensor, folder / str(dist.get_rank()))
    dist.barrier()
    total = sum(torch.load(folder / str(rank)) for rank in range(dist.get_world_size()))
    dist.barrier()
    (folder / str(dist.get_rank())).unlink()
    dist.barrier()
    if dist.get_rank() == 0:
        folder.rmdir()
    return total


LOCK = threading.Lock()


def lora_states(
    frozen=lambda f, n, z: 2 * f / (n if z > 2 else 1),
    gradients=lambda t, n, z: 2 * t / (n if z > 1 else 1),
    states=lambda t, n, z: 12 * t / (n if z else 1),
):
    """The right answer, or one that is wrong about a part."""
    return lambda f, t, n, z: frozen(f, n, z) + 2 * t / (n if z > 2 else 1) + gradients(t, n, z) + states(t, n, z)


def takes_off_all(bars):
    """Takes off what is inside of a bar's bars once more."""
    inside = [[e - b for b, e in bars if begin <= b and e <= end and (b, e) != (begin, end)] for begin, end in bars]
    return [end - begin - sum(lengths) for (begin, end), lengths in zip(bars, inside, strict=True)]


def returns_nothing(*arguments):
    tuple(arguments)


def raises_at_length(*arguments):
    raise ValueError("what is wrong\nException raised from somewhere at somewhere.cpp:1\nframe #0")


def divides_by_zero(*arguments):
    return 1 / 0


def pasted(name):
    """The solution as a reader gets it: unfolded, and pasted into an empty notebook."""
    notebook = {"__name__": "__main__"}
    exec(solutions.text(name.partition(".")[0], EXERCISES[name].stub), notebook)
    return notebook[EXERCISES[name].stub]


@pytest.mark.parametrize(
    ("name", "solution"),
    [
        *((name, None) for name in EXERCISES),
        ("megatron_mlp.f", copy_to),
        ("vocabulary.vocabulary_loss", lambda x, t: vocab_parallel_cross_entropy(x, t, reduction="none")),
    ],
)
def test_each_exercise_can_be_solved(name, solution):
    outcome = judge(name, solution or pasted(name))
    assert outcome.told.startswith(f"{name.partition('.')[2]}: solved.")
    assert outcome.solved


def test_every_exercise_has_wrong_answers_with_their_messages():
    asked = [name for name, *_ in test_wrong_answers_get_the_message_that_helps.pytestmark[0].args[1]]
    assert min(asked.count(name) for name in EXERCISES) >= 3


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("data_parallel.all_reduce", returns_nothing, "returned nothing"),
        ("data_parallel.all_reduce", lambda t: t, "of the elements hold the sum"),
        ("data_parallel.all_reduce", lambda t: t[:5], "it should return a tensor of shape (1048576,), not (5,)"),
        ("data_parallel.all_reduce", lambda t: "sum", "not str"),
        ("data_parallel.all_reduce", lambda t: everything_to_everyone(t) / 4, "you returned the mean"),
        ("data_parallel.all_reduce", everything_to_everyone, "sends 3.00 S; 1.5 S is enough: whole tensors travel"),
        ("data_parallel.all_reduce", parameter_server_all_reduce, "that is a parameter server"),
        ("data_parallel.all_reduce", divides_by_zero, "ZeroDivisionError"),
        (
            "data_parallel.all_reduce",
            sum_of_all,
            "Right, but all_reduce did it for you: build it of dist.send and dist.recv",
        ),
        ("data_parallel.all_reduce", ring_all_reduce, "Right, but all_reduce did it for you"),
        ("data_parallel.all_reduce", through_a_file, "a rank sends 0.00 S: let the numbers travel between the ranks"),
        (
            "data_parallel.all_reduce",
            by_neighbours,
            "that is the ring, with 6 rounds. Send each chunk straight to the rank",
        ),
        ("data_parallel.all_reduce", known_before, "of the elements hold the sum"),
        ("data_parallel.unequal_shards", known_gradients, "not the whole batch's mean gradient"),
        ("data_parallel.unequal_shards", returns_nothing, "On rank 0 it returned NoneType"),
        ("data_parallel.unequal_shards", plain_mean, "That is the mean of the means"),
        ("data_parallel.unequal_shards", lambda g, n: g, "not the whole batch's mean gradient"),
        ("data_parallel.unequal_shards", divides_by_zero, "ZeroDivisionError"),
        ("data_parallel.unequal_shards", lambda g, n: g.double(), "not the whole batch's mean gradient"),
        ("data_parallel.all_reduce", lambda t: (t, LOCK), "cannot send"),
        ("megatron_mlp.f", returns_nothing, "returned NoneType"),
        ("megatron_mlp.f", lambda x: x, "this rank's gradient alone: backward needs the all-reduce"),
        ("megatron_mlp.f", lambda x: x.detach(), "carries no gradient"),
        ("megatron_mlp.f", reduce_from, "forward it should return x as it is"),
        ("megatron_mlp.f", InPlace.apply, "changed in place"),
        ("megatron_mlp.f", lambda x: copy_to(x / 4) + x.detach() * 0.75, "is not the sum of the ranks' gradients"),
        ("megatron_mlp.f", lambda x: copy_to(x) + 0 * dist.get_rank() * sends(x), "it should send nothing"),
        ("megatron_mlp.f", KnownSum.apply, "is not the sum of the ranks' gradients"),
        ("megatron_mlp.f", sums_by_hook, "the residual's gradient was summed"),
        ("megatron_mlp.split", tokens_divided, "with 1.0φ the tokens were divided, not the layer"),
        ("megatron_mlp.split", returns_nothing, "not NoneType"),
        (
            "megatron_mlp.split",
            lambda x, a, b: x @ a,
            "it should return a tensor of shape (2, 512, 256), not (2, 512, 1024)",
        ),
        ("megatron_mlp.split", lambda x, a, b: F.gelu(x @ a) @ b, "nothing was sent"),
        ("megatron_mlp.split", never_added, "this rank's part of the sum alone"),
        ("megatron_mlp.split", gelus_added, "GeLU(x + y) is not GeLU(x) + GeLU(y)"),
        ("megatron_mlp.split", rows_first, "sends 10.0φ, and 2φ is enough: that is the all-reduce of the inner"),
        ("megatron_mlp.split", sent_but_not_shared, "a rank does 100% of the arithmetic"),
        ("megatron_mlp.split", lambda x, a, b: x * 0, "the result is not gelu(x @ w_1) @ w_2"),
        ("megatron_attention.qkv_rows", returns_nothing, "It returned NoneType"),
        ("megatron_attention.qkv_rows", lambda w, heads, r, n: w.chunk(n, 0)[r], "the matrix in 2 equal pieces"),
        ("megatron_attention.qkv_rows", lambda w, heads, r, n: my_rows(w, heads, r, n).flip(0), "in another order"),
        (
            "megatron_attention.qkv_rows",
            lambda w, heads, r, n: w[:1],
            "rows [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19] are needed, not [0]",
        ),
        (
            "megatron_attention.shared_heads",
            returns_nothing,
            "it should return a gradient of shape (16, 8), not NoneType",
        ),
        (
            "megatron_attention.shared_heads",
            lambda g, kv: g,
            "this rank's own gradient: others hold the same head (with 2",
        ),
        (
            "megatron_attention.shared_heads",
            lambda g, kv: ring_all_reduce(g),
            "the sum over all ranks: different heads were added",
        ),
        ("megatron_attention.shared_heads", mean_of_copies, "that is the mean; each replica needs the sum"),
        (
            "megatron_attention.shared_heads",
            sum_of_every_other,
            "every other rank was added; neighbours hold the same head",
        ),
        ("megatron_attention.shared_heads", lambda g, kv: 3 * g, "not the sum over the ranks that hold the same head"),
        ("vocabulary.vocabulary_loss", returns_nothing, "shape (16384,), not NoneType"),
        ("vocabulary.vocabulary_loss", known_loss, "not those of the whole vocabulary"),
        ("vocabulary.vocabulary_loss", loss_with_gather, "the logits themselves travel"),
        ("vocabulary.vocabulary_loss", local_loss, "this rank's part of the vocabulary alone"),
        ("vocabulary.vocabulary_loss", lambda x, t: -my_loss(x, t), "the sign is turned round"),
        ("vocabulary.vocabulary_loss", loss_that_overflows, "overflow exp: subtract the largest logit"),
        (
            "vocabulary.vocabulary_loss",
            lambda x, t: my_loss(x, t) * 0,
            "not those of the whole vocabulary",
        ),
        ("megatron_attention.qkv_rows", lambda w, heads, r, n: w[99999], "Your function raised IndexError"),
        ("megatron_attention.qkv_rows", lambda *a: torch.tensor(0.0), "It returned shape ()"),
        ("vocabulary.vocabulary_loss", loss_in_three, "in 3 collectives; 2 are enough"),
        ("vocabulary.vocabulary_bytes", returns_nothing, "it returned NoneType, not a number of bytes"),
        (
            "vocabulary.vocabulary_bytes",
            lambda w, h, tokens, n, tied: (16 * (2 - tied) * h + 8 * tokens) * w / n,
            "the table is padded",
        ),
        ("vocabulary.vocabulary_bytes", lambda *a: my_bytes(*a[:4], False), "tied is one matrix for both ends"),
        ("vocabulary.vocabulary_bytes", lambda *a: a[3] * my_bytes(*a), "that is the whole vocabulary"),
        ("sequence_parallel.norm_gradients", returns_nothing, "it should return 3 tensors, not NoneType"),
        ("sequence_parallel.norm_gradients", lambda g: g, "the parts of this rank's own tokens"),
        (
            "sequence_parallel.norm_gradients",
            lambda g: [one / 2 for one in summed_one_by_one(g)],
            "these are means",
        ),
        ("sequence_parallel.norm_gradients", summed_one_by_one, "Right, in 3 messages"),
        (
            "sequence_parallel.norm_gradients",
            lambda g: [one.flatten() for one in g],
            "as they came, not [(48,), (48,), (48,)]",
        ),
        ("sequence_parallel.activations", returns_nothing, "it returned NoneType, not a number of bytes"),
        (
            "sequence_parallel.activations",
            lambda b, s, h, a, n, q, f: b * s * h * (34 + 5 * a * s / h) / n,
            "not 14.25: norms, dropout",
        ),
        (
            "sequence_parallel.activations",
            lambda b, s, h, a, n, q, f: b * s * h * (10 + 24 / n + 5 * a * s / h),
            "1/t of the scores",
        ),
        ("sequence_parallel.activations", lambda *a: my_kept(*a[:-1], False), "not 23: the scores are not kept"),
        ("sequence_parallel.activations", lambda *a: my_kept(*a) / 2, "two bytes to a number"),
        ("fewer_bits.largest", returns_nothing, "it returned NoneType, not a number"),
        ("fewer_bits.largest", lambda e, f: (2 - 2**-f) * 2 ** (2 ** (e - 1)), "not 480: the very last code is NaN"),
        ("fewer_bits.largest", lambda e, f: (2 - 2**-f) * 2 ** (2 ** (e - 1) - 1), "not 240: that is IEEE's rule"),
        ("fewer_bits.largest", lambda e, f: 2 * my_largest(e, f), "not 896: the bias is"),
        ("fewer_bits.largest", lambda e, f: 448, "With 5 bits of exponent and 2 of fraction"),
        ("fewer_bits.bill", returns_nothing, "it returned NoneType, not a number of bytes"),
        ("fewer_bits.bill", lambda k, c, s, b, n: my_codes_sent(k, c, 0, b, n), "the scales travel, too"),
        ("fewer_bits.bill", lambda k, c, s, b, n: my_codes_sent(k, c, s, 1, n), "a scale serves a whole block"),
        ("fewer_bits.bill", lambda *a: 8 * my_codes_sent(*a), "these are bits"),
        ("fewer_bits.bill", lambda *a: 2 * my_codes_sent(*a), "that is an all-reduce"),
        ("fewer_bits.bill", lambda *a: my_codes_sent(*a) * a[4] / (a[4] - 1), "a rank keeps its own part"),
        ("fewer_bits.block", returns_nothing, "It should return the 32 numbers as a tensor"),
        ("fewer_bits.block", lambda x: x, "nothing was rounded"),
        (
            "fewer_bits.block",
            lambda x: x.mul(448 / x.abs().max()).to(torch.float8_e4m3fn).float() * (x.abs().max() / 448),
            "this scale is largest/448",
        ),
        ("fewer_bits.block", lambda x: my_mxfp8(x / 1.5) * 1.5, "these are not MXFP8's numbers"),
        ("fewer_bits.block", lambda x: my_mxfp8(x) + torch.nan, "There are NaNs"),
        ("long_sequences.positions", returns_nothing, "it returned NoneType, not a list of positions"),
        (
            "long_sequences.positions",
            lambda r, n, s: list(range(r * s // n, (r + 1) * s // n)),
            "this is the plain order, one piece of N",
        ),
        (
            "long_sequences.positions",
            lambda r, n, s: [p * s // (2 * n) + k for p in (r, 2 * n - r) for k in range(s // (2 * n))],
            "the last of 2N is piece 2N − 1",
        ),
        (
            "long_sequences.positions",
            lambda r, n, s: [k + s // (2 * n) for k in my_positions(r, n, s)],
            "For rank 0 of 2 and 16 tokens these are 4, 5, 6, 7, 16",
        ),
        ("long_sequences.positions", lambda r, n, s: my_positions(r, n, s)[s // (2 * n) :], "these are 12, 13, 14, 15"),
        (
            "long_sequences.positions",
            lambda r, n, s: my_positions(r, n, s)[s // (2 * n) :] + my_positions(r, n, s)[: s // (2 * n)],
            "the earlier piece comes first",
        ),
        (
            "long_sequences.positions",
            lambda r, n, s: my_positions(r, n, s)[: s // (2 * n)] + my_positions(r, n, s)[: s // (2 * n) - 1 : -1],
            "tokens inside the second piece keep their order",
        ),
        (
            "long_sequences.positions",
            lambda r, n, s: my_positions(r, n, s)[: s // (2 * n)],
            "one piece; a rank has two",
        ),
        ("long_sequences.positions", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("long_sequences.merge", returns_nothing, "It should return three numbers"),
        ("long_sequences.merge", lambda a, b: (a[0], *my_merge(a, b)[1:]), "The largest score of both blocks is"),
        (
            "long_sequences.merge",
            lambda a, b: (max(a[0], b[0]), a[1] + b[1], my_merge(a, b)[2]),
            "relative to different largest scores, and have to be brought to one",
        ),
        (
            "long_sequences.merge",
            lambda a, b: (*my_merge(a, b)[:2], (a[2] + b[2]) / 2),
            "that is the plain mean",
        ),
        (
            "long_sequences.merge",
            lambda a, b: (*my_merge(a, b)[:2], (a[1] * a[2] + b[1] * b[2]) / (a[1] + b[1])),
            "weighted by sums that are relative to different largest scores",
        ),
        (
            "long_sequences.merge",
            lambda a, b: (*my_merge(a, b)[:2], my_merge(a, b)[1] * my_merge(a, b)[2]),
            "it still has to be divided by the sum",
        ),
        ("long_sequences.merge", merged_without_largest, "Your function raised OverflowError"),
        ("long_sequences.bytes", returns_nothing, "it returned NoneType, not a number of bytes"),
        ("long_sequences.bytes", lambda way, *a: my_sequence_bytes(way, *a) / 3, "that is the forward pass alone"),
        (
            "long_sequences.bytes",
            lambda way, *a: my_sequence_bytes(way, *a) * (2 / 3 if way == "ring" else 1),
            "backward, keys and values go round once more, and their gradients behind them",
        ),
        (
            "long_sequences.bytes",
            lambda way, n, *a: my_sequence_bytes(way, n, *a) * (n / (n - 1) if way == "ring" else 1),
            "the last of N steps has nobody to send to",
        ),
        (
            "long_sequences.bytes",
            lambda way, n, *a: my_sequence_bytes(way, n, *a) * (n / (n - 1) if way != "ring" else 1),
            "a rank's own part, 1/N, stays where it is",
        ),
        ("long_sequences.bytes", lambda way, n, *a: n * my_sequence_bytes(way, n, *a), "a rank has s/N tokens"),
        (
            "long_sequences.bytes",
            lambda *a: my_sequence_bytes(*a[:-1], a[-2]),
            "only the heads of keys and values travel",
        ),
        (
            "long_sequences.bytes",
            lambda way, *a: my_sequence_bytes(way, *a[:-1], a[-1] if way == "ring" else a[-2]),
            "keys and values have fewer heads than queries and outputs",
        ),
        ("long_sequences.bytes", lambda *a: 2 * my_sequence_bytes(*a), "numbers have 2 bytes"),
        ("experts.splits", returns_nothing, "it should return two lists of 2 numbers, not NoneType"),
        ("experts.splits", lambda c, e: (1, 2), "it should return two lists of 2 numbers, not (1, 2)"),
        ("experts.splits", lambda c, e: (c.flatten().bincount(minlength=e),) * 2, "counts of the 6 experts"),
        ("experts.splits", lambda c, e: c.flatten().bincount().view(2, -1).sum(1), "shape '[2, -1]' is invalid"),
        ("experts.splits", lambda c, e: (my_splits(c, e)[0],) * 2, "it expects to receive what it sends"),
        ("experts.splits", lambda c, e: my_splits(c, e)[::-1], "first comes what is sent, then what is received"),
        ("experts.splits", lambda c, e: ([1, 2], my_splits(c, e)[1]), "it would send [1, 2], and the router chose"),
        ("experts.splits", lambda c, e: (my_splits(c, e)[0], [1, 2]), "it expects to receive [1, 2], and the other"),
        ("experts.bias", returns_nothing, "a tensor of 4 numbers, not NoneType"),
        ("experts.bias", lambda b, load: 2 * b - my_bias(b, load), "turn the sign round"),
        ("experts.bias", lambda b, load: b + 0.001 * (load.float().mean() - load), "however far from the mean"),
        ("experts.bias", lambda b, load: my_bias(b, load) - b, "added to the bias of before"),
        ("experts.bias", lambda b, load: b, "nothing changed"),
        ("experts.bias", lambda b, load: b + 1, "the biases should move by [-0.001"),
        ("experts.bytes", returns_nothing, "it returned NoneType, not a number of bytes"),
        ("experts.bytes", lambda *a: my_exchanged(*a) / 4, "and back, forward and once more backward"),
        ("experts.bytes", lambda *a: my_exchanged(*a) / 2, "the forward pass alone"),
        ("experts.bytes", lambda *a: my_exchanged(*a) * 2, "16 bits are two bytes"),
        ("experts.bytes", lambda t, h, k, n, layers: 8 * t * h * k * layers, "on their own rank do not travel"),
        ("experts.bytes", lambda t, h, k, n, layers: my_exchanged(t, h, 1, n, layers), "as k rows"),
        ("experts.bytes", lambda t, h, k, n, layers: my_exchanged(t, h, k, n, 1), "that is a single layer"),
        ("overlap.scatter", returns_nothing, "it should return a tensor, not NoneType"),
        ("overlap.scatter", lambda x, multiply: summed_over_ranks(multiply(x)), "keeps only its own chunk"),
        ("overlap.scatter", lambda x, multiply: multiply(x)[:1], "the shape should be (2, 5), not (1, 5)"),
        ("overlap.scatter", lambda x, multiply: multiply(x)[:2], "these are not the sums over the ranks"),
        ("overlap.scatter", chunk_of_rank_0, "On rank 1 this is rank 0's chunk of the sum"),
        ("overlap.scatter", own_chunk_of_all, "multiply should see each of the 3 chunks once; it saw [6] tokens"),
        ("overlap.scatter", chunks_then_all_reduce, "it began 0 messages with dist.isend, not 2"),
        ("overlap.scatter", scatter_that_waits, "only 0 of 2 hops travel beside a product"),
        ("overlap.pieces", returns_nothing, "it returned NoneType, not a whole number"),
        ("overlap.pieces", lambda c, s, a: 0, "it returned 0; a number of pieces from 1 to 64"),
        ("overlap.pieces", lambda c, s, a: 64, "the starts alone take longer than the computation"),
        ("overlap.pieces", lambda c, s, a: 1, "in one piece nothing hides"),
        ("overlap.pieces", lambda c, s, a: 2, "the last message is long, and it never hides"),
        ("overlap.pieces", lambda c, s, a: 8, "so many starts make the messages longer"),
        ("host_fails.reads", returns_nothing, "it returned None, not a list of (shard, begin, end)"),
        (
            "host_fails.reads",
            lambda *a: [read[:2] for read in my_reads(*a)],
            "each piece should be (shard, begin, end)",
        ),
        ("host_fails.reads", lambda *a: my_reads(*a)[:1], "a new shard may lie across cuts of the old ones"),
        ("host_fails.reads", lambda *a: my_reads(*a)[::-1], "in the order of the shards"),
        ("host_fails.reads", rows_of_the_shard, "the rows of the whole tensor, not those of the shard"),
        ("host_fails.reads", lambda *a: [*my_reads(*a), (9, 4, 4)], "from which nothing is read does not belong"),
        ("host_fails.reads", lambda rows, b, n, r: my_reads(rows // b * b, b, n, r), "torch.chunk gives each rank"),
        ("host_fails.save", lambda state, path: torch.save(state, path), "it is half of a state"),
        ("host_fails.save", removed_first, "there is no file: the old one has to stay until then"),
        ("host_fails.save", lambda state, path: len(state), "It wrote less than the state has"),
        ("host_fails.save", not_renamed, "the file at path has step 1, not step 2"),
        ("host_fails.save", copied_beside, "is left over: rename it"),
        ("host_fails.steps", returns_nothing, "it returned NoneType, not a number of steps"),
        ("host_fails.steps", lambda *a: 0, "at least 1"),
        ("host_fails.steps", lambda s, *a: my_steps(1, *a), "that is in seconds: divide by those of a step"),
        ("host_fails.steps", lambda *a: my_steps(*a[:-1], 1), "a job stops when any of its GPUs fails"),
        ("host_fails.steps", lambda s, c, g, n: my_steps(s, c / 2, g, n), "the 2 under the root is missing"),
        ("host_fails.steps", lambda s, c, g, n: 2 * c * g / n / s, "the root is missing"),
        ("host_fails.steps", lambda *a: 3 * my_steps(*a), "μ is that of one GPU divided by the GPUs"),
        ("hybrid_parallel.groups", returns_nothing, "It returned None"),
        ("hybrid_parallel.groups", lambda *a: [["x"]], "It returned [['x']]"),
        ("hybrid_parallel.groups", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("hybrid_parallel.order", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("hybrid_parallel.mfu", returns_nothing, "It returned None; it should return a number"),
        ("hybrid_parallel.mfu", lambda p, k, h, s, rate, n, peak: 6 * p * rate / n / peak, "the attention is missing"),
        (
            "hybrid_parallel.mfu",
            lambda p, k, h, s, rate, n, peak: (8 * p + 16 * k * h * s) * rate / n / peak,
            "that is HFU",
        ),
        (
            "hybrid_parallel.mfu",
            lambda p, k, h, s, rate, n, peak: (6 * p + 12 * k * h * s) * rate / peak,
            "one GPU's peak",
        ),
        ("hybrid_parallel.mfu", lambda p, k, h, s, rate, n, peak: 0.5, "it is 0."),
        ("zero_memory.bytes", returns_nothing, "1,600 bytes, not None"),
        (
            "zero_memory.bytes",
            lambda p, n, s, k: memory.model_states_bytes(p, n, min(s, 1)),
            "ZeRO-2 shards the gradients, too",
        ),
        ("zero_memory.bytes", lambda p, n, s, k: 16 * p / n, "which are divided by N?"),
        ("zero_memory.stage", returns_nothing, "stage 0, not None"),
        ("zero_memory.stage", lambda p, g, tp, room: my_stage(p, g, 1, room), "A rank holds 1/tp of the parameters"),
        ("zero_memory.stage", lambda p, g, tp, room: 3, "ZeRO stage 0, not 3. The smallest one that fits"),
        ("zero_communication.clipped_step", returns_nothing, "not NoneType"),
        ("zero_communication.clipped_step", lambda p, g, lr, most: p, "of the parameters are right"),
        (
            "zero_communication.clipped_step",
            lambda p, g, lr, most: p - lr * ring_all_reduce(g) / 4,
            "it has to be scaled down",
        ),
        (
            "zero_communication.clipped_step",
            lambda p, g, lr, most: p - lr * ring_all_reduce(g),
            "a step with the sum of the gradients",
        ),
        ("zero_communication.clipped_step", clipped_by_own_chunk, "each rank took the norm of its own chunk"),
        ("zero_communication.clipped_step", clipped_by_sum, "is scaled by 0.025 instead of 0.1"),
        ("zero_communication.clipped_step", always_scaled, "only longer ones are scaled"),
        ("zero_communication.clipped_step", step_by_all_gather, "a rank sends 4.0Ψ(N−1)/N, and 2 are enough"),
        ("zero_communication.clipped_step", clipped_after_all_reduce, "after an all-reduce every rank updates"),
        ("zero_memory.bytes", lambda p, n, s, k: 4 * p + k * p / n, "For 100 parameters on 4 ranks, ZeRO stage 0"),
        ("accelerate.config", returns_nothing, "not NoneType"),
        (
            "accelerate.config",
            fsdp2_but(num_procs=2),
            "the configuration has no key 'num_procs'; did you mean 'num_processes'?",
        ),
        ("accelerate.config", fsdp2_but(num_processes=3), "Two processes are asked for: num_processes is 3"),
        ("accelerate.config", fsdp2_but(fsdp_config={}), "fsdp_config needs fsdp_version: 2"),
        ("accelerate.config", fsdp2_but(fsdp_config={"fsdp_version": 2}), "one single shard"),
        ("accelerate.config", fsdp2_but(mixed_precision="no"), "mixed_precision is 'no', not 'bf16'"),
        ("accelerate.in_step", returns_nothing, "not None"),
        (
            "accelerate.in_step",
            lambda m: True,
            "On rank 2 one element of the last parameter is another. Your answer: True",
        ),
        ("accelerate.in_step", lambda m: dist.get_rank() < 2, "The ranks do not agree"),
        ("accelerate.in_step", same_sum, "a sum does not tell. Your answer: True"),
        ("accelerate.in_step", same_where_it_differed_once, "Your answer: True"),
        ("accelerate.in_step", same_digest_and_rounded, "look at the model, and leave it alone"),
        ("accelerate.in_step", same_as_the_mean, "as much as parameters: a few numbers are enough"),
        ("zero_r.checkpoints", returns_nothing, "bytes, not None"),
        ("zero_r.checkpoints", lambda b, s, h, n, r, p: b * s * h * n / (r if p else 1), "16 bits are 2 bytes"),
        (
            "zero_r.checkpoints",
            lambda b, s, h, n, r, p: 2 * b * s * h * n / r,
            "without P_a every rank keeps all of it",
        ),
        ("zero_r.checkpoints", lambda b, s, h, n, r, p: 2 * b * s * h * n, "with P_a each rank keeps its part"),
        ("zero_r.order", returns_nothing, "It should return 12 addresses, not None"),
        ("zero_r.order", untidy_order, "Out of memory: "),
        (
            "zero_r.order",
            lambda arena: [arena.take(3) for _ in range(12)],
            "temporaries of 40 are to be taken",
        ),
        (
            "zero_r.order",
            lambda arena: [0] * 12 if [arena.give_back(arena.take(40)) for _ in range(12)] else 0,
            "overlap, or",
        ),
        ("optimizers.states", returns_nothing, "It should return a number of bytes, not NoneType"),
        ("optimizers.states", all_by_adam, "with that, Adam has everything"),
        (
            "optimizers.states",
            lambda of: my_states(of) - 4 * sum(torch.Size(shape).numel() for _, shape in of),
            "mixed precision keeps an fp32 copy",
        ),
        (
            "optimizers.states",
            lambda of: sum((8 if len(shape) == 2 else 12) * torch.Size(shape).numel() for _, shape in of),
            "embedding and head are matrices, but",
        ),
        (
            "optimizers.states",
            lambda of: sum(8 * torch.Size(shape).numel() for _, shape in of),
            "vectors go to Adam",
        ),
        ("optimizers.states", lambda of: 1.0, "bytes, not 1."),
        ("optimizers.by_columns", returns_nothing, "it should return a tensor, not NoneType"),
        ("optimizers.by_columns", lambda part: part.T, "this rank's columns, not (32, 24)"),
        (
            "optimizers.by_columns",
            lambda part: orthogonalised_by_columns(part, norm=False, gram=False),
            "without the other ranks' columns",
        ),
        (
            "optimizers.by_columns",
            lambda part: orthogonalised_by_columns(part, norm=False),
            "divided by the norm of its own columns",
        ),
        ("optimizers.by_columns", lambda part: part, "not the columns of the orthogonalised matrix"),
        ("optimizers.by_columns", orthogonalised_of_gathered, "Right, but 1 all-gathers bring the columns"),
        ("optimizers.sent", returns_nothing, "it returned NoneType, not a number of bytes"),
        ("optimizers.sent", lambda *a: my_muon_sent(*a) / 2, "a number in 16 bits is 2 bytes"),
        ("optimizers.sent", lambda w, n, way: my_muon_sent(w, n, way) * n / (n - 1), "does not send to itself"),
        ("optimizers.sent", lambda w, n, way: my_muon_sent(w, n, "gathered"), "there are fifteen products"),
        ("optimizers.sent", lambda w, n, way: my_muon_sent(w, n, way) / 5, "there are five rounds"),
        ("optimizers.sent", lambda w, n, way: my_muon_sent(w, n, way) / 3, "each round has three products"),
        (
            "optimizers.sent",
            lambda w, n, way: my_muon_sent(w, n, "gathered" if way == "owner" else way),
            "only the owner gathers a matrix",
        ),
        ("optimizers.sent", lambda w, n, way: 7, "bytes, not 7."),
        ("baichuan2_plan.lora_states", returns_nothing, "It should return a number of bytes"),
        ("baichuan2_plan.lora_states", lambda f, t, n, z: 16 * (f + t), "neither gradients nor optimizer states"),
        (
            "baichuan2_plan.lora_states",
            lora_states(frozen=lambda f, n, z: 2 * f),
            "ZeRO-3 shares out the frozen parameters too",
        ),
        (
            "baichuan2_plan.lora_states",
            lora_states(frozen=lambda f, n, z: 0),
            "Frozen parameters are in memory as well",
        ),
        ("baichuan2_plan.lora_states", lora_states(frozen=lambda f, n, z: 2 * f / n), "shared out by ZeRO-3 alone"),
        ("baichuan2_plan.lora_states", lora_states(gradients=lambda t, n, z: 0), "gradients are missing"),
        ("baichuan2_plan.lora_states", lora_states(gradients=lambda t, n, z: 2 * t), "from ZeRO-2 on, not before"),
        (
            "baichuan2_plan.lora_states",
            lora_states(gradients=lambda t, n, z: 2 * t / n if z else 2 * t),
            "from ZeRO-2 on, not",
        ),
        ("baichuan2_plan.lora_states", lora_states(states=lambda t, n, z: 0), "optimizer states are missing"),
        (
            "baichuan2_plan.lora_states",
            lora_states(states=lambda t, n, z: 12 * t),
            "states are shared out from ZeRO-1 on",
        ),
        (
            "baichuan2_plan.lora_states",
            lora_states(states=lambda t, n, z: 8 * t / (n if z else 1)),
            "Which ZeRO stage divides which",
        ),
        (
            "baichuan2_plan.lora_states",
            lambda f, t, n, z: 1.01 * lora_states()(f, t, n, z),
            "Which ZeRO stage divides which",
        ),
        ("baichuan2_plan.steps", returns_nothing, "is a step too"),
        ("baichuan2_plan.steps", lambda s, g, b, m, e: e * (s // b // g // m), "drops the partial step"),
        ("baichuan2_plan.steps", lambda s, g, b, m, e: s * e // (g * b), "is a step too"),
        (
            "baichuan2_plan.lora_states",
            lambda f, t, n, z: 2 * (f + t) / (n if z > 2 else 1),
            "gradients and optimizer states besides",
        ),
        ("baichuan2_finetune.labels", returns_nothing, "return two lists"),
        ("baichuan2_finetune.labels", lambda p, a, c: (p + a, p + a), "the prompt is trained on too"),
        ("baichuan2_finetune.labels", lambda p, a, c: (p + a, a), "need one length"),
        (
            "baichuan2_finetune.labels",
            lambda p, a, c: ((p + a)[:c], ([-100] * len(p) + a)[:c]),
            "30 tokens of the prompt and 10 of the",
        ),
        ("baichuan2_finetune.lora", returns_nothing, "not None: lora_B·lora_A is [out, in]"),
        ("baichuan2_finetune.lora", lambda w, a, b, alpha, r: w + b @ a, "The scale is missing"),
        ("baichuan2_finetune.lora", lambda w, a, b, alpha, r: w.add_(alpha / r * (b @ a)), "W itself was changed"),
        (
            "baichuan2_finetune.lora",
            lambda w, a, b, alpha, r: w + a.t().mul_(alpha / r).t().T.mm(b.T).T,
            "A itself was changed",
        ),
        ("baichuan2_finetune.lora", lambda w, a, b, alpha, r: w - b @ a, "It is W + (lora_alpha/r)·lora_B·lora_A"),
        (
            "baichuan2_finetune.lora",
            lambda w, a, b, alpha, r: w + alpha // r * (b @ a),
            "It is W + (lora_alpha/r)·lora_B·lora_A",
        ),
        (
            "baichuan2_finetune.lora",
            lambda w, a, b, alpha, r: w + 1.00003 * alpha / r * (b @ a),
            "It is W + (lora_alpha/r)·lora_B·lora_A",
        ),
        ("baichuan2_evaluate.rouge_l", returns_nothing, "not None"),
        ("baichuan2_evaluate.rouge_l", lambda p, r: my_rouge_l(p, r) / 100, "per cent, please"),
        (
            "baichuan2_evaluate.rouge_l",
            lambda p, r: my_rouge_l(p, r) * (len(p) + len(r)) / 2 / len(r),
            "that is the recall alone",
        ),
        ("baichuan2_evaluate.rouge_l", lambda p, r: 100.0, "2 words in common, in order"),
        ("baichuan2_evaluate.split", returns_nothing, "Return (train, test)"),
        ("baichuan2_evaluate.split", lambda pairs, n: (pairs[n:], pairs[:n]), "are in both, such as 'body 0'"),
        ("baichuan2_evaluate.split", lambda pairs, n: ([], pairs[:n]), "Only 0 pairs are left"),
        ("baichuan2_evaluate.split", lambda pairs, n: (pairs, []), "test has 0 pairs, not 10"),
        ("your_machine.neighbour", returns_nothing, ", not None."),
        ("your_machine.neighbour", lambda x: x, "that is the number that you were given"),
        ("your_machine.neighbour", lambda x: my_neighbour(x) - x, "that is the neighbour's number alone"),
        ("your_machine.neighbour", with_the_right_neighbour, "that is with the right neighbour"),
        ("your_machine.neighbour", sum_of_all, "that is the sum of all ranks"),
        ("your_machine.neighbour", divides_by_zero, "ZeroDivisionError"),
        ("your_machine.neighbour", lambda x: x + 10.0 ** ((dist.get_rank() - 1) % 4), "Rank 0 should return"),
        ("your_machine.neighbour", neighbour_of_all, "Right, but by all_gather, which brings every rank's number"),
        ("your_machine.bus_bandwidth", returns_nothing, "bytes/s, not None"),
        ("your_machine.bus_bandwidth", lambda c, s, n, t: s / t, "that is algbw"),
        (
            "your_machine.bus_bandwidth",
            lambda c, s, n, t: my_bus_bandwidth("all_reduce", s, n, t),
            "is one half of an all-reduce",
        ),
        (
            "your_machine.bus_bandwidth",
            lambda c, s, n, t: my_bus_bandwidth("", s, n, t),
            "an all-reduce is both halves",
        ),
        ("your_machine.bus_bandwidth", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("cluster.order", returns_nothing, "it returned None; it should be a list with each rank once"),
        ("cluster.order", lambda nodes: list(range(len(nodes))), "crosses 4 times; 2 would do"),
        ("cluster.order", lambda nodes: [0] * len(nodes), "it should be a list with each rank once"),
        ("cluster.order", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("cluster.crossing", returns_nothing, "It returned None; it should return a number of bytes a second"),
        ("cluster.crossing", lambda *a: 8 * my_crossing(*a), "that is bits a second"),
        ("cluster.crossing", lambda *a: my_crossing(*a) / (2 * (a[-1] - 1) / a[-1]), "sends 2(N−1)/N times the tensor"),
        ("cluster.crossing", lambda e, v, p, *a: my_crossing(e, v, 1, *a), "only every period-th step is an average"),
        ("cluster.crossing", lambda *a: float("nan"), "is not where both take the same time"),
        ("which_layout.headroom", returns_nothing, "it should return the name of one of the candidates"),
        (
            "which_layout.headroom",
            lambda c, room, free: min(c, key=lambda one: one[1])[0],
            "of the room and not of what it",
        ),
        ("which_layout.headroom", lambda c, room, free: min(c, key=lambda one: one[2])[0], "fits as well, with"),
        (
            "which_layout.headroom",
            lambda c, room, free: min((one for one in c if one[2] <= (1 - free) * room), key=lambda one: one[1])[0],
            "are within 3 % of the quickest; the second takes",
        ),
        ("which_layout.headroom", lambda c, room, free: my_headroom(c, room, 0.0), "leaves"),
        ("which_layout.reason", returns_nothing, "it should return one of the parts' names"),
        ("which_layout.reason", lambda quick, slow: max(slow, key=slow.get), "took nearly as much of the quick one"),
        (
            "which_layout.reason",
            lambda quick, slow: max(slow, key=lambda part: slow[part] / max(quick.get(part, 0), 1e-12)),
            "by the largest factor, from nothing",
        ),
        ("which_layout.reason", lambda quick, slow: my_reason(slow, quick), "tensor-parallel traffic by"),
        ("trace.own", returns_nothing, "it should return a list of 15 numbers"),
        ("trace.own", lambda bars: [end - begin for begin, end in bars], "its whole length is not its own time"),
        ("trace.own", lambda bars: takes_off_all(bars), "what is inside of that once more"),
        ("trace.own", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("trace.exposed", returns_nothing, "It returned None; it should return a number"),
        ("trace.exposed", lambda c, w: sum(my_exposed([one], w) for one in c), "are counted twice"),
        ("trace.exposed", lambda c, w: my_exposed(c, []), "hidden or not"),
        ("trace.exposed", lambda c, w: my_exposed(w, c), "is right"),
        ("script_measured.sent", returns_nothing, "It returned None; it should return a number of bytes"),
        ("script_measured.sent", lambda calls, n: my_sent(calls, n) * n / (n - 1), "there is a factor (N−1)/N"),
        (
            "script_measured.sent",
            lambda calls, n: sum(nbytes for _, nbytes in calls) * (n - 1) / n,
            "an all-reduce takes two laps",
        ),
        ("script_measured.sent", lambda calls, n: 3 * my_sent(calls, n), "bytes, not"),
        ("script_measured.accuracy", returns_nothing, "returned None; it should return a number, such as 0.25"),
        (
            "script_measured.accuracy",
            lambda logits, targets: (logits.argmax(-1) == targets).double().mean().item(),
            "the accuracy of its own tokens",
        ),
        ("script_measured.accuracy", mean_of_accuracies, "the mean of the ranks' accuracies. The ranks have different"),
        ("script_measured.accuracy", accuracy_of_gathered, "Right, but a rank sent"),
        ("is_it_right.first", returns_nothing, "It returned NoneType; it should return the text"),
        ("is_it_right.first", lambda script: script, "It returned the script as it was"),
        ("is_it_right.first", lambda script: script + "(", "What it returned is no Python: '(' was never closed"),
        (
            "is_it_right.first",
            lambda script: script.replace("loss.backward()", "raise ValueError('nothing is summed')"),
            "Your script on 2 ranks: ",
        ),
        ("is_it_right.first", lambda script: script + "\n", "each of ranks 0, 1 keeps its own part"),
        ("is_it_right.first", lambda script: script.replace("range(6)", "range(2)"), "keeps its own part"),
        (
            "is_it_right.second",
            lambda script: script.replace("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
            "It does not train as one process does. In step 1",
        ),
        (
            "is_it_right.third",
            lambda script: script.replace("below.requires_grad_(False)", "pass"),
            "It does not train as one process does. In step 1",
        ),
        (
            "is_it_right.fourth",
            lambda script: script.replace("self.second.bias)", "self.second.bias / dist.get_world_size())"),
            "In step 1 the gradients differ",
        ),
        (
            "is_it_right.fifth",
            lambda script: script.replace("    if rank == 0:\n        sampler.set_epoch(epoch)\n", ""),
            "In step 4 the samples differ",
        ),
        ("is_it_right.second", returns_nothing, "It returned NoneType; it should return the text"),
        ("is_it_right.second", lambda script: script, "It returned the script as it was"),
        ("is_it_right.third", returns_nothing, "It returned NoneType; it should return the text"),
        ("is_it_right.third", lambda script: script, "It returned the script as it was"),
        ("is_it_right.fourth", returns_nothing, "It returned NoneType; it should return the text"),
        ("is_it_right.fourth", lambda script: script, "It returned the script as it was"),
        ("is_it_right.fifth", returns_nothing, "It returned NoneType; it should return the text"),
        ("is_it_right.fifth", lambda script: script, "It returned the script as it was"),
        ("scorecard.verdict", returns_nothing, "the verdict is 'holds', not None: it is equal"),
        ("scorecard.verdict", lambda p, m, *rest: "holds" if p == m else "fails", "101 lies within 2 % of 100"),
        ("scorecard.verdict", lambda p, m, *rest: "holds", "without a tolerance 101 is not 100"),
        (
            "scorecard.verdict",
            lambda p, m, rel, e, i: my_verdict(p, m, rel, e, None),
            "'differs', not 'fails': the second",
        ),
        (
            "scorecard.verdict",
            lambda p, m, rel, e, i: my_verdict(p, m, rel, "wire", i),
            "'off', not 'fails': a time may be off",
        ),
        (
            "scorecard.verdict",
            lambda p, m, rel, e, i: "differs" if i == m else my_verdict(p, m, rel, e, i),
            "the first prediction holds; the second is not asked",
        ),
        (
            "scorecard.verdict",
            lambda p, m, rel, e, i: "holds" if abs(m - p) <= rel * p else my_verdict(abs(p), m, rel, e, i),
            "a share of |predicted|",
        ),
        ("scorecard.step_bytes", returns_nothing, "It returned None; it should return a number of bytes"),
        (
            "scorecard.step_bytes",
            lambda b, s, h, tp, dp: my_step_bytes(b, s, h, tp, 1),
            "That is the tensor-parallel part alone",
        ),
        (
            "scorecard.step_bytes",
            lambda b, s, h, tp, dp: my_step_bytes(b, 0, h, tp, dp),
            "the data-parallel part alone",
        ),
        (
            "scorecard.step_bytes",
            lambda b, s, h, tp, dp: my_step_bytes(b, s, h, tp, 1) + my_step_bytes(0, 0, h, 1, dp),
            "A tensor-parallel rank has 1/tp of the gradients",
        ),
        (
            "scorecard.step_bytes",
            lambda b, s, h, tp, dp: my_step_bytes(b, s / 2, h, tp, dp),
            "all-reduced forward and backward",
        ),
        ("scorecard.step_bytes", lambda *shape: my_step_bytes(*shape) / 4, "fp32 takes 4 bytes"),
        ("scorecard.step_bytes", divides_by_zero, "Your function raised ZeroDivisionError"),
        ("zero_communication.psi", returns_nothing, "ZeRO stage 0 with 1 micro-batches is not None"),
        ("zero_communication.psi", lambda stage, m: 3 if stage == 3 else 2, "each micro-batch is reduced"),
        (
            "zero_communication.psi",
            lambda stage, m: [2, 2, m + 1, 3][stage],
            "each micro-batch gathers for its forward",
        ),
        ("pipeline_parallel.order", returns_nothing, "returned None; yield Forward(rank, k)"),
        ("pipeline_parallel.order", lambda rank, ranks, m, most: ["F"] * m, "yielded 'F'"),
        (
            "pipeline_parallel.order",
            lambda *sizes: iter(divides_by_zero, None),
            "Your generator raised ZeroDivisionError",
        ),
        ("pipeline_parallel.order", lambda *sizes: gpipe(*sizes[:3]), "memory for 2: rank 0 holds 4 micro-batches."),
        (
            "pipeline_parallel.order",
            lambda *sizes: one_f_one_b(*sizes[:3]),
            "4 ranks, 8 micro-batches, memory for 2: rank 0 holds 4",
        ),
        (
            "pipeline_parallel.order",
            lambda rank, ranks, m, most: bounded(rank, most, m),
            "micro-batches, and 1 are enough",
        ),
        ("pipeline_parallel.order", lambda *sizes: no_warm_up(*sizes[:3]), "it takes"),
        (
            "pipeline_parallel.order",
            lambda *sizes: reversed(list(one_f_one_b(*sizes[:3]))),
            "rank 0 is told B 0.3 before F 0.3",
        ),
        ("pipeline_parallel.order", lambda *sizes: list(one_f_one_b(*sizes[:3]))[:-1], "rank 0 is never told B 0.3"),
        ("pipeline_parallel.bubble", returns_nothing, "returned None; it should return a number"),
        (
            "pipeline_parallel.bubble",
            lambda p, share: round((p - 1) / share),
            "that share of the ideal time; of the total time it is smaller",
        ),
        ("pipeline_parallel.bubble", lambda p, share: 0, "at least one micro-batch"),
        ("pipeline_parallel.bubble", lambda p, share: 5, "0.375 of the total time idle; that is too few"),
        ("pipeline_parallel.bubble", lambda p, share: 500, "too many, fewer are enough"),
        (
            "pipeline_parallel.idle",
            returns_nothing,
            "returned None; it should return a list with a number",
        ),
        ("pipeline_parallel.idle", lambda spans: 6.0, "returned 6.0; it should return a list"),
        ("pipeline_parallel.idle", lambda spans: idle_of(spans)[:-1], "there are 2 ranks, and 1 numbers"),
        ("pipeline_parallel.idle", lambda spans: idle_of(spans, pairs_twice=True), "run at the same time: count that"),
        ("pipeline_parallel.idle", lambda spans: idle_of(spans, own_ends=True), "as the zero-bubble papers count"),
        (
            "pipeline_parallel.idle",
            lambda spans: idle_of(spans, own_ends=True, pairs_twice=True),
            "to the last end of all, and the time of a pair once",
        ),
        ("pipeline_parallel.idle", lambda spans: [0.0] * len(idle_of(spans)), "rank 0 is idle for 1, not 0."),
        ("pipeline_parallel.idle", lambda spans: [float("nan")] * len(idle_of(spans)), "rank 0 is idle for 1, not nan"),
        (
            "hybrid_parallel.groups",
            lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp).groups(axis)[:-1],
            "there are 4 groups, not 3",
        ),
        (
            "hybrid_parallel.groups",
            lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp, order="pp-dp-tp").groups(axis),
            "the groups of the order pp-dp-tp",
        ),
        (
            "hybrid_parallel.groups",
            lambda axis, *s: [[0, 7], [1, 2], [3, 4], [5, 6]],
            "[0, 7] is no group; rank 0's is [0, 1]",
        ),
        ("hybrid_parallel.groups", lambda axis, tp, dp, pp: [], "there are 4 groups, not 0"),
        ("hybrid_parallel.order", returns_nothing, "order must name tp, dp, pp once each"),
        ("hybrid_parallel.order", lambda: "pp-dp-tp", "spans 4 nodes: let tp run fastest"),
        ("hybrid_parallel.order", lambda: "tp-pp-dp", "spans 4 nodes, 2 are enough"),
        # What people hand over by mistake, and what no checker may stumble over.
        (
            "megatron_mlp.f",
            torch.ones(2),
            'Hand over the function itself, without calling it: check("f", my_f).',
        ),
        ("zero_communication.psi", raises_at_length, "Your function raised ValueError: what is wrong"),
        ("your_machine.neighbour", lambda x: torch.arange(3), "not tensor([0, 1, 2])."),
        ("data_parallel.all_reduce", lambda t: t.int(), "of the elements hold the sum"),
        ("pipeline_parallel.bubble", lambda stages, share: float("nan"), "It returned nan; it should return a number"),
        ("megatron_mlp.split", lambda x, a, b: x.double(), "the result is not gelu(x @ w_1) @ w_2"),
        ("zero_memory.stage", lambda *a: torch.arange(2), "stage 0, not tensor([0, 1])"),
        ("zero_communication.clipped_step", lambda p, g, lr, most: p.int(), "of the parameters are right"),
        ("baichuan2_plan.steps", lambda *a: torch.arange(2), "1,565 steps, not tensor([0, 1])"),
        ("baichuan2_finetune.labels", lambda *a: (1, 2), "return two lists, input_ids and labels, not (1, 2)"),
        ("baichuan2_finetune.lora", lambda w, *a: w.int(), "It is W + (lora_alpha/r)·lora_B·lora_A"),
        ("baichuan2_evaluate.split", lambda *a: (1, 2), "Return (train, test), two lists of pairs, not tuple"),
        ("scorecard.step_bytes", lambda *a: float("nan"), "bytes, not nan"),
        ("scorecard.step_bytes", lambda *a: 10**2000, "cannot be compared with the answer (OverflowError"),
        ("scorecard.verdict", lambda *a: torch.arange(2), "'holds', not tensor([0, 1]): it is equal"),
        ("zero_memory.bytes", lambda *a: 10**2000, "which are divided by N?"),
        ("megatron_mlp.f", raises_at_length, "Your function raised on rank 0: ValueError: what is wrong"),
    ],
)
def test_wrong_answers_get_the_message_that_helps(name, answer, hint):
    outcome = judge(name, answer)
    assert outcome.attempted
    assert not outcome.solved
    assert outcome.told.startswith(f"{name.partition('.')[2]}: not yet.")
    assert hint in outcome.told
    assert "\n" not in outcome.told, "one line, and no stack trace of anybody"
    assert len(outcome.told) < 900


def test_a_deadlock_is_told_as_one(monkeypatch):
    from pardemo.book.chapters.data_parallel import exercises as chapter_01

    monkeypatch.setattr(chapter_01, "TIMEOUT_S", 2)
    outcome = judge("data_parallel.all_reduce", all_receive_first)
    assert not outcome.solved
    assert says(outcome.told, "finish", "2")
    assert says(outcome.told, "receive", "exactly")
