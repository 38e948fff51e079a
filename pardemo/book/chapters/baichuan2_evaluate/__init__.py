"""Chapter *Baichuan2: before and after*: what its page draws, measures, asks and claims."""
