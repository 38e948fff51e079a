"""Which layout: all that divide, how far a time may be off, a rule by hand."""
