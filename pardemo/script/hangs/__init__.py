"""Finds hangs: each rank logs its collectives, and the logs show who waits for whom."""
