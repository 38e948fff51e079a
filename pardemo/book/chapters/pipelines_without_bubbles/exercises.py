"""Of *Pipelines without bubbles*."""
