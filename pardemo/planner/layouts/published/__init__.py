"""Runs that others published, compared with what is predicted of them, and constants that are fitted to them."""
