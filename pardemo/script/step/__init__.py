"""Measures a script's median step: collectives, memory and time, and what formulas predict of them."""

#: Steps before those that are measured: in the first an optimizer makes its states, in the second DDP its buckets anew
#: while memory is followed, and with the third's backward pass nothing is followed any more but collectives.
WARM_UP_STEPS = 3
