"""Chapter *ZeRO's memory*: what its page draws, measures, asks and claims."""
