"""Keeps the warm Worlds of a run of pytest, and the folder that their ranks exchange files in."""

import itertools
import os
import shutil
import tempfile
from collections.abc import Sequence

from pardemo.cluster import Cluster
from pardemo.extras import needed_by
from pardemo.world import World, fork_server
from pardemo.world.pool import WorldPool

with needed_by("pardemo.testing"):
    import pytest

#: What ranks need for a test, beside what every rank needs: loaded before they are forked.
PRELOAD = ("pytest", "pardemo.testing.on_rank")
KEY = pytest.StashKey["Worlds"]()


class Worlds:
    """Worlds for tests on ranks, kept until :meth:`close`.

    Args:
        preload: modules to have loaded before the ranks are forked, beside those of this plug-in.
    """

    def __init__(self, preload: Sequence[str] = ()):
        self._preload = (*PRELOAD, *preload)
        self._worlds = WorldPool()
        self._folder: str | None = None
        self._numbers = itertools.count()

    def begin(self) -> None:
        """Starts the process that ranks are forked from, without waiting for it: it loads torch meanwhile."""
        fork_server.shared(self._preload)

    def get(self, size: int, cluster: Cluster | None = None) -> World:
        """Returns the World of so many ranks."""
        return self._worlds.get(size, cluster, self._preload)

    def folder(self) -> str:
        """Returns the path of a folder that does not exist yet, for one test's ranks to make."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="pardemo-tests-")
        return os.path.join(self._folder, str(next(self._numbers)))

    def close(self) -> None:
        """Ends all ranks."""
        self._worlds.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def worlds_of(config: pytest.Config) -> Worlds:
    """Returns the Worlds of a run of pytest."""
    if KEY not in config.stash:
        config.stash[KEY] = Worlds(config.getini("ranks_preload"))
    return config.stash[KEY]


def close(config: pytest.Config) -> None:
    """Ends the ranks of a run of pytest, if it has any."""
    if (worlds := config.stash.get(KEY, None)) is not None:
        worlds.close()
