"""Compares layouts of a script, which must train alike, with the first of them, and explains differences."""
