"""What a model is: its layers and their shapes, from a configuration or by name, and what of it is trained."""
