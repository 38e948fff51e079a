"""Chapter *Pipeline parallelism*: what its page draws, measures, asks and claims."""

from pardemo import extras

extras.require(__name__, "matplotlib")
