"""Faults injected at random into the project's own work, and what is left of them: ``pardemo soak``."""
