"""Tests that run on ranks: ``pardemo`` is a plug-in of pytest, which finds it by itself.

>>> import pytest
>>> @pytest.mark.ranks(2, 4)                              # doctest: +SKIP
... def test_sum(rank, world_size):
...     total = torch.tensor([float(rank)])
...     dist.all_reduce(total)
...     assert total.item() == world_size * (world_size - 1) / 2

The body runs on every rank, once with two and once with four. Ranks are processes with ``torch.distributed`` ready in
them; they stay warm from test to test. Fixtures of the plug-in: ``rank``, ``world_size``, ``wire``, ``memory``,
``same_on_all_ranks``, ``single_process``. How it works, what it costs and what it cannot do: ``docs/testing.md``.

:mod:`.plugin` is what pytest loads, :mod:`.on_rank` what the ranks load.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.cluster import Cluster
    from pardemo.world import World

__all__ = ["warm_world"]


def warm_world(config: Any, size: int, cluster: "Cluster | None" = None) -> "World":
    """The World that tests marked with ``ranks(size)`` run on: for a fixture that runs functions on the same ranks.

    >>> @pytest.fixture                                       # doctest: +SKIP
    ... def world(request):
    ...     return warm_world(request.config, 4)

    Args:
        config: ``request.config``, or ``pytestconfig``. The World is closed at the end of the run, not by the fixture.
    """
    from pardemo.testing.worlds import worlds_of

    return worlds_of(config).get(size, cluster)
