"""Chapter *Sequence parallelism*: what its page draws, measures, asks and claims."""
