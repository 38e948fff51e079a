"""What runs on a rank while a layout is proven: it records what the script does, and changes nothing of it."""
