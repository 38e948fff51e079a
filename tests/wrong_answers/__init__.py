"""Wrong answers to the chapters' exercises, as people give them, each with a part of the message that helps."""

from wrong_answers import communication, layers, memory

#: Of exercises, answers that are wrong, and what is said to each.
WRONG = communication.WRONG | layers.WRONG | memory.WRONG
