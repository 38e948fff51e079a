"""Each exercise can be solved, and typical wrong answers get the message that helps."""

import threading

import pytest
import torch
import torch.distributed as dist

from pardemo.collectives import parameter_server_all_reduce
from pardemo.exercises import EXERCISES, check


def ring_by_hand(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = list(tensor.chunk(n))
    inbox = torch.empty_like(chunks[0])
    for step in range(2 * (n - 1)):
        send = dist.isend(chunks[(rank - step) % n], (rank + 1) % n)
        dist.recv(inbox, (rank - 1) % n)
        send.wait()
        mine = chunks[(rank - step - 1) % n]
        if step < n - 1:
            mine.add_(inbox)
        else:
            mine.copy_(inbox)
    return tensor


def everything_to_everyone(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return sum(parts)


def all_receive_first(tensor):
    dist.recv(tensor, (dist.get_rank() - 1) % 4)
    return tensor


def weighted(gradient, samples):
    total = torch.tensor([float(samples)])
    dist.all_reduce(total)
    gradient = gradient * samples / total
    dist.all_reduce(gradient)
    return gradient


def plain_mean(gradient, samples):
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


LOCK = threading.Lock()


def stub(*arguments): ...


def divides_by_zero(*arguments):
    return 1 / 0


@pytest.mark.parametrize(("name", "solution"), [("01_all_reduce", ring_by_hand), ("01_unequal_shards", weighted)])
def test_each_exercise_can_be_solved(name, solution, capsys):
    assert check(name, solution) is True
    assert capsys.readouterr().out.startswith(f"{name}: solved.")


def test_every_exercise_is_tested():
    assert set(EXERCISES) == {"01_all_reduce", "01_unequal_shards"}


@pytest.mark.parametrize(
    ("name", "answer", "hint"),
    [
        ("01_all_reduce", stub, "returned nothing"),
        ("01_all_reduce", lambda t: t, "of the elements hold the sum"),
        ("01_all_reduce", lambda t: t[:5], "it should return a tensor of shape (1048576,), not (5,)"),
        ("01_all_reduce", lambda t: "sum", "not str"),
        ("01_all_reduce", lambda t: everything_to_everyone(t) / 4, "you returned the mean"),
        ("01_all_reduce", everything_to_everyone, "sends 3.00 S; 1.5 S is enough: whole tensors travel"),
        ("01_all_reduce", parameter_server_all_reduce, "that is a parameter server"),
        ("01_all_reduce", divides_by_zero, "raised on rank 0: ZeroDivisionError"),
        ("01_unequal_shards", stub, "On rank 0 it returned NoneType"),
        ("01_unequal_shards", plain_mean, "That is the mean of the means"),
        ("01_unequal_shards", lambda g, n: g, "not the whole batch's mean gradient"),
        ("01_unequal_shards", divides_by_zero, "ZeroDivisionError"),
        ("01_unequal_shards", lambda g, n: g.double(), "not the whole batch's mean gradient"),
        ("01_all_reduce", lambda t: (t, LOCK), "cannot send"),
    ],
)
def test_wrong_answers_get_the_message_that_helps(name, answer, hint, capsys):
    assert check(name, answer) is False
    printed = capsys.readouterr().out
    assert printed.startswith(f"{name}: not yet.")
    assert hint in printed
    assert "Traceback" not in printed


def test_a_deadlock_is_told_as_one(monkeypatch, capsys):
    from pardemo.exercises import chapter_01

    monkeypatch.setattr(chapter_01, "TIMEOUT_S", 2)
    assert check("01_all_reduce", all_receive_first) is False
    assert "did not finish within 2 s" in (printed := capsys.readouterr().out)
    assert "Does every rank receive exactly what another one sends?" in printed


def test_unknown_exercise():
    with pytest.raises(ValueError, match="no exercise '99_x'; there are: 01_all_reduce"):
        check("99_x", stub)
