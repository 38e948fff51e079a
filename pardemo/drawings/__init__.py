"""Drawings of what is cut and what travels, one function each; :mod:`pardemo.figures` draws what was measured.

>>> from pardemo import drawings
>>> drawings.ring_all_reduce(4)
player of 7 steps: ring all-reduce of 4 ranks
"""

from pardemo.drawings.matrices import column_cut, mlp_cut, row_cut
from pardemo.drawings.player import Player
from pardemo.drawings.ring import ring_all_reduce
from pardemo.drawings.svg import Canvas, Drawing

__all__ = ["Canvas", "Drawing", "Player", "column_cut", "mlp_cut", "ring_all_reduce", "row_cut"]
