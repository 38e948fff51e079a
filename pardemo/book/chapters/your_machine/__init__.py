"""Chapter *Your machine*: what its page draws, measures, asks and claims."""
