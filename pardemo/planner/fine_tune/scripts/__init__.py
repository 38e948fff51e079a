"""Scripts that a plan writes beside its configuration."""
