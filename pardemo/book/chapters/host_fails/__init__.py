"""Chapter *When a host fails*: what its page draws, measures, asks and claims."""
