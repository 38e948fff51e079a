"""What is asked: a layout, on a machine, by a training program."""
