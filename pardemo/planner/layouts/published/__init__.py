"""Runs that others published, beside what is predicted of them, and the constants that are fitted to them."""
