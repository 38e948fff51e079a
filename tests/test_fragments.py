"""Where memory ends in holes: torch's allocator by a model of its rules, and itself where a GPU is."""

import pytest
import torch
from book import drawings

from pardemo.book.chapters.zero_r.drawings import MOMENTS
from pardemo.meters import operation_costs
from pardemo.planner.dry_run.allocator import by_the_rules, replay

MIB = 1 << 20


def forward_pass(layers, own_place=False):
    if own_place:
        yield "all checkpoints", 20 * layers
    for layer in range(layers):
        yield from (("attention", 300), ("attention", -300), ("MLP", 200))
        if not own_place:
            yield f"checkpoint {layer}", 20
        yield "MLP", -200


def test_memory_runs_out_while_more_than_half_of_it_is_free():
    found = replay(forward_pass(28), 1000)
    assert (found.failed, found.wanted, found.taken, found.reserved) == ("attention", 300, 21 * 20, 900)
    assert found.largest == 280  # in the segment with one checkpoint


@pytest.mark.parametrize("way", [{"own_place": True}, {"expandable": True}])
def test_a_place_of_its_own_or_pages_let_all_layers_pass(way):
    found = replay(forward_pass(28, way.pop("own_place", False)), 1000, **way)
    assert found.failed is None
    assert found.taken == 28 * 20


def test_pages_run_out_when_no_page_is_left():
    found = replay(forward_pass(28), 800, expandable=True)
    assert (found.failed, found.wanted, found.taken) == ("attention", 300, 26 * 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_rules_are_those_of_torch():
    real, model = replay(forward_pass(28), 1000), by_the_rules(list(forward_pass(28)), 1000)
    assert real.real
    assert (real.failed, real.taken, real.reserved) == (model.failed, model.taken, model.reserved)


def test_the_drawing_tells_what_the_allocator_did():
    """Each caption of the player names what is at its moment."""
    changes = list(forward_pass(28))
    after = {count: by_the_rules(changes[:count], 1000) for count in MOMENTS}
    assert [len(after[k].segments) for k in (1, 6, 31)] == [1, 2, 3]
    assert sum(str(who).startswith("checkpoint") for who, *_ in after[100].segments[1][1]) == 15
    assert by_the_rules(changes[:106], 1000).failed == "attention"
    assert after[105].largest == 280
    assert len(drawings.fragments(after)) == len(MOMENTS)


def test_a_cpus_fused_attention_is_counted():
    q = torch.zeros(1, 2, 64, 16, requires_grad=True)  # [b, heads, s, h / heads]
    with operation_costs.MatmulCounter() as counted:
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    forward = 4 * 64**2 * 32
    assert counted.flops == 3.5 * forward
