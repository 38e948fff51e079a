"""The frameworks that the chapters set beside pardemo's own code: the real ones, on the same model and data."""
