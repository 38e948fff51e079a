"""Wrong answers about communication, about what is measured and compared, and about hosts that fail."""

import os
import tempfile
import threading
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from pardemo.book.chapters.host_fails.exercises import my_reads, my_save, my_steps
from pardemo.book.chapters.script_measured.exercises import my_accuracy
from pardemo.book.chapters.your_machine.exercises import my_neighbour
from pardemo.collectives import parameter_server_all_reduce, ring_all_reduce
from wrong_answers.common import divides_by_zero, everything_to_everyone, gathered


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


def plain_mean(gradient, samples):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


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


def replaced(old, new):
    """An answer that changes the script in one place."""
    return lambda script: script.replace(old, new)


#: Of each exercise the answers that are wrong, and what is said to each.
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
    "cluster.order": [
        (lambda nodes: list(range(len(nodes))), "crosses 4 times; 2 would do"),
        (lambda nodes: [0] * len(nodes), "it should be a list with each rank once"),
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
        (replaced("loss.backward()", "raise ValueError('nothing is summed')"), "Your script on 2 ranks: "),
        (lambda script: script + "\n", "each of ranks 0, 1 keeps its own part"),
        (replaced("range(6)", "range(2)"), "keeps its own part"),
    ],
    "is_it_right.second": [
        (
            replaced("    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""),
            "It does not train as one process does. In step 1",
        ),
    ],
    "is_it_right.third": [
        (replaced("below.requires_grad_(False)", "pass"), "It does not train as one process does. In step 1"),
    ],
    "is_it_right.fourth": [
        (
            replaced("self.second.bias)", "self.second.bias / dist.get_world_size())"),
            "In step 1 the gradients differ",
        ),
    ],
    "is_it_right.fifth": [
        (
            replaced("    if rank == 0:\n        sampler.set_epoch(epoch)\n", ""),
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
}
