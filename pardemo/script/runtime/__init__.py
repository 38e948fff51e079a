"""A script's processes: the line that starts them, their environment, CPUs in GPUs' place, where they are."""
