"""What is alive beside the model states: for our own engines counted tensor by tensor, as for DeepSpeed's and FSDP2's.

Not by the engine's own account (``state_bytes``), which lists what it wants to: every tensor that Python knows.
"""

from functools import partial

import pytest
import torch
from conftest import few
from torch import nn

from pardemo import MemoryMeter
from pardemo.peers import states
from pardemo.small_models import gpt
from pardemo.zero import Zero1, Zero2, Zero3

STAGES = {1: Zero1, 2: Zero2, 3: Zero3}
WIDTH, LAYERS = 256, 6
LAYER = 2 * WIDTH**2  # bytes in bf16


def others(stage, options):
    """Bytes beside the listed states after each backward pass and each step, and the most that any backward needs."""
    before = states.nbytes(states.alive())
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]).bfloat16()
    engine = STAGES[stage](net, partial(torch.optim.AdamW, lr=1e-3), **options)
    x = gpt.numbers(8, WIDTH, dtype=torch.bfloat16)
    most = 0

    def kinds():
        return {
            "parameters": [*net.parameters(), *(u.flat for u in engine.units), *(u.shard for u in engine.units)],
            "gradients": [*(p.grad for p in net.parameters()), *(unit.gradient for unit in engine.units)],
            "optimizer states": [
                *(u.master for u in engine.trained),
                *(t for s in engine.optimizer.state.values() for t in s.values()),
            ],
        }

    def note(*_):
        nonlocal most
        most = max(most, states.by_kind(kinds(), before)["others"])

    note.__module__ = MemoryMeter.__module__  # the meters' hooks only look, and are allowed
    found = []
    for step in range(3):
        loss = engine(x).square().mean()
        if step == 2:
            for parameter in net.parameters():
                parameter.register_post_accumulate_grad_hook(note)
        loss.backward()
        del loss
        found.append(states.by_kind(kinds(), before))
        engine.step()
        found.append(states.by_kind(kinds(), before))
    return [table["others"] for table in found], most, found[-2]["gradients"]


@pytest.mark.parametrize(
    ("stage", "options", "in_flight"),
    # gradients on their way: two, one just packed, and what reducing them takes
    few([(1, {}, 0), (2, {"bucket_bytes": LAYER}, 5), (3, {}, 5)], 1),
)
def test_nothing_is_kept_beside_the_model_states(world_of, stage, options, in_flight):
    """A full gradient kept aside would be six layers."""
    small = 8 * WIDTH * 2 * 4  # the batch, activations of a layer
    for n in (1, 2):
        for left, most, gradients in world_of(n).run(others, stage, options):
            assert max(left) <= small
            assert most <= in_flight * LAYER + LAYERS * small
            assert gradients <= LAYERS * LAYER / (1 if stage == 1 else n) * (1 + (stage == 1) / n) + small
