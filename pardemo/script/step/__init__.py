"""Measures a script's median step: collectives, memory and time, and what formulas predict of them."""
