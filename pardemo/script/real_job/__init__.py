"""Holds a real job against its rehearsal, which ``pardemo measure --out`` has written."""
