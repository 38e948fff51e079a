"""Chapter *When a host fails*: what its page draws, measures, asks and claims."""

from pardemo.book.page import door

__getattr__, __dir__ = door(__name__)
