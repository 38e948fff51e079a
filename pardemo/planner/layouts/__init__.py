"""Predicts a step's time and memory for every way to cut a model over GPUs, and searches for the best one.

>>> from pardemo.planner.layouts.job import Job  # doctest: +SKIP
>>> from pardemo.planner.layouts.layout import Layout  # doctest: +SKIP
>>> from pardemo.planner.layouts.step import predict_step  # doctest: +SKIP
"""
