"""Hugging Face Accelerate: configurations, launchers, and the script that all of them run."""
