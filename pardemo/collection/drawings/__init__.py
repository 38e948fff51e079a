"""Drawings of what is cut and what travels, one function each; :mod:`..figures` draws what was measured.

>>> from pardemo.collection import drawings
>>> drawings.ring_all_reduce(4)
player of 7 steps: ring all-reduce of 4 ranks
"""

from pardemo.collection.drawings.matrices import column_cut, mlp_cut, row_cut
from pardemo.collection.drawings.player import Player
from pardemo.collection.drawings.ring import ring_all_reduce
from pardemo.collection.drawings.svg import Canvas, Drawing

__all__ = ["Canvas", "Drawing", "Player", "column_cut", "mlp_cut", "ring_all_reduce", "row_cut"]
