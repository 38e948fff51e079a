"""Layouts of a script that must train alike: each held against the first, and why they part."""
