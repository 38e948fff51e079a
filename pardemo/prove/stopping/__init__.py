"""A training script that is stopped and resumed: does it go on as if nothing had happened, and if not, what is lost?

- :mod:`~pardemo.prove.stopping.stops`: when and how it is stopped, drawn from a seed.
- :mod:`~pardemo.prove.stopping.recorder` and :mod:`~pardemo.prove.stopping.state`: on the ranks, what a step begins
  with, and the stop itself.
- :mod:`~pardemo.prove.stopping.trials`: the undisturbed run, each stop, each run that goes on.
- :mod:`~pardemo.prove.stopping.stream`, :mod:`~pardemo.prove.stopping.same_layout`,
  :mod:`~pardemo.prove.stopping.reshaped`: what of the samples, the states, the numbers is not as it would have been.
"""
