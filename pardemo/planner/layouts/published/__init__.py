"""Reads runs that others published, and compares them with what the planner predicts of them."""
