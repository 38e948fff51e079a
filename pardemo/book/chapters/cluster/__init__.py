"""Chapter *The cluster*: what its page draws, measures, asks and claims."""
