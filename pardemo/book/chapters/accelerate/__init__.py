"""Chapter *Accelerate*: what its page draws, measures, asks and claims."""
