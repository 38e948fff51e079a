"""Chapter *What an optimizer costs*: what its page draws, measures, asks and claims."""
