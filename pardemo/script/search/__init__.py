"""Searches the layouts that a script allows for those that do not train alike; shrinks and reproduces what it finds."""
