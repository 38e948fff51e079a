"""Chapter *ZeRO-R*: what its page draws, measures, asks and claims."""
