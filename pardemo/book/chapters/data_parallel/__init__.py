"""Chapter *Data parallel*: what its page draws, measures, asks and claims."""
