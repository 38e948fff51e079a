"""Chapter *Attention, and the whole block*: what its page draws, measures, asks and claims."""
