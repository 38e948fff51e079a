"""Models that are small enough for a laptop's ranks: a GPT with seeded weights, and a classifier that learns fast."""
