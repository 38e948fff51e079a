"""Runs somebody's unchanged training script on ranks of this machine, to measure, to prove or to resume it.

Each of these imports only those above it (``tests/test_layers.py``):

- :mod:`~pardemo.script.words`, :mod:`~pardemo.script.blocks`: parts of sentences; sections of a screen and of a page.
- :mod:`~pardemo.script.hangs`: each rank's log of collectives, and why ranks wait for one another for ever.
- :mod:`~pardemo.script.runtime`: the line that starts it, its processes, CPUs in GPUs' place, its steps, collectives.
- :mod:`~pardemo.script.step`: what its median step sends, holds and waits for (``pardemo measure``).
- :mod:`~pardemo.script.record`: what its first steps compute, written down on each rank.
- :mod:`~pardemo.script.compare`: layouts of it that must train alike, held against the first (``pardemo prove``).
- :mod:`~pardemo.script.resume`: the script stopped and resumed (``pardemo prove --stop``).
- :mod:`~pardemo.script.report`: the screen and the page of a measured step, the page of a proof, drawings, annotations.
"""
