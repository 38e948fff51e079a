"""Faults injected into the project's own, at random, and what is left of them: ``pardemo soak``.

    pardemo soak --minutes 5 --seed 1
    pardemo soak --faults 1000 --layouts 1000 --json
    pardemo soak --only "world/killed" --case 17 --seed 1

A *scene* is one piece of work (a World that computes, a run of notebooks, a checkpoint that is written, a script that
is measured) with one fault injected into it. It has to end, within its limit, in the error that names the fault or in
the right result; afterwards no process, no temporary file, no socket, no network namespace may be left, and no work may
be lost that was whole before. Where its fault did not take place, it counts as none. A *layout* is a small model in a
drawn way to train it, which has to train as one process does.

Each scene is drawn from the seed, its kind and its number alone, so that it can be repeated alone.

- :mod:`.scene`: what a scene is, and the table of kinds; a new kind is a function under ``@scene`` in a module of
  :mod:`.scenes`.
- :mod:`.stage`: the process that scenes are forked from, each in a process of its own; it sends the signals, keeps the
  limit, and looks for what is left (:mod:`.remains`, :mod:`.sockets`).
- :mod:`.schedule`: which scenes come, in which order; :mod:`.tally`: what became of them.
- :mod:`.command`: the command line. It loads no torch: the stage does.
- :mod:`.ranks`: the faults of a rank within a training step; :mod:`.layouts`: the layouts.
"""
