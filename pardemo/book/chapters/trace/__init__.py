"""Chapter *A trace, line by line*: what its page draws, measures, asks and claims."""
