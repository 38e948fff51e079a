"""Outputs whose rows are not in the order of samples, under ``prove``: [s, b, h], and tokens as a router sends them."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pardemo.prove import prove
from pardemo.script.compare import checks


class SequenceFirst(nn.Module):
    """Inside it is [s, b, h], with as many tokens in a sample as the whole batch has samples: 4."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, tokens):
        x = self.layer(self.embed(tokens.t()).tanh())  # [s, b, h]
        return self.head(x.transpose(0, 1))


class Flattened(SequenceFirst):
    """Its layer sees [s·b, h], as Megatron's router does."""

    def forward(self, tokens):
        x = self.embed(tokens.t())
        return self.head(self.layer(x.flatten(0, 1).tanh()).view_as(x).transpose(0, 1))


class Dispatched(SequenceFirst):
    """Its layer is an expert that gets all tokens, sorted: on each rank in another order than in one process."""

    wrong = False

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        order = tokens.flatten().argsort(stable=True)
        sent = self.layer(x[order].tanh())
        if self.wrong and dist.get_world_size() > 1:
            sent = sent.flip(0)  # the tokens come back to others
        return self.head(torch.empty_like(sent).index_copy(0, order, sent).unflatten(0, tokens.shape))


class Confused(Dispatched):
    wrong = True


def loss(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["targets"].flatten())


def data_parallel(model, layout):
    return DistributedDataParallel(model)


def proof(build):
    drawn = torch.randint(32, (2, 4, 5), generator=torch.Generator().manual_seed(2))
    batches = [{"tokens": t[:, :-1], "targets": t[:, 1:]} for t in drawn]
    return prove(build, loss, batches, data_parallel, ["ranks=1", "ranks=2", "ranks=2 accumulate=2"])


@pytest.mark.parametrize("build", [SequenceFirst, Flattened, Dispatched])
def test_rows_in_another_order_are_not_accused(build):
    made = proof(build)
    assert made.equal, str(made)


def test_tokens_that_come_back_to_others_are_found_where_that_shows():
    made = proof(Confused)
    assert {finding.module for finding in made.findings} == {"head"}


@pytest.mark.parametrize(
    ("judged", "told"),
    [
        ("= = =", ""),
        ("= ! !", "12"),  # ! differs in a module that is not cut
        ("! = =", "0"),
        ("? ? =", ""),  # ? in one that is: a partial sum, which comes right again
        ("= ? ?", "12"),
        ("? ! =", "1"),
        ("? ! ?", "012"),
        ("! ? =", "0"),
    ],
)
def test_what_differs_is_told_from_where_it_does_not_come_right_again(judged, told):
    modules = [(sign == "=", SimpleNamespace(place=n, strict=sign == "!")) for n, sign in enumerate(judged.split())]
    assert "".join(str(one.place) for one in checks._that_stay_apart(modules)) == told


def test_an_output_is_rows_only_where_it_can_be():
    cells = torch.arange(36.0).reshape(12, 3)
    ways = checks.rows_of_output(cells, 4, 3)
    assert list(ways) == [checks.FLAT, checks.FLAT_BY_TOKENS]
    assert torch.equal(ways[checks.FLAT][1], cells[3:6])
    assert torch.equal(ways[checks.FLAT_BY_TOKENS][1], cells[1::4])
    assert list(checks.rows_of_output(cells, 12, 3)) == [checks.BY_SAMPLES]
    assert list(checks.rows_of_output(cells, 4, 12)) == [checks.SHARED]
    assert not checks.rows_of_output(cells, 4, 5), "12 rows are not 4 samples of 5 tokens"
    assert list(checks.rows_of_output(cells.reshape(2, 2, 9), 2, 2)) == [checks.BY_SAMPLES, checks.BY_TOKENS]
