"""Runs a script's processes: its launch line, its environment, CPUs in place of GPUs, its call sites."""
