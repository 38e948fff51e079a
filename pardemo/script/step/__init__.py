"""What a script's median step does: collectives, memory, time, and what formulas say of them."""
