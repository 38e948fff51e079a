"""When has a backward pass ended? Autograd says it for each of its tasks; a pass can be made of several."""

import weakref
from collections.abc import Callable

from pardemo import compat


class BackwardPass:
    """Calls two methods of an engine when the backward pass in which it was told :meth:`begin` has ended.

    Re-entrant checkpointing runs tasks of autograd within a task. The pass is the first one that is seen, and what
    comes while it lives belongs to it. Autograd holds the callback that waits for a task's end, and drops it when the
    task fails: as long as it lives, so does the pass.

    Args:
        send_rest: at the end, to start what was not started yet.
        finish: after **all** engines have done that, to wait for it. (Engines end in the order of their first
            gradients, which can differ from rank to rank: one that waited at once would wait for a rank that waits for
            another engine.)
    """

    def __init__(self, send_rest: Callable[[], None], finish: Callable[[], None]):
        # weak: autograd's hooks lead here, where the collector does not see the cycle
        self._send_rest, self._finish = weakref.WeakMethod(send_rest), weakref.WeakMethod(finish)
        self._callback: Callable[[], object | None] = lambda: None

    def begin(self) -> bool:
        """From a hook, within a backward pass: True where this is the first sign of it."""
        if self._callback() is not None:
            return False

        def ended() -> None:
            if (send_rest := self._send_rest()) is not None:
                send_rest()
                compat.after_backward(finished)

        def finished() -> None:
            self._callback = lambda: None
            if (finish := self._finish()) is not None:
                finish()

        self._callback = weakref.ref(ended)
        compat.after_backward(ended)
        return True


def in_backward() -> bool:
    """Whether this thread is inside a backward pass (a hook, or a checkpoint's recomputation)."""
    return compat.in_backward()
