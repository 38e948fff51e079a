"""The articles' and papers' arithmetic, and nothing else: no torch, no processes, no measurements."""
