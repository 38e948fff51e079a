"""What a pipeline's rank is told to do: small instructions, each about one stage and one micro-batch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Instruction:
    """One thing to do for micro-batch ``micro_batch`` in stage ``stage`` (numbered over the whole model)."""

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


class Send(Instruction):
    """Hand something to another rank."""


class Receive(Instruction):
    """Be ready to take something from another rank: computing goes on, until the computation that needs it waits."""


class SendActivation(Send):
    """The output of this stage goes to the next stage's rank."""

    text = "send a"


class ReceiveActivation(Receive):
    """This stage's input comes from the previous stage's rank."""

    text = "receive a"


class SendGradient(Send):
    """The gradient of this stage's input goes to the previous stage's rank."""

    text = "send g"


class ReceiveGradient(Receive):
    """The gradient of this stage's output comes from the next stage's rank."""

    text = "receive g"


def receive_for(compute: Compute) -> Receive:
    """The receive whose data a forward or backward needs, if that comes from another stage."""
    kind = ReceiveActivation if isinstance(compute, Forward) else ReceiveGradient
    return kind(compute.stage, compute.micro_batch)


def send_of(compute: Compute) -> Send:
    """The send of a computation's result, if another stage needs it."""
    kind = SendActivation if isinstance(compute, Forward) else SendGradient
    return kind(compute.stage, compute.micro_batch)


def receiver_of(send: Send) -> Receive:
    """The receive that a send is for."""
    if isinstance(send, SendActivation):
        return ReceiveActivation(send.stage + 1, send.micro_batch)
    return ReceiveGradient(send.stage - 1, send.micro_batch)


def sender_of(receive: Receive) -> Send:
    """The send that a receive waits for."""
    if isinstance(receive, ReceiveActivation):
        return SendActivation(receive.stage - 1, receive.micro_batch)
    return SendGradient(receive.stage + 1, receive.micro_batch)
