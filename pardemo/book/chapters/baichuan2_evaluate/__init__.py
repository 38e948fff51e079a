"""Chapter *Baichuan2: before and after*: what its page draws, measures, asks and claims."""

from pardemo import extras

extras.require(__name__, "matplotlib")
