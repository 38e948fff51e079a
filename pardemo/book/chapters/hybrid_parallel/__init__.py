"""Chapter *Hybrid parallel*: what its page draws, measures, asks and claims."""
