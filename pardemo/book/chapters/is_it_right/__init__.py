"""Chapter *Is it right?*: what its page draws, measures, asks and claims."""
