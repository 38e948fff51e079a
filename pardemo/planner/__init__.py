"""Plans a training job before its GPUs are rented: memory, time, money, files.

>>> from pardemo.planner.dry_run.runner import dry_run  # doctest: +SKIP
>>> from pardemo.planner.job import RankJob  # doctest: +SKIP
>>> from pardemo.planner.fine_tune.plan_table import Request, plan  # doctest: +SKIP
"""
