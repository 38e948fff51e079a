"""A command that is told to end, by a scheduler or a closed terminal, clears up before it does."""

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any


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
