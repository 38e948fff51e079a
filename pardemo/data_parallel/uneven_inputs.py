"""Uneven inputs: ranks whose data has ended go on taking part in the others' exchanges, with zeros.

By torch's generic join (``torch.distributed.algorithms.join``), with the meaning that torch's DDP gives it.
"""

from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import JoinHook

from pardemo import compat
from pardemo.collectives.channel import Channel
from pardemo.data_parallel.replicas import broadcast_buffers, broadcast_model

#: What a rank is about to do in this iteration, as it tells all others; 0: its data has ended.
ACTIVE, BUFFERS, BACKWARD = 1, 2, 4


class Joining(Protocol):
    """What is asked of a wrapper whose rank has no more data."""

    sender: Any
    channel: Channel
    module: torch.nn.Module
    join_device: torch.device
    _join_config: Any

    def send_zeros(self) -> None:
        """Takes part in the exchanges of one backward, with zeros."""


class Shadow(JoinHook):
    """A rank that has joined: for each iteration of the others the exchanges of one forward and one backward."""

    def __init__(self, wrapper: Joining):
        self._wrapper = wrapper

    def main_hook(self) -> None:
        wrapper = self._wrapper
        wrapper.sender.wait()  # only now: the others may need this rank elsewhere before they run their backward
        plans = all_plans(wrapper.channel, 0, wrapper.join_device)
        if any(plan & BUFFERS for plan in plans):
            broadcast_buffers(wrapper.module, wrapper.channel, last_active(plans))
        if any(plan & BACKWARD for plan in plans):
            wrapper.send_zeros()

    def post_hook(self, is_last_joiner: bool) -> None:
        """The final model is that of a rank that had data to the last."""
        wrapper = self._wrapper
        wrapper.sender.wait()
        wrapper._join_config = compat.JoinConfig.construct_disabled_join_config()  # Join itself leaves it on
        plans = all_plans(wrapper.channel, ACTIVE * is_last_joiner, wrapper.join_device)
        broadcast_model(wrapper.module, wrapper.channel, last_active(plans))


def all_plans(channel: Channel, plan: int, device: torch.device) -> list[int]:
    """Every rank's plan for this iteration, in one small exchange."""
    plans = torch.zeros(channel.size, dtype=torch.int64, device=device)
    plans[channel.rank] = plan
    return channel.all_reduce(plans, "plans of the iteration").tolist()


def last_active(plans: list[int]) -> int:
    """The rank whose buffers and model count: of those that still have data the last, as in torch's DDP."""
    return max(rank for rank, plan in enumerate(plans) if plan)
