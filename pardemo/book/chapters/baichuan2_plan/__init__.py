"""Chapter *Baichuan2: the plan*: what its page draws, measures, asks and claims."""
