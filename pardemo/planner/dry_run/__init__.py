"""Runs a job's step at full size, of the real model in the real engine, on tensors that take no memory.

>>> from pardemo.planner.dry_run.runner import dry_run  # doctest: +SKIP
>>> from pardemo.planner.job import RankJob             # doctest: +SKIP
"""
