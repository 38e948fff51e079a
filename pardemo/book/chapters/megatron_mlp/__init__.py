"""Chapter *Megatron's MLP*: what its page draws, measures, asks and claims."""
