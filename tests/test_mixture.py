"""The plain layer with experts, Megatron-core's on its weights, and the arithmetic of both."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from conftest import few

from pardemo import World
from pardemo.expert_parallel import ExpertParallel, Router
from pardemo.formulas import expert_parallel as formulas
from pardemo.peers import megatron_experts
from pardemo.small_models import gpt
from pardemo.small_models.mixture import Mixture, MixtureGPT

HIDDEN, WIDTH, EXPERTS, CHOSEN, TOKENS = 16, 8, 8, 2, 48
TOLERANCE = 1e-5


def layer():
    return gpt.seeded(lambda: Mixture(Router(HIDDEN, EXPERTS, CHOSEN), WIDTH))


def test_the_plain_layer_is_a_sum_over_all_experts():
    mixture, x = layer(), gpt.numbers(3, TOKENS, HIDDEN, seed=1)
    routing = mixture.router(x.flatten(0, 1))
    weights = torch.zeros_like(routing.scores).scatter(1, routing.experts, routing.weights)
    expected = mixture.shared(x).flatten(0, 1)
    for weight, expert in zip(weights.T, mixture.experts, strict=True):
        expected = expected + weight[:, None] * expert(x.flatten(0, 1))
    assert gpt.relative_error(mixture(x), expected.view_as(x)) < TOLERANCE


def test_a_copy_after_a_forward_pass_has_no_graph():
    mixture, x = layer(), gpt.numbers(TOKENS, HIDDEN)
    out = mixture(x)
    assert torch.equal(copy.deepcopy(mixture)(x), out)
    assert copy.deepcopy(mixture).routing is None
    assert mixture.routing is not None


def test_the_small_model_learns():
    model = gpt.seeded(lambda: MixtureGPT(32, 2, 16, Mixture(Router(HIDDEN, EXPERTS, CHOSEN), WIDTH)))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), 1e-2), gpt.text(16, 17, 32)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def megatrons():
    """Relative errors of Megatron-core's layer, of its output and of every gradient."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plain = layer()
    x, gradient = (gpt.numbers(ranks * TOKENS, HIDDEN, seed=seed) for seed in (3, 4))
    expected = plain(x)
    expected.backward(gradient)
    with megatron_experts.expert_groups(ranks):
        theirs = megatron_experts.MegatronMixture(plain)
        out = theirs(x.chunk(ranks)[rank])
        out.backward(gradient.chunk(ranks)[rank])
    errors, truth = [gpt.relative_error(out, expected.chunk(ranks)[rank])], dict(plain.named_parameters())
    gradients = theirs.gradients()
    assert len(gradients) == 3 + 2 * EXPERTS // ranks
    for name, part in gradients.items():
        if not name.startswith("experts."):
            dist.all_reduce(part)
        errors.append(gpt.relative_error(part, truth[name].grad))
    ours = ExpertParallel(plain.router, plain.experts, shared=plain.shared)(x.chunk(ranks)[rank])
    return max(*errors, gpt.relative_error(ours, out))


@pytest.mark.parametrize("ranks", few([1, 2, 4], 1))
def test_megatrons_layer_is_the_plain_one(ranks):
    with World(ranks, preload=["pardemo.peers.megatron_experts"], timeout_s=120) as world:
        assert max(world.run(megatrons)) < TOLERANCE


def test_what_a_layer_has_and_costs():
    mixture = layer()
    counted = sum(parameter.numel() for parameter in mixture.parameters())
    assert formulas.layer_parameters(HIDDEN, WIDTH, EXPERTS, shared=1) == counted
    of_expert = 2 * 3 * HIDDEN * WIDTH
    assert formulas.token_flops(HIDDEN, WIDTH, EXPERTS, CHOSEN, 1) == 3 * of_expert + 2 * HIDDEN * EXPERTS
    more = formulas.token_flops(HIDDEN, WIDTH, 2 * EXPERTS, CHOSEN, 1)
    assert more - formulas.token_flops(HIDDEN, WIDTH, EXPERTS, CHOSEN, 1) == 2 * HIDDEN * EXPERTS, "the router alone"


def test_what_is_sent_and_dropped():
    assert formulas.one_way_bytes(100, 8, 2, 4, 2) == 0.75 * 100 * 2 * 8 * 2
    assert formulas.one_way_bytes(100, 8, 2, 1) == 0
    assert formulas.capacity(100, 2, 8, 1.0) == 25
    assert formulas.capacity(100, 2, 8, 1.01) == 26
    assert formulas.dropped([10, 3, 0, 26], 5) == 26
    with pytest.raises(ValueError, match=r"least.*1.*0"):
        formulas.one_way_bytes(1, 1, 1, 0)
    with pytest.raises(ValueError, match="above 0, not 0"):
        formulas.capacity(1, 1, 1, 0)
    with pytest.raises(ValueError, match=r"6.*experts.*4"):
        formulas.other_nodes(6, 2, 4)


@pytest.mark.parametrize(("experts", "chosen", "nodes"), [(8, 2, 4), (12, 3, 3), (6, 6, 2), (8, 3, 1)])
def test_nodes_that_a_token_meets_are_those_of_all_choices(experts, chosen, nodes):
    each = experts // nodes
    choices = list(itertools.combinations(range(experts), chosen))
    met = [len({expert // each for expert in choice} - {0}) for choice in choices]
    assert formulas.other_nodes(experts, chosen, nodes) == pytest.approx(sum(met) / len(choices))
