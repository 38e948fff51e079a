"""``python -m pardemo.world MODULE:FUNCTION [ARGS]`` as a rank of somebody else's job (torchrun, deepspeed).

Those launchers are the distributed engine: they start the ranks and tell each, through the environment,
who it is. Here the rank joins the group, calls the function and leaves; rank 0 prints the result as JSON.
"""

import ast
import hashlib
import importlib
import json
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from pardemo import compat
from pardemo.world.imports import without_garbage_collection
from pardemo.world.rank_environment import RankEnvironment

NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip())
        return 0 if argv else 2
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        print(
            f"pardemo.world: {', '.join(missing)} not set: start it by torchrun, "
            "for example: torchrun --nproc-per-node 2 -m pardemo.world " + argv[0],
            file=sys.stderr,
        )
        return 2
    with without_garbage_collection():
        from pardemo.world.rank import end

        sys.path.insert(0, os.getcwd())  # for the caller's function, and not for what we load ourselves
        try:
            function = _find_function(argv[0])
        except ValueError as error:
            print(f"pardemo.world: {error}", file=sys.stderr)
            return 2
    join()
    result = function(*map(value_of, argv[1:]))
    if os.environ["RANK"] == "0":
        print(json.dumps(result, default=_plain), flush=True)
    return end()


def join(threads: int | None = None) -> None:
    """Makes this process the rank that the environment says it is; ``threads`` of torch, else OMP_NUM_THREADS."""
    from pardemo.world.rank import join_group

    join_group(RankEnvironment(
        rank=int(os.environ["RANK"]), size=int(os.environ["WORLD_SIZE"]), store=None, backend=None,
        threads=threads or int(os.environ.get("OMP_NUM_THREADS", "1")),
        env=_interface(), path=sys.path[:], cwd=os.getcwd(), timeout_s=600.0,
    ))  # fmt: skip


def first_to_say(text: str) -> bool:
    """Whether no other rank of the job has said this before: what all of them find wrong is told once.

    Before the ranks have met, each host's first one tells.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        store = compat.default_store()
        return store.add(f"said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the host that keeps the store is gone
        return True


def _interface() -> dict[str, str]:
    """gloo's network interface: the one that reaches the master, unless the environment already names one."""
    if "GLOO_SOCKET_IFNAME" in os.environ:
        return {}
    import psutil

    from pardemo.cluster.sockets import address_towards

    address = address_towards(os.environ["MASTER_ADDR"])
    for name, entries in psutil.net_if_addrs().items():
        if any(e.family in (socket.AF_INET, socket.AF_INET6) and e.address == address for e in entries):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def _plain(value: Any) -> Any:
    """What JSON has no word for: a meter's figures (:mod:`pardemo.meters`); of anything else its text."""
    figures = getattr(value, "figures", None)
    return figures() if callable(figures) else repr(value)


def value_of(text: str) -> Any:
    """Returns what a word of a command line means: ``4`` is a number, ``[1, 2]`` a list, no Python literal a text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


def _find_function(spec: str) -> Callable[..., Any]:
    """Returns the function of ``package.module:function``. Raises ValueError, in one line, where there is none."""
    module, colon, name = spec.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"{spec!r} is not of the form MODULE:FUNCTION")
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"cannot import module {module!r}: {error}") from None
    except AttributeError:
        raise ValueError(f"module {module!r} has no function {name!r}") from None
    if not callable(function):
        raise ValueError(f"{spec} is not a function")
    return function
