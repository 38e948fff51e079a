"""One rank does what it should not: a fault is a function for the ranks, and what its error has to say.

A new one is a function under ``@fault`` in one of the three modules. It gets a :class:`FaultCase` and runs on every
rank; ``case.mine`` says whether that is the rank to blame.
"""

from . import faults_of_input, faults_of_processes, faults_of_use  # noqa: F401, they note their faults
from .fault import FAULTS, FaultCase, draw_fault

__all__ = ["FAULTS", "FaultCase", "draw_fault"]
