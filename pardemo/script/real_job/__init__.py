"""Compares a real job with its rehearsal, which ``pardemo measure --out`` has written."""
