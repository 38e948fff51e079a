"""The solutions that readers unfold solve the exercises, and typical wrong answers get the message that helps."""

import contextlib
import difflib
import math
import os
import re
import tempfile
import threading
from collections import Counter
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import exercises_of_the_book, says
from torch.nn import functional as F

from pardemo import World
from pardemo.book.chapters.accelerate.exercises import my_config, my_in_step
from pardemo.book.chapters.experts.exercises import my_splits
from pardemo.book.chapters.fewer_bits.exercises import my_mxfp8
from pardemo.book.chapters.host_fails.exercises import my_reads, my_save, my_steps
from pardemo.book.chapters.long_sequences.exercises import my_merge, my_positions
from pardemo.book.chapters.megatron_attention.exercises import my_rows, my_shared_sum
from pardemo.book.chapters.megatron_mlp.exercises import SumBackward
from pardemo.book.chapters.pipelines_without_bubbles.exercises import idle_of, my_late
from pardemo.book.chapters.scorecard.exercises import my_verdict
from pardemo.book.chapters.script_measured.exercises import my_accuracy
from pardemo.book.chapters.sequence_parallel.exercises import my_kept
from pardemo.book.chapters.vocabulary.exercises import my_loss
from pardemo.book.chapters.which_layout.exercises import my_headroom, my_reason
from pardemo.book.chapters.your_machine.exercises import my_neighbour
from pardemo.book.chapters.zero_memory.exercises import my_stage
from pardemo.book.chapters.zero_r.exercises import my_order
from pardemo.book.page import exercises, solutions
from pardemo.book.page.exercises import Formula, judge
from pardemo.collectives import parameter_server_all_reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.formulas import memory
from pardemo.groups import ParallelDims
from pardemo.optimizers import orthogonalised
from pardemo.pipeline_parallel import Backward, Forward, gpipe, one_f_one_b, zb_h1
from pardemo.tensor_parallel import copy_to, exchange, reduce_from, vocab_parallel_cross_entropy

EXERCISES = exercises_of_the_book()


def module_of(name):
    return import_module(f"pardemo.book.chapters.{name.partition('.')[0]}.exercises")


CHECKS = {name: getattr(module_of(name), f"check_{name.partition('.')[2]}") for name in EXERCISES}
FORMULAS = {name: check for name, check in CHECKS.items() if isinstance(check, Formula)}


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
    for module in {exercises, *map(module_of, EXERCISES)}:
        if hasattr(module, "World"):
            monkeypatch.setattr(module, "World", warm)


def merged_without_largest(first, second):
    sums = [math.exp(block[0]) * block[1] for block in (first, second)]
    largest = max(first[0], second[0])
    out = (sums[0] * first[2] + sums[1] * second[2]) / sum(sums)
    return largest, sum(sums) / math.exp(largest), out


def gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return parts


def everything_to_everyone(tensor):
    return sum(gathered(tensor))


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
    return orthogonalised(torch.cat(gathered(part), 1)).float().chunk(dist.get_world_size(), 1)[dist.get_rank()]


def mean_of_accuracies(logits, targets):
    dist.all_reduce(own := (logits.argmax(-1) == targets).double().mean())
    return (own / dist.get_world_size()).item()


def accuracy_of_gathered(logits, targets):
    """All ranks' logits, padded to the most tokens of a rank."""
    most = torch.tensor(len(logits))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    gathered(F.pad(logits, (0, 0, 0, int(most) - len(logits))))
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
    return F.cross_entropy(torch.cat(gathered(logits), 1), targets, reduction="none")


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
        temporary = arena.take(30 if turn % 2 else 40)
        addresses.append(arena.take(3))
        arena.give_back(temporary)
    return addresses


def temporaries_first(arena):
    for turn in range(12):
        arena.give_back(arena.take(30 if turn % 2 else 40))
    return [arena.take(3) for _ in range(12)]


