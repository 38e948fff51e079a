"""Chapter *The scorecard*: what its page draws, measures, asks and claims."""
