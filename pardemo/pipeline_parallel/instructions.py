"""Instructions for a pipeline's rank, each about one stage and one micro-batch."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Instruction:
    """One thing to do for micro-batch ``micro_batch`` in stage ``stage`` (numbered over the whole model)."""

    text: ClassVar[str]
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.text} {self.stage}.{self.micro_batch}"


class Compute(Instruction):
    """A forward, a backward, or a part of a backward."""


class Forward(Compute):
    """Compute the stage's output from its input."""

    text = "F"


class Backward(Compute):
    """Compute the gradients of the stage's parameters and of its input."""

    text = "B"


class BackwardInput(Compute):
    """Compute the gradient of the stage's input alone, which the stage before waits for.

    The zero-bubble paper's B; I, as in torch's traces, since B is the whole backward here.
    """

    text = "I"


class BackwardWeight(Compute):
    """Compute the gradients of the stage's parameters, which nobody waits for: any time after its input's."""

    text = "W"


class SendActivation(Instruction):
    """The output of this stage goes to the next stage's rank."""

    text = "send a"


class ReceiveActivation(Instruction):
    """This stage's input comes from the previous stage's rank; computing goes on until it is needed."""

    text = "receive a"


class SendGradient(Instruction):
    """The gradient of this stage's input goes to the previous stage's rank."""

    text = "send g"


class ReceiveGradient(Instruction):
    """The gradient of this stage's output comes from the next stage's rank; computing goes on until it is needed."""

    text = "receive g"
