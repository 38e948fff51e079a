"""One rank does, within a training step, what it should not.

- :mod:`.fault`: what such a fault is and how it is drawn; :mod:`.faults` gathers them from three modules.
- :mod:`.trainers`: a small net under each engine, with the moments of a step at which a fault can happen.
- :mod:`.run`: a fault on a World, and its verdict.
"""
