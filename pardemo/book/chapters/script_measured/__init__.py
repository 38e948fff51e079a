"""Chapter *A script, measured*: what its page draws, measures, asks and claims."""
