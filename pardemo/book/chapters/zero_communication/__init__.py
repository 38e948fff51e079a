"""Chapter *ZeRO's traffic*: what its page draws, measures, asks and claims."""
