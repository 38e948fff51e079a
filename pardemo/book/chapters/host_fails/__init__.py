"""Chapter *When a host fails*: what its page draws, measures, asks and claims."""

from pardemo import extras

extras.require(__name__, "matplotlib")
