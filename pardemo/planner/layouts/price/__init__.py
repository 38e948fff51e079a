"""What a rank's share costs: seconds on its machine, bytes of its memory."""
