"""Which parameters travel together: buckets in the order in which a backward pass makes gradients."""

import math
from collections.abc import Sequence

from torch import nn


def split_into_buckets(parameters: Sequence[nn.Parameter], bucket_bytes: float = math.inf) -> list[list[nn.Parameter]]:
    """Parameters in reverse order, about that in which backward produces gradients, cut into buckets of one dtype and
    device each. A bucket is closed when it has reached ``bucket_bytes``."""
    buckets: list[list[nn.Parameter]] = []
    room = 0.0
    for parameter in reversed(parameters):
        same = buckets and (buckets[-1][0].dtype, buckets[-1][0].device) == (parameter.dtype, parameter.device)
        if room <= 0 or not same:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(parameter)
        room -= parameter.numel() * parameter.element_size()
    return buckets
