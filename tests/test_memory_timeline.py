"""A step's bytes as they come and go: known tensors, at known moments."""

import torch
from book import figures
from torch import nn

from pardemo.book.chapters.zero_memory import figures as zero_figures
from pardemo.book.chapters.zero_memory import measurements as kept
from pardemo.meters.memory_timeline import MemoryTimeline

FLOAT = 4


def step(net, optimizer, x):
    net(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_is_told_from_its_parameters_to_its_states():
    net = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(net.parameters())
    x = torch.ones(8, 64)
    step(net, optimizer, x)
    with MemoryTimeline(net, optimizer) as course:
        step(net, optimizer, x)
    weight = 64 * 32 * FLOAT
    assert list(course.marks) == ["forward", "backward", "step"]
    assert sorted(course.marks.values()) == list(course.marks.values())
    assert course.at("forward")["parameters"] == weight
    assert course.at("forward")["gradients"] == 0
    assert course.at("step")["gradients"] == weight
    assert course.at("step")["optimizer states"] == 2 * weight + FLOAT  # and the step's number
    assert course.states[-1]["gradients"] == 0


def test_a_copy_that_the_optimizer_updates_is_its_state_and_a_gradient_put_in_place_is_one():
    flat, gradients = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    weights = nn.ParameterList([flat.view(8, 8)])
    weights[0].grad = gradients.view(8, 8)
    master = flat.float()
    optimizer = torch.optim.AdamW([master])
    with MemoryTimeline(weights, optimizer) as course:
        (torch.ones(2, 8, dtype=torch.bfloat16) @ weights[0]).sum().backward()
        master.grad = gradients.float()
        optimizer.step()
    assert course.at("step")["gradients"] == 64 * 2
    assert course.at("step")["optimizer states"] == 64 * FLOAT
    assert course.live["optimizer states"] == 3 * 64 * FLOAT + FLOAT


def test_phases_are_equally_wide_and_one_without_changes_is_left_out():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    with MemoryTimeline(net) as course:
        net(torch.ones(2, 16)).sum().backward()
    figures.held_over_a_step({"one": (course.states, course.marks), "two": (course.states, course.marks)}, 544)
    at, ends = zero_figures._by_phase(len(course.states), course.marks)
    assert len(at) == len(course.states) + 1
    assert at == sorted(at)
    assert list(ends) == ["forward", "backward"]
    assert at[course.marks["backward"]] == 1.0


def test_units_of_fsdp_decide_the_peak(world_of):
    def peaks():
        from torch.distributed.fsdp import fully_shard

        def worst(net):
            states, _ = kept.course(fully_shard(net), 64)
            return max(state["activations"] for state in states) / (64 * 64 * FLOAT)

        by_layer = kept.stack(64, 6)
        for layer in by_layer:
            fully_shard(layer)
        return worst(by_layer), worst(kept.stack(64, 6))

    for layers, model in world_of(2).run(peaks):
        assert layers < 5.5 < 11.9 < model
