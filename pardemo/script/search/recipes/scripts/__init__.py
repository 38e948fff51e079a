"""Trains a small model in the layouts of a library: a script for each of its engines, which ``prove`` runs."""
