"""Random layouts against one process: a small model with an engine, drawn with its precision, optimizer and more.

- :mod:`.case`: what is drawn; a new option is a field there, and a line in the module that reads it.
- :mod:`.models`: the small model, whole, split over tensor-parallel ranks, cut into stages.
- :mod:`.training`: the same steps in one process and on ranks; :mod:`.comparison`: how far apart the two may be.
- :mod:`.techniques`: cut sequences, experts, Muon and low precision in random configurations.
- :mod:`.run`: a case on a World, and its verdict.
"""
