"""Records on a rank what a script does while a layout is proven, and changes nothing of it."""