def clipped(mean, max_norm):
    return mean * min(1.0, max_norm / mean.norm().item())


def step_by_all_gather(parameters, gradient, lr, max_norm):
    return parameters - lr * clipped(everything_to_everyone(gradient) / 4, max_norm)


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


def rouge_l_of_blocks(predicted, reference):
    """The longest run first, as difflib matches: 3 words of abcbdab and bdcaba, where 4 are common in order."""
    blocks = difflib.SequenceMatcher(None, predicted, reference, autojunk=False).get_matching_blocks()
    return 200 * sum(block.size for block in blocks) / (len(predicted) + len(reference))


def rouge_1(predicted, reference):
    return 200 * (Counter(predicted) & Counter(reference)).total() / (len(predicted) + len(reference))


def same_sum(model):
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    return all(torch.isclose(total, other, rtol=1e-12) for other in gathered(total))


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
    return number + gathered(number)[dist.get_rank() - 1]


def known_before(tensor):
    rank = dist.get_rank()
    return tensor * 10 / (rank + 1)


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
        ("long_sequences.positions", lambda *case: torch.tensor(my_positions(*case))),
        ("host_fails.reads", lambda *case: (list(read) for read in my_reads(*case))),
        ("vocabulary.vocabulary_loss", lambda x, t: vocab_parallel_cross_entropy(x, t, reduction="none")),
    ],
)
def test_each_exercise_can_be_solved(name, solution):
    outcome = judge(name, solution or pasted(name))
    assert outcome.message.startswith(f"{name.partition('.')[2]}: solved.")
    assert outcome.solved


