"""Chapter *The vocabulary*: what its page draws, measures, asks and claims."""
