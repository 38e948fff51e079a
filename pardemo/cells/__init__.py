"""Notebook cells that are the program of each rank: ``%load_ext pardemo``, then ``%%ranks 4``.

A cell runs on ranks that stay, with variables that stay on them, as a notebook's own do; :mod:`.magic` is the
notebook's side, :mod:`.on_rank` the ranks'. Without a notebook: :func:`run_cell`.
"""

from pardemo.cells.meters import WireBytes
from pardemo.cells.run import CellResult, run_cell

__all__ = ["CellResult", "WireBytes", "run_cell"]
