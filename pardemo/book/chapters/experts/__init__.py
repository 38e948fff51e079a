"""Chapter *Experts*: what its page draws, measures, asks and claims."""
