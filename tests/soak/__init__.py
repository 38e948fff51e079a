"""Random layouts against one process, and random faults: what nobody thought of writing a test for.

    python -m tests.soak --layouts 1000 --faults 200 --seed 1
    python -m tests.soak --only zero2 --case 17 --seed 1

A *layout* is a small model with an engine (data parallel, ZeRO, tensor parallel, pipeline, and two or three of them),
drawn with its precision, optimizer, accumulation, checkpointing, frozen and tied parameters. It is trained for a few
steps, on ranks and in one process; gradients, losses and parameters have to be the same.

A *fault* is one rank that does what it should not. It has to end, within the time limit, in an error that names what is
wrong: never in a hang, a process that stays, a World that no longer works, or a result.

Each case is drawn from the seed, its kind and its number alone, so that it can be repeated alone.

- :mod:`.case`: what is drawn; a new option is a field there, and a line in the module that reads it.
- :mod:`.models`: the small model, whole, split over tensor-parallel ranks, cut into stages.
- :mod:`.training`: the same steps in one process and on ranks, and the comparison.
- :mod:`.faults`: the faults, each a function for the ranks and what its error has to say.
- :mod:`.summary`: what is counted and printed.
"""
