"""Chapter *Overlap*: what its page draws, measures, asks and claims."""
