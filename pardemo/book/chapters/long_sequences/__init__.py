"""Chapter *Long sequences*: what its page draws, measures, asks and claims."""
