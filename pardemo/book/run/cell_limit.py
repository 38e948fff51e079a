"""The time limit of a notebook's cells, which counts what its kernel and their ranks could do."""

import threading
from typing import Any

from pardemo.deadline import Deadline


class CellLimit:
    """Ends the kernel of a cell that takes longer than its limit (:class:`pardemo.deadline.Deadline`).

    Args:
        limit_s: of each cell. kernels: the processes of the kernels that have begun, a list that grows.

    Raises:
        TimeoutError: at the end of the block, in the place of the error that the kernel is gone.
    """

    def __init__(self, limit_s: float, kernels: list[Any]):
        self._limit_s, self._kernels = limit_s, kernels
        self._cell: tuple[int, Deadline] | None = None
        self._over = threading.Event()
        self._message = ""
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begins(self, number: int) -> None:
        """A cell begins, with this number."""
        self._cell = number, Deadline(self._limit_s, [kernel.pid for kernel in self._kernels])

    def ends(self) -> None:
        """The cell has ended."""
        self._cell = None

    def __enter__(self) -> "CellLimit":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._message:
            raise TimeoutError(self._message)

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            cell = self._cell
            if cell is None or cell[1].left_s() or self._cell is not cell:  # it has ended meanwhile
                continue
            self._message = f"cell {cell[0]} did not end within {cell[1]}"
            for kernel in self._kernels:
                kernel.kill()
            return
