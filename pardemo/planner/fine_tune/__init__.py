"""Plans a fine-tune in every engine: a table of times and memory, a dry run of the best row, files that run it.

>>> from pardemo.planner.fine_tune.plan_table import Request, plan  # doctest: +SKIP
"""
