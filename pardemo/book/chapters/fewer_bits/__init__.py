"""Chapter *Fewer bits*: what its page draws, measures, asks and claims."""
