"""One training script twice: plain, and with Accelerate. Kept as whole files, so that a reader sees the real diff."""
