"""Runs functions on N rank processes that stay between calls: :class:`World`."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from pardemo import argument_checks
from pardemo.cluster import MAX_RANKS, Cluster, loopback
from pardemo.cluster.units import bytes_per_second
from pardemo.world.errors import RankDied, RankError
from pardemo.world.rank_processes import Ranks


class World:
    """``size`` ranks with a default process group (gloo on CPUs, nccl on GPUs).

    >>> with World(4) as world:                     # doctest: +SKIP
    ...     world.run(my_function, nbytes)          # my_function(nbytes) on every rank -> [4 results]

    Args:
        size: number of ranks, 1 to 64.
        preload: modules to have loaded before the ranks are forked (``"deepspeed"``, ``"transformers"`` …).
            The first World with a given set pays for the import, later ones do not. A function, as
            ``"module:function"``, is called there once all modules are loaded.
        threads: torch threads per rank.
        backend: ``"gloo"`` or ``"nccl"``; by default nccl where every rank can have a GPU of its own.
        timeout_s: time limit of a :meth:`run` that names none, in seconds; see there.
        env: environment variables for the ranks, on top of this process's.
        cluster: hosts and links with limits on this machine, for ``size`` ranks: see :class:`pardemo.Cluster`.

    Raises:
        ValueError: ``size`` or ``threads`` out of range; nccl without a GPU for each rank; a cluster of
            another size, of links that loopback does not carry, or where the kernel cannot limit a connection.
        RankError: the ranks could not start.

    The ranks stay between calls of :meth:`run`: a module that they have imported stays as it was then, and what one
    call leaves in a module the next one finds. After a failure, a timeout or an interrupt they are
    replaced by fresh ones, so the next ``run`` works. Nothing is left running when the World is closed,
    garbage collected, or its process ends, even by SIGKILL.
    """

    def __init__(
        self,
        size: int,
        *,
        preload: Sequence[str] = (),
        threads: int = 1,
        backend: str | None = None,
        timeout_s: float = 300.0,
        env: dict[str, str] | None = None,
        cluster: Cluster | None = None,
    ):
        self.size = argument_checks.whole_number(size, "World size", most=MAX_RANKS)
        self.threads = argument_checks.whole_number(threads, "threads", most=1024)
        if backend not in (None, "gloo", "nccl"):
            raise ValueError(f"backend must be 'gloo', 'nccl' or None, not {backend!r}")
        argument_checks.above_zero(timeout_s, "timeout_s")
        for name, value in (env or {}).items():
            if not (isinstance(name, str) and isinstance(value, str)):
                raise TypeError(f"env holds texts, not {name!r}: {value!r}")
        if isinstance(preload, str):
            raise TypeError(f"preload is a list of module names; write [{preload!r}]")
        if cluster is not None:
            backend = _on_cluster(cluster, size, backend)
        if backend == "nccl" and (gpus := _gpus()) < size:
            raise ValueError(
                f"backend 'nccl' needs a GPU for each of {size} ranks, and {gpus} are here; 'gloo' needs none"
            )
        self.cluster, self.preload, self.timeout_s = cluster, tuple(preload), timeout_s
        self.backend: str | None = backend
        self._env = dict(env or {})
        self._busy = threading.Lock()
        self._ranks: Ranks | None = None
        self._closed = False
        self._start()

    def __repr__(self) -> str:
        state = "closed" if self._closed else ("idle" if self._ranks else "to be started again")
        return f"<World of {self.size} ranks, {self.backend or 'backend not known yet'}, {state}>"

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tier(self) -> str | None:
        """Returns how a cluster's links are limited: by ``"namespaces"`` or by ``"pacing"``; None without a cluster."""
        ranks = self._ranks
        if self.cluster is None or ranks is None:
            return None
        return self.cluster.tier or ("namespaces" if ranks.hosts else "pacing")

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that run now (none after a failure, until the next :meth:`run`)."""
        ranks = self._ranks
        return list(ranks.pids) if ranks else []

    def run(self, function: Callable, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> list:
        """Calls ``function(*args, **kwargs)`` on every rank and returns the results in the order of the ranks.

        Functions, classes and closures defined in the notebook work. What ranks print appears here, each
        line marked with its rank. Results are copied whole: of a large tensor return a ``clone()`` of the part.

        On Linux ``timeout_s`` is put off by the time for which the ranks wait for a core. Ranks that sleep, or hang in
        a collective, end when that many seconds have passed; ranks that compute get that much time on a core, however
        much else the machine does. No run takes more than 20 times its limit.

        Raises:
            TypeError: the function or an argument cannot be pickled.
            RankFailed: it raised on one or more ranks; RankDied: a rank's process ended;
            RankTimeout: not all ranks finished within ``timeout_s`` seconds, put off as above.
            RankError: the supervisor of a cluster's hosts ended; the World is busy or closed.
        """
        limit = self.timeout_s if timeout_s is None else argument_checks.above_zero(timeout_s, "timeout_s")
        task = _pack(function, args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise RankError("this World is busy with another run (of another thread); give each thread its own World")
        try:
            if self._closed:
                raise RankError("this World is closed; make a new one")
            try:
                ranks = self._start() if self._ranks is None else self._ranks
                if self._closed:  # another thread's close() came before there were ranks that it could end
                    raise RankError("this World was closed while it ran")
                ranks.await_start()
                self.backend = ranks.backend
                ranks.send(task)
                return ranks.collect(limit)
            except BaseException as error:  # interrupts too: whatever the ranks were doing is ended
                self._drop()
                if self._closed and isinstance(error, RankDied):
                    raise RankError("this World was closed while it ran") from None
                raise
        finally:
            self._busy.release()
            if self._closed:  # a close() that found the World busy has left the rest to this thread
                self.close()

    def stacks(self) -> dict[int, str]:
        """Returns each rank's Python stack, also while another thread's :meth:`run` waits for them.

        Empty where no ranks run. A rank that does not answer, or that another thread ends just then, has an empty
        text; of one that is stopped by a signal it says so.
        """
        ranks = self._ranks
        try:
            return ranks.read_stacks(list(range(self.size)))[1] if ranks else {}
        except (OSError, ValueError):  # their files have been closed meanwhile
            return {}

    def give_up(self) -> None:
        """Ends a :meth:`run` of another thread as its time limit would: with RankTimeout, and what each rank did."""
        ranks = self._ranks
        if ranks is not None:
            ranks.given_up = True

    def limit(self, host: int, between: str | None) -> None:
        """Gives a host's adapter another limit from now on, while its ranks run; None: the cluster's own.

        Fresh ranks, after a failure, begin with the cluster's own.

        Raises:
            ValueError: no cluster, no such host, or no bandwidth; OSError: the kernel refuses.
        """
        if self.cluster is None:
            raise ValueError("this World has no cluster, so no links with limits")
        if isinstance(host, bool) or not isinstance(host, int) or not 0 <= host < self.cluster.hosts:
            raise ValueError(f"host is one of 0 to {self.cluster.hosts - 1}, not {host!r}")
        rate = None if between is None else bytes_per_second(between, "between")
        if rate is not None:
            loopback.refuse_above_measured(rate, "between")
        ranks = self._ranks  # another thread's close() takes it away at any time
        if ranks is not None:
            ranks.limit(host, rate)

    def close(self) -> None:
        """Ends the ranks in an orderly way; what does not end within 5 s is killed. Safe to call twice.

        A :meth:`run` of another thread ends with a RankError, and its ranks with it.
        """
        self._closed = True  # before the lock is asked for: whoever holds it looks here before and after its work
        if self._busy.acquire(blocking=False):
            try:
                ranks, self._ranks = self._ranks, None
                if ranks is not None:
                    ranks.close()
            finally:
                self._busy.release()
        elif (ranks := self._ranks) is not None:  # another thread is in run(): without ranks it ends
            ranks.fork_server.kill(ranks.pids)

    def _start(self) -> Ranks:
        self._ranks = Ranks(self.size, self.backend, self.preload, self.threads, self._env, self.cluster)
        self._finalizer = weakref.finalize(self, self._ranks.kill)
        return self._ranks

    def _drop(self) -> None:
        if self._ranks is not None:
            self._ranks = None
            self._finalizer()  # kills them


def _gpus() -> int:
    import torch  # costs seconds: for those alone who ask for GPUs

    return torch.cuda.device_count()


def _on_cluster(cluster: Cluster, size: int, backend: str | None) -> str:
    """The backend of ranks on an emulated cluster; ValueError where there can be no such cluster here."""
    if cluster.size != size:
        places = f"{cluster.hosts} × {cluster.ranks_per_host} = {cluster.size}"
        raise ValueError(f"{size} ranks do not fit a cluster of {places}")
    if backend == "nccl":
        raise ValueError("a cluster limits TCP connections: its ranks need the backend 'gloo', not 'nccl'")
    for name, rate in (("between", cluster.between_rate), ("inside", cluster.inside_rate)):
        if rate is not None:
            loopback.refuse_above_measured(rate, f"Cluster: {name}")
    return "gloo"


def _pack(function: Callable, args: tuple, kwargs: dict) -> bytes:
    from pardemo.world import pickling

    if not callable(function):
        raise TypeError(f"World.run needs a function, not {function!r}")
    try:
        return pickling.dumps((function, args, kwargs))
    except Exception as error:
        name = getattr(function, "__qualname__", repr(function))
        raise TypeError(
            f"cannot send {name} to the ranks: {error}. Open files, locks and sockets do not travel; "
            "make them inside the function"
        ) from None
