"""Plan a training job before renting its GPUs: memory by a dry run of the real thing, time, money, files."""
