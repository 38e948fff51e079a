"""Keeps warm Worlds, one for each number of ranks and each cluster."""

from collections.abc import Sequence

from pardemo.cluster import Cluster
from pardemo.world import World


class WorldPool:
    """Worlds that are made when they are first asked for, and kept until :meth:`close`."""

    def __init__(self) -> None:
        self._worlds: dict[tuple[int, Cluster | None], World] = {}

    def get(self, size: int, cluster: Cluster | None = None, preload: Sequence[str] = ()) -> World:
        """The World of so many ranks; made anew where it has not loaded all of ``preload``, with what it had too."""
        world = self._worlds.get((size, cluster))
        if world is not None and not set(preload) <= set(world.preload):
            print(f"The {size} ranks start anew, with {', '.join(preload)} loaded: their variables are gone.")
            preload = sorted({*world.preload, *preload})
            world.close()
            world = None
        if world is None:
            world = self._worlds[size, cluster] = World(size, preload=preload, cluster=cluster)
        return world

    def close(self) -> None:
        """Ends all ranks."""
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
