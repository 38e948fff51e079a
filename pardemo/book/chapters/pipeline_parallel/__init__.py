"""Chapter *Pipeline parallelism*: what its page draws, measures, asks and claims."""
