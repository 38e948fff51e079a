"""All faults of a rank, and how one is drawn.

A new one is a function under ``@fault`` in one of the three modules. It gets a :class:`FaultCase` and runs on every
rank; ``case.mine`` says whether that is the rank to blame.
"""

from random import Random

from pardemo.soak.ranks import faults_of_input, faults_of_processes, faults_of_use
from pardemo.soak.ranks.fault import Fault, FaultCase, faults_of

FAULTS: dict[str, Fault] = {
    kind: each
    for module in (faults_of_input, faults_of_processes, faults_of_use)
    for kind, each in faults_of(module).items()
}


def draw_fault(kind: str, number: int, seed: int, folder: str = "") -> FaultCase:
    """Case ``number`` of a kind: ways and engines in turn, so that few cases see all of them; the rest by chance."""
    chance, fault = Random(f"{seed} {kind} {number}"), FAULTS[kind]
    pairs = [(how, trainer) for how in fault.ways for trainer in fault.trainers]
    Random(f"{seed} {kind}").shuffle(pairs)
    how, trainer = pairs[number % len(pairs)]
    ranks = chance.choice((2, 2, 3, 4)) if trainer != "tp" else chance.choice((2, 4))
    return FaultCase(kind, number, seed, how, trainer, ranks, chance.randrange(ranks), chance.randrange(3), folder)
