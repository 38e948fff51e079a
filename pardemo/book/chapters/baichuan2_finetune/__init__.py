"""Chapter *Baichuan2: the fine-tune*: what its page draws, measures, asks and claims."""
