"""Ends processes in order: a command clears up before it ends by a signal, and a child ends with its parent."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the process ``parent``, which started it, ends (on Linux).

    Where the parent has ended already, this process ends here.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def ends_in_order(command: str) -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end a command as an interrupt does: its ranks and its temporary folders go.

    The status is 128 and the signal's number, with a line that names it. What is ignored, as SIGHUP under ``nohup``,
    stays so. In another thread than the main one: nothing.
    """
    ended: list[int] = []

    def end(number: int, frame: Any) -> None:
        ended.append(number)  # says nothing here: what it interrupts may be writing to the same stream
        if len(ended) == 1:  # another one, as systemd's SIGHUP behind its SIGTERM, does not disturb the clearing up
            raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    except BaseException:
        if not ended:
            raise
        # whatever came of it: the same signal may have killed ranks, in whose place something else was raised
        with contextlib.suppress(OSError):  # the terminal may be gone
            print(f"\npardemo {command}: ended by {signal.Signals(ended[0]).name}", file=sys.stderr)
        raise SystemExit(128 + ended[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