#: Of exercises, answers that are wrong, and what is said to each.
WRONG = {
    "your_machine.neighbour": [
        (lambda x: x, "that is the number that you were given"),
        (lambda x: my_neighbour(x) - x, "that is the neighbour's number alone"),
        (with_the_right_neighbour, "that is with the right neighbour"),
        (sum_of_all, "that is the sum of all ranks"),
        (lambda x: x + 10.0 ** ((dist.get_rank() - 1) % 4), "Rank 0 should return"),
        (neighbour_of_all, "Right, but by all_gather, which brings every rank's number"),
        (lambda x: torch.arange(3), "not tensor([0, 1, 2])."),
    ],
    "data_parallel.all_reduce": [
        (lambda t: t, "its elements are not the sums ("),
        (lambda t: t[:5], "it should return a tensor of shape (1048576,), not (5,)"),
        (lambda t: "sum", "not str"),
        (lambda t: everything_to_everyone(t) / 4, "you returned the mean"),
        (everything_to_everyone, "sends 3.00 S; 1.5 S is enough: whole tensors travel"),
        (parameter_server_all_reduce, "that is a parameter server"),
        (divides_by_zero, "ZeroDivisionError"),
        (ring_all_reduce, "Right, but all_reduce did it for you"),
        (through_a_file, "a rank sends 0.00 S: let the numbers travel between the ranks"),
        (by_neighbours, "that is the ring, with 6 rounds. Send each chunk straight to the rank"),
        (known_before, "its elements are not the sums ("),
        (lambda t: (t, LOCK), "cannot send"),
        (lambda t: t.int(), "its elements are not the sums ("),
    ],
    "data_parallel.unequal_shards": [
        (plain_mean, "that is the mean of the means"),
        (lambda g, n: g, "not the whole batch's mean gradient"),
        (lambda g, n: g.double(), "not the whole batch's mean gradient"),
    ],
    "pipeline_parallel.bubble": [
        (lambda p, share: round((p - 1) / share), "this share of the ideal time; of the total time it is smaller"),
        (lambda p, share: 0, "at least one micro-batch"),
        (lambda p, share: 5, "and more than this share of the total time is idle"),
        (lambda p, share: 500, "too many, fewer are enough"),
        (lambda stages, share: float("nan"), "should be 27 micro-batches, not nan"),
    ],
    "pipelines_without_bubbles.late": [
        (lambda *sizes: one_f_one_b(*sizes[:3]), "a whole Backward puts nothing off"),
        (lambda *sizes: zb_h1(*sizes[:3]), "4 ranks, 8 micro-batches, at most 2 put off: rank 3 has put 3"),
        (lambda rank, ranks, m, late: my_late(rank, ranks, m, min(late, 1)), "are enough: put more off"),
        (lambda *sizes: list(zb_h1(*sizes[:3]))[:-1], "is never told W"),
        (lambda *sizes: ["W"], "yielded 'W'"),
    ],
    "pipelines_without_bubbles.idle": [
        (lambda spans: 6.0, "it returned 6; it should return a list with a number for each rank"),
        (lambda spans: idle_of(spans)[:-1], "there are 2 ranks"),
        (lambda spans: [float("nan")] * len(idle_of(spans)), "it should be [1.0, 4.0], not [nan, nan]"),
    ],
    "pipeline_parallel.order": [
        (lambda rank, ranks, m, most: ["F"] * m, "yielded 'F'"),
        (lambda *sizes: iter(divides_by_zero, None), "Your generator raised ZeroDivisionError"),
        (lambda *sizes: gpipe(*sizes[:3]), "memory for 2: rank 0 holds 4 micro-batches."),
        (lambda *sizes: one_f_one_b(*sizes[:3]), "4 ranks, 8 micro-batches, memory for 2: rank 0 holds 4"),
        (lambda rank, ranks, m, most: bounded(rank, most, m), "micro-batches, and 1 are enough"),
        (lambda *sizes: no_warm_up(*sizes[:3]), "it takes"),
        (lambda *sizes: reversed(list(one_f_one_b(*sizes[:3]))), "rank 0 is told B 0.3 before F 0.3"),
        (lambda *sizes: list(one_f_one_b(*sizes[:3]))[:-1], "rank 0 is never told B 0.3"),
    ],
    "megatron_mlp.f": [
        (lambda x: x, "this rank's gradient alone: backward needs the all-reduce"),
        (lambda x: x.detach(), "carries no gradient"),
        (reduce_from, "forward it should return x as it is"),
        (InPlace.apply, "changed in place"),
        (lambda x: copy_to(x / 4) + x.detach() * 0.75, "is not the sum of the ranks' gradients"),
        (lambda x: copy_to(x) + 0 * dist.get_rank() * sends(x), "it should send nothing"),
        (sums_by_hook, "the residual's gradient was summed"),
        (torch.ones(2), 'Hand over the function itself, without calling it: check("f", my_f).'),
        (raises_at_length, "Your function raised on rank 0: ValueError: what is wrong"),
    ],
    "megatron_mlp.split": [
        (tokens_divided, "with 1.0φ the tokens were divided, not the layer"),
        (lambda x, a, b: x @ a, "it should return a tensor of shape (2, 512, 256), not (2, 512, 1024)"),
        (lambda x, a, b: F.gelu(x @ a) @ b, "nothing was sent"),
        (never_added, "this rank's part of the sum alone"),
        (gelus_added, "GeLU(x + y) is not GeLU(x) + GeLU(y)"),
        (rows_first, "sends 10.0φ, and 2φ is enough: that is the all-reduce of the inner"),
        (sent_but_not_shared, "a rank does 100% of the arithmetic"),
        (lambda x, a, b: x * 0, "the result is not gelu(x @ w_1) @ w_2"),
        (lambda x, a, b: x.double(), "the result is not gelu(x @ w_1) @ w_2"),
    ],
    "megatron_attention.qkv_rows": [
        (lambda w, heads, r, n: w.chunk(n, 0)[r], "the matrix in 2 equal pieces"),
        (lambda w, heads, r, n: my_rows(w, heads, r, n).flip(0), "in another order"),
        (lambda w, heads, r, n: w[:1], "rows [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19] are needed, not [0]"),
        (lambda w, heads, r, n: w[99999], "Your function raised IndexError"),
        (lambda *a: torch.tensor(0.0), "It returned shape ()"),
    ],
    "megatron_attention.shared_heads": [
        (lambda g, kv: g, "this rank's own gradient: others hold the same head (with 2"),
        (lambda g, kv: ring_all_reduce(g), "the sum over all ranks: different heads were added"),
        (mean_of_copies, "that is the mean; each replica needs the sum"),
        (sum_of_every_other, "every other rank was added; neighbours hold the same head"),
        (lambda g, kv: 3 * g, "not the sum over the ranks that hold the same head"),
    ],
    "vocabulary.vocabulary_loss": [
        (loss_with_gather, "the logits themselves travel"),
        (local_loss, "this rank's part of the vocabulary alone"),
        (lambda x, t: -my_loss(x, t), "the sign is turned round"),
        (loss_that_overflows, "overflow exp: subtract the largest logit"),
        (lambda x, t: my_loss(x, t) * 0, "not those of the whole vocabulary"),
        (loss_in_three, "in 3 collectives; 2 are enough"),
    ],
    "sequence_parallel.norm_gradients": [
        (lambda g: g, "the parts of this rank's own tokens"),
        (lambda g: [one / 2 for one in summed_one_by_one(g)], "these are means"),
        (summed_one_by_one, "Right, in 3 messages"),
        (lambda g: [one.flatten() for one in g], "as they came, not [(48,), (48,), (48,)]"),
    ],
    "sequence_parallel.activations": [
        (lambda *a: my_kept(*a[:-1], False), "FlashAttention keeps no scores"),
    ],
    "long_sequences.positions": [
        (
            lambda r, n, s: [k + s // (2 * n) for k in my_positions(r, n, s)],
            "For rank = 0, ranks = 2, tokens = 16 it should be [0, 1, 2, 3, 12, 13, 14, 15], not [4, 5",
        ),
    ],
    "long_sequences.merge": [
        (lambda a, b: (a[0], *my_merge(a, b)[1:]), "the largest score of both blocks is"),
        (
            lambda a, b: (max(a[0], b[0]), a[1] + b[1], my_merge(a, b)[2]),
            "relative to different largest scores, and have to be brought to one",
        ),
        (merged_without_largest, "Your function raised OverflowError"),
    ],
    "experts.splits": [
        (lambda c, e: (1, 2), "it should return two lists of 2 numbers, not (1, 2)"),
        (lambda c, e: (c.flatten().bincount(minlength=e),) * 2, "counts of the 6 experts"),
        (lambda c, e: c.flatten().bincount().view(2, -1).sum(1), "shape '[2, -1]' is invalid"),
        (lambda c, e: (my_splits(c, e)[0],) * 2, "it expects to receive what it sends"),
        (lambda c, e: my_splits(c, e)[::-1], "first comes what is sent, then what is received"),
        (lambda c, e: ([1, 2], my_splits(c, e)[1]), "it would send [1, 2], and the router chose"),
        (lambda c, e: (my_splits(c, e)[0], [1, 2]), "it expects to receive [1, 2], and the other"),
    ],
    "experts.bias": [
        (lambda b, load: b + 1, "it should be tensor([ 0.4990, -0.2490, 0.0000, 0.1260]), not tensor([1.5000"),
    ],
    "hybrid_parallel.groups": [
        (lambda *a: [["x"]], "It returned [['x']]"),
        (lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp).groups(axis)[:-1], "there are 4 groups, not 3"),
        (
            lambda axis, tp, dp, pp: ParallelDims(tp=tp, dp=dp, pp=pp, order="pp-dp-tp").groups(axis),
            "the groups of the order pp-dp-tp",
        ),
        (lambda axis, *s: [[0, 7], [1, 2], [3, 4], [5, 6]], "[0, 7] is no group; rank 0's is [0, 1]"),
        (lambda axis, tp, dp, pp: [], "there are 4 groups, not 0"),
    ],
    "hybrid_parallel.order": [
        (lambda: "pp-dp-tp", "spans 4 nodes: let tp run fastest"),
        (lambda: "tp-pp-dp", "spans 4 nodes, 2 are enough"),
    ],
    "zero_memory.bytes": [
        (lambda p, n, s, k: memory.model_states_bytes(p, n, min(s, 1)), "ZeRO-2 shards the gradients, too"),
        (lambda p, n, s, k: 16 * p / n, "which are divided by N?"),
    ],
    "zero_memory.stage": [
        (lambda p, g, tp, room: my_stage(p, g, 1, room), "a rank holds 1/tp of the parameters"),
        (lambda p, g, tp, room: 3, "it should be 0, not 3: the smallest one that fits"),
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a ZeRO stage"),
    ],
    "zero_communication.clipped_step": [
        (lambda p, g, lr, most: p, "this is not the step with the clipped mean gradient ("),
        (lambda p, g, lr, most: p - lr * ring_all_reduce(g) / 4, "it has to be scaled down"),
        (lambda p, g, lr, most: p - lr * ring_all_reduce(g), "a step with the sum of the gradients"),
        (clipped_by_own_chunk, "each rank took the norm of its own chunk"),
        (clipped_by_sum, "is scaled by 0.025 instead of 0.1"),
        (always_scaled, "only longer ones are scaled"),
        (step_by_all_gather, "a rank sends 4.0Ψ(N−1)/N, and 2 are enough"),
        (clipped_after_all_reduce, "after an all-reduce every rank updates"),
        (lambda p, g, lr, most: p.int(), "this is not the step with the clipped mean gradient ("),
    ],
    "zero_communication.psi": [
        (lambda stage, m: 3 if stage == 3 else 2, "each micro-batch is reduced"),
        (lambda stage, m: [2, 2, m + 1, 3][stage], "each micro-batch gathers for its forward"),
        (raises_at_length, "Your function raised ValueError: what is wrong"),
    ],
    "zero_r.checkpoints": [
        (lambda b, s, h, n, r, p: 2 * b * s * h * n / r, "without P_a every rank keeps all of it"),
        (lambda b, s, h, n, r, p: 2 * b * s * h * n, "with P_a each rank keeps its part"),
    ],
    "zero_r.order": [
        (untidy_order, "Out of memory: "),
        (lambda arena: [arena.take(3) for _ in range(12)], "Temporaries of 40 and 30 by turns"),
        (lambda arena: [arena.give_back(arena.take(40)) for _ in range(12)], "Temporaries of 40 and 30 by turns"),
        (temporaries_first, "Temporary 2 comes before the checkpoint"),
        (lambda arena: [my_order(arena)[0]] * 12, "overlap, or"),
    ],
    "optimizers.by_columns": [
        (lambda part: part.T, "it should return a tensor of shape (24, 32), not (32, 24)"),
        (lambda part: orthogonalised_by_columns(part, norm=False, gram=False), "without the other ranks' columns"),
        (lambda part: orthogonalised_by_columns(part, norm=False), "divided by the norm of its own columns"),
        (lambda part: part, "not the columns of the orthogonalised matrix"),
        (orthogonalised_of_gathered, "Right, but 1 all-gathers bring the columns"),
    ],
    "fewer_bits.largest": [
        (lambda e, f: 448, "For exponent = 5, fraction = 2 it should be"),
    ],
    "fewer_bits.block": [
        (lambda x: my_mxfp8(x / 1.5) * 1.5, "these are not MXFP8's numbers"),
        (lambda x: my_mxfp8(x) + torch.nan, "there are NaNs"),
    ],
    "overlap.scatter": [
        (lambda x, multiply: summed_over_ranks(multiply(x)), "keeps only its own chunk"),
        (lambda x, multiply: multiply(x)[:1], "it should return a tensor of shape (2, 5), not (1, 5)"),
        (lambda x, multiply: multiply(x)[:2], "these are not the sums over the ranks"),
        (chunk_of_rank_0, "On rank 1 this is rank 0's chunk of the sum"),
        (own_chunk_of_all, "multiply should see each of the 3 chunks once; it saw [6] tokens"),
        (chunks_then_all_reduce, "began 0 messages with dist.isend, not 2"),
        (scatter_that_waits, "only 0 of 2 hops travel beside a multiplication"),
    ],
    "overlap.pieces": [
        (lambda c, s, a: 0, "it returned 0; a whole number from 1 to 64"),
        (lambda c, s, a: 64, "the starts alone take longer than the computation"),
        (lambda c, s, a: 1, "in one piece nothing hides"),
        (lambda c, s, a: 2, "the last message is long, and it never hides"),
        (lambda c, s, a: 8, "so many starts make the messages longer"),
    ],
    "accelerate.config": [
        (fsdp2_but(num_procs=2), "the configuration has no key 'num_procs'; did you mean 'num_processes'?"),
        (fsdp2_but(num_processes=3), "Two processes are asked for: num_processes is 3"),
        (fsdp2_but(fsdp_config={}), "fsdp_config needs fsdp_version: 2"),
        (fsdp2_but(fsdp_config={"fsdp_version": 2}), "one single shard"),
        (fsdp2_but(mixed_precision="no"), "mixed_precision is 'no', not 'bf16'"),
    ],
    "accelerate.in_step": [
        (lambda m: True, "On rank 2 one element of the last parameter is another. Your answer: True"),
        (lambda m: dist.get_rank() < 2, "The ranks do not agree"),
        (same_sum, "a sum does not tell. Your answer: True"),
        (same_digest_and_rounded, "look at the model, and leave it alone"),
        (same_as_the_mean, "as much as parameters: send a few numbers"),
    ],
    "baichuan2_plan.lora_states": [
        (lambda f, t, n, z: 10 * (f + t), "Which ZeRO stage divides which"),
    ],
    "baichuan2_plan.steps": [
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a number of steps"),
    ],
    "baichuan2_finetune.labels": [
        (lambda p, a, c: (p + a, p + a), "the prompt is trained on too"),
        (lambda p, a, c: (p + a, a), "both need one length"),
        (lambda p, a, c: ((p + a)[:c], ([-100] * len(p) + a)[:c]), "30 tokens of the prompt and 10 of the"),
        (lambda *a: (1, 2), "it returned [1, 2]; it should return two lists, input_ids and labels"),
    ],
    "baichuan2_finetune.lora": [
        (lambda w, a, b, alpha, r: w + b @ a, "the scale is missing"),
        (lambda w, a, b, alpha, r: w.add_(alpha / r * (b @ a)), "W itself was changed"),
        (lambda w, a, b, alpha, r: w + a.t().mul_(alpha / r).t().T.mm(b.T).T, "A itself was changed"),
        (lambda w, a, b, alpha, r: w - b @ a, "it should return W + (lora_alpha/r)·lora_B·lora_A"),
        (lambda w, a, b, alpha, r: w + alpha // r * (b @ a), "it should return W + (lora_alpha/r)·lora_B·lora_A"),
        (
            lambda w, a, b, alpha, r: w + 1.00003 * alpha / r * (b @ a),
            "it should return W + (lora_alpha/r)·lora_B·lora_A",
        ),
        (lambda w, *a: w.int(), "it should return W + (lora_alpha/r)·lora_B·lora_A"),
    ],
    "baichuan2_evaluate.rouge_l": [
        (lambda p, r: 100.0, "2 words in common, in order"),
        (rouge_l_of_blocks, "the longest run first, as difflib matches"),
        (rouge_1, "1 words in common, in order"),
    ],
    "baichuan2_evaluate.split": [
        (lambda pairs, n: (pairs[n:], pairs[:n]), "are in both, such as 'body 0'"),
        (lambda pairs, n: ([], pairs[:n]), "Only 0 pairs are left"),
        (lambda pairs, n: (pairs, []), "test has 0 pairs, not 10"),
        (lambda *a: (1, 2), "Return (train, test), two lists of pairs, not tuple"),
    ],
    "cluster.order": [
        (lambda nodes: list(range(len(nodes))), "crosses 4 times; 2 would do"),
        (lambda nodes: [0] * len(nodes), "it should be a list with each rank once"),
    ],
    "which_layout.headroom": [
        (lambda c, room, free: min(c, key=lambda one: one[1])[0], "of the room and not of what it"),
        (lambda c, room, free: min(c, key=lambda one: one[2])[0], "fits as well, with"),
        (
            lambda c, room, free: min((one for one in c if one[2] <= (1 - free) * room), key=lambda one: one[1])[0],
            "both are within 3 % of the quickest; the first takes",
        ),
        (lambda c, room, free: my_headroom(c, room, 0.0), "has to stay free"),
    ],
    "which_layout.reason": [
        (
            lambda quick, slow: max(slow, key=lambda part: slow[part] / max(quick.get(part, 0), 1e-12)),
            "by the largest factor, from nothing",
        ),
        (lambda quick, slow: my_reason(slow, quick), "tensor-parallel traffic has grown by"),
    ],
    "trace.own": [
        (takes_off_all, "what is inside of that once more"),
    ],
    "script_measured.accuracy": [
        (
            lambda logits, targets: (logits.argmax(-1) == targets).double().mean().item(),
            "the accuracy of its own tokens",
        ),
        (mean_of_accuracies, "the mean of the ranks' accuracies. The ranks have different"),
        (accuracy_of_gathered, "Right, but a rank sent"),
    ],
    "is_it_right.first": [
        (lambda script: script, "It returned the script as it was"),
        (lambda script: script + "(", "What it returned is no Python: '(' was never closed"),
        (
            lambda script: script.replace("loss.backward()", "raise ValueError('nothing is summed')"),
            "Your script on 2 ranks: ",
        ),
        (lambda script: script + "\n", "each of ranks 0, 1 keeps its own part"),
        (lambda script: script.replace("range(6)", "range(2)"), "keeps its own part"),
    ],
    "is_it_right.second": [
        (
            lambda script: script.replace("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
            "It does not train as one process does. In step 1",
        ),
    ],
    "is_it_right.third": [
        (
            lambda script: script.replace("below.requires_grad_(False)", "pass"),
            "It does not train as one process does. In step 1",
        ),
    ],
    "is_it_right.fourth": [
        (
            lambda script: script.replace("self.second.bias)", "self.second.bias / dist.get_world_size())"),
            "In step 1 the gradients differ",
        ),
    ],
    "is_it_right.fifth": [
        (
            lambda script: script.replace("    if rank == 0:\n        sampler.set_epoch(epoch)\n", ""),
            "In step 4 the samples differ",
        ),
    ],
    "host_fails.reads": [
        (lambda *a: [read[:2] for read in my_reads(*a)], "it should return a list of (shard, begin, end)"),
        (lambda *a: my_reads(*a)[:1], "a new shard may lie across cuts of the old ones"),
        (lambda *a: my_reads(*a)[::-1], "in the order of the shards"),
        (lambda *a: [*my_reads(*a), (9, 4, 4)], "from which nothing is read does not belong"),
        (lambda rows, b, n, r: my_reads(rows // b * b, b, n, r), "torch.chunk gives each rank"),
    ],
    "host_fails.save": [
        (lambda state, path: torch.save(state, path), "it is half of a state"),
        (removed_first, "there is no file: the old one has to stay until"),
        (lambda state, path: len(state), "it wrote less than the state has"),
        (not_renamed, "the file at path has step 1, not step 2"),
        (copied_beside, "is left over: rename it"),
    ],
    "host_fails.steps": [
        (lambda *a: 3 * my_steps(*a), "μ is that of one GPU divided by the GPUs"),
    ],
    "scorecard.step_bytes": [
        (divides_by_zero, "Your function raised ZeroDivisionError"),
        (lambda *a: float("nan"), "bytes, not nan"),
        (lambda *a: 10**2000, "cannot be compared with the answer (OverflowError"),
    ],
    "scorecard.verdict": [
        (lambda p, m, *rest: "holds" if p == m else "fails", "101 lies within 2 % of 100"),
        (lambda p, m, *rest: "holds", "without a tolerance 101 is not 100"),
        (lambda p, m, rel, e, i: my_verdict(p, m, rel, e, None), "'differs', not 'fails': the second"),
        (lambda p, m, rel, e, i: my_verdict(p, m, rel, "wire", i), "'off', not 'fails': a time may be off"),
        (
            lambda p, m, rel, e, i: "differs" if i == m else my_verdict(p, m, rel, e, i),
            "the first prediction holds; the second is not asked",
        ),
        (
            lambda p, m, rel, e, i: "holds" if abs(m - p) <= rel * p else my_verdict(abs(p), m, rel, e, i),
            "a share of |predicted|",
        ),
        (lambda *a: torch.arange(2), "it returned tensor([0, 1]); it should return a verdict"),
    ],
}


@pytest.mark.parametrize(("name", "answer", "hint"), [(name, *row) for name, rows in WRONG.items() for row in rows])
def test_wrong_answers_get_the_message_that_helps(name, answer, hint):
    assert hint in told_of_wrong(name, answer)


def told_of_wrong(name, answer):
    outcome = judge(name, answer)
    assert outcome.attempted
    assert not outcome.solved
    assert outcome.message.startswith(f"{name.partition('.')[2]}: not yet.")
    assert "\n" not in outcome.message, "one line, and no stack trace of anybody"
    assert len(outcome.message) < 900
    return outcome.message


@pytest.mark.parametrize("name", EXERCISES)
def test_an_answer_that_returns_nothing_is_told_so(name):
    told = told_of_wrong(name, returns_nothing)
    assert re.search("None|order must name|it wrote less than the state has", told), told


def declared(check):
    """Of a :class:`Formula`, its typical wrong answers: what is wrong about each, and which of that."""
    counts = Counter()
    for case in check.drawn():
        words = Counter(why for wrong, why in check.expected(*case)[1] if not callable(wrong))
        counts |= words
    return [(why, which) for why, count in counts.items() for which in range(count)]


@pytest.mark.parametrize("name", FORMULAS)
def test_each_mistake_that_a_formula_declares_is_told(name):
    for why, which in declared(FORMULAS[name]):

        def mistaken(*case, why=why, which=which):
            right, mistakes = FORMULAS[name].expected(*case)
            values = [wrong for wrong, words in mistakes if words == why and not callable(wrong)]
            return values[which] if which < len(values) else right

        assert why in told_of_wrong(name, mistaken)


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_has_the_parameters_of_its_stub(name):
    solution = getattr(module_of(name), EXERCISES[name].stub)
    assert list(signature(FORMULAS[name].expected).parameters) == list(signature(solution).parameters)


def test_every_exercise_has_wrong_answers_with_their_messages():
    found = {
        name: len(WRONG.get(name, ())) + (len(declared(FORMULAS[name])) if name in FORMULAS else 0)
        for name in EXERCISES
    }
    assert min(found.values()) >= 1, found


def test_a_deadlock_is_told_as_one(monkeypatch):
    monkeypatch.setattr(exercises, "TIMEOUT_S", 2)
    outcome = judge("data_parallel.all_reduce", all_receive_first)
    assert not outcome.solved
    assert says(outcome.message, "finish", "2")
    assert says(outcome.message, "receive", "exactly")
