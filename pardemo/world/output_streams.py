"""Prints the output of ranks in the notebook cell, line by line."""

import os
import sys

from pardemo.world.fork_server import readable


class LinePrinter:
    """The reading end of one rank's stdout or stderr: prints each full line behind ``[rank]``."""

    def __init__(self, fd: int, rank: int, stream: str):
        self._fd, self._rank, self._stream = fd, rank, stream
        self._rest: list[bytes] = []  # pieces of a line whose end has not come yet
        self.closed = False

    def fileno(self) -> int:
        return self._fd

    def pump(self) -> bool:
        """Reads and prints what is there; False once the other end is closed."""
        data = os.read(self._fd, 65536)
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._print(b"".join([*self._rest, line]))
            self._rest.clear()
        if rest:
            self._rest.append(rest)
        if not data:
            self.close()
        return bool(data)

    def drain(self) -> None:
        """Prints everything written so far, a last line without its end too."""
        while not self.closed and readable(self._fd):
            self.pump()
        if self._rest:
            self._print(b"".join(self._rest))
            self._rest.clear()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self._fd)

    def _print(self, line: bytes) -> None:
        text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")  # a progress bar's last state
        print(f"[{self._rank}] {text}", file=getattr(sys, self._stream), flush=True)
