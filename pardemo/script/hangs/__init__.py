"""Ranks that wait for one another for ever: each rank's log of collectives, and what it says."""
