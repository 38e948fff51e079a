"""What the data-parallel wrappers share: the common start, buffers, ``no_sync``, uneven inputs, a backward's end.

Of one training step on N ranks, each with its own samples [b/N, …] of the batch::

    made       parameters and buffers: rank 0's values, broadcast; shapes and what is trained: compared
    forward    buffers (batch norm's statistics): rank 0's, broadcast
    backward   gradients: divided by N as they come, all-reduced in the channel, waited for when the pass ends
    step       each rank's optimizer, the same mean, the same new values: nothing is sent
"""

import contextlib
import copy
import gc
import warnings
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.utils.weak import WeakIdKeyDictionary

from pardemo import compat
from pardemo.collectives import ring_all_reduce
from pardemo.collectives.decorators import not_compiled
from pardemo.data_parallel.backward import BackwardPass
from pardemo.data_parallel.checks import (
    has_hook_of_others,
    hook_words,
    is_taken_by_autograd_grad,
    refuse_a_graph_of_gradients,
)
from pardemo.data_parallel.copies import LocalCopy
from pardemo.data_parallel.exchange import AllReduce, Sender
from pardemo.data_parallel.replicas import Watched, broadcast_buffers, broadcast_model, compare_models, gaps
from pardemo.data_parallel.uneven_inputs import ACTIVE, BACKWARD, BUFFERS, Shadow, all_plans, last_active
from pardemo.groups import cut_within, group_of
from pardemo.meters.timeline import Timeline

#: For each parameter, the wrapper that averages its gradient.
_wrapper_of: "WeakIdKeyDictionary" = WeakIdKeyDictionary()


class Wrapper(nn.Module, Joinable):
    """The base of both: it says when a gradient is there and when a backward pass ends; they say what is sent."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        all_reduce: AllReduce,
        timeline: Timeline | None,
    ):
        super().__init__()
        Joinable.__init__(self)
        self.group = group_of(group)
        self.size = dist.get_world_size(self.group)
        self.parameters_to_sync = [p for p in module.parameters() if p.requires_grad]
        compare_models(
            module,
            self.group,
            self._engine(all_reduce),
            self._problem(module) or gaps(module) or cut_within(module, self.group),
        )
        self.module = module
        self.divide_by_initial_world_size = True
        self.share_of = self.size  # by what a gradient is divided before the sum
        self._sync, self._retired = True, False
        self.sender = Sender(self.group, "data parallel", all_reduce, timeline, self.join_device)
        self.channel = self.sender.channel
        broadcast_model(module, self.channel)
        self._watched = Watched(module)
        self._take_over()
        self._pass = BackwardPass(self._send_rest, self._finish)
        self._received = False  # a gradient in this backward pass
        self._has_warned = False  # of autograd.grad
        self._number, self._left_out = 0, 0  # of backward passes; of forwards that had none

    def __deepcopy__(self, memo: dict) -> LocalCopy:
        copied = LocalCopy(copy.deepcopy(self.module, memo), self.size)
        copied.training = self.training  # its own; the parts keep theirs
        return copied

    def __getstate__(self) -> dict:
        raise TypeError(
            f"a {type(self).__name__} holds connections to other processes and cannot be pickled: save its "
            "state_dict(), or its .module"
        )

    def forward(self, *args, **kwargs):
        if self._retired:
            raise RuntimeError("the module was wrapped again: use the newer wrapper, this one averages nothing")
        if torch.is_grad_enabled():
            self._watched.check()
        self._exchange_before_forward()
        return self._watch(self.module(*args, **kwargs))

    @not_compiled
    def _exchange_before_forward(self) -> None:
        source = self._plan_iteration()
        if self.training and self.size > 1:
            with torch.no_grad():
                broadcast_buffers(self.module, self.channel, source)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block backward passes only accumulate; the first one after it sends the sum."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """For ranks with different numbers of batches, as torch's DDP has it: ``with model.join(): …`` round the loop.

        A rank whose data has ended counts as gradient zero (what it had accumulated under ``no_sync`` is lost); after
        the block all ranks have the model of one that had data to the last.

        Args:
            divide_by_initial_world_size: False: the mean is that of the ranks that still have data.
            enable: False when the numbers are known to be equal.
            throw_on_early_termination: a RuntimeError on all ranks as soon as one has no data left.
        """
        share = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **share)

    def join_hook(self, *, divide_by_initial_world_size: bool = True, **_: object) -> Shadow:
        self.divide_by_initial_world_size = divide_by_initial_world_size
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        return self.parameters_to_sync[0].device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        return self.group

    def send_zeros(self) -> None:
        """What the others' backward pass needs of a rank that has no data left."""
        self._number += 1
        self._send_zeros()

    def _engine(self, all_reduce: AllReduce) -> str:
        """What has to be the same on all ranks: ways of sending that differ would wait for each other."""
        way = "" if all_reduce is ring_all_reduce else getattr(all_reduce, "__name__", type(all_reduce).__name__)
        return type(self).__name__ + f" by {way}" * bool(way)

    def _problem(self, module: nn.Module) -> str | None:
        """What speaks against wrapping this module, in one line."""
        if not self.parameters_to_sync:
            return "the module has no parameter that requires a gradient: nothing to run in parallel"
        if any(isinstance(part, Wrapper) for part in module.modules()):
            return "the module is a data-parallel wrapper, or has one inside: wrap the whole or its parts, not both"
        if _shared(module):
            gc.collect()  # a wrapper that was dropped may still hang in a cycle
        if name := _shared(module):
            return f"{name} is in the module of another wrapper, too: its gradient would be averaged by both"
        hooked = (name for name, p in module.named_parameters() if p.requires_grad and has_hook_of_others(p))
        if self.size > 1 and (name := next(hooked, None)) is not None:
            return hook_words(name)
        return None

    def _take_over(self) -> None:
        """Hooks on the parameters; an older wrapper of the same module gives its own up."""
        older = {_wrapper_of.get(p, lambda: None)() for p in self.parameters_to_sync} - {None}
        for wrapper in older:
            wrapper._retired = True
            wrapper._release()  # its hooks
            wrapper.channel.close()
        # Through a weak reference: the collector cannot see the cycle parameter, hook, wrapper, and a forgotten
        # wrapper would go on sending.
        ready = weakref.WeakMethod(self._gradient_is_ready)
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p: (call := ready()) and call(p))
            for p in self.parameters_to_sync
        ]
        self._release = weakref.finalize(self, _remove, hooks)
        self._release.atexit = False
        for parameter in self.parameters_to_sync:
            _wrapper_of[parameter] = weakref.ref(self)

    def _plan_iteration(self) -> int:
        """Under ``Join``: tells all ranks what this one will do. Returns the rank whose buffers count."""
        if not self._join_config.enable:
            self.share_of = self.size
            return 0
        if (work := Join.notify_join_context(self)) is not None:
            work.wait()
        plan = ACTIVE | BUFFERS * self.training | BACKWARD * (self._sync and torch.is_grad_enabled())
        plans = all_plans(self.channel, plan, self.join_device)
        active = self.size - plans.count(0)
        self.share_of = self.size if self.divide_by_initial_world_size else active
        return last_active(plans)

    def _watch(self, output: object) -> object:
        """Hooks on the output, to see the backward pass from its outermost task on, and forwards that have none.

        They keep this wrapper alive until then, should the caller have dropped it.
        """
        tensors = [t for t in compat.tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad]
        if tensors:
            self._left_out += self.training
            count = iter([self.training])  # a forward counts once, not for each output
            for tensor in tensors:
                tensor.register_hook(lambda _: self._output_is_used(next(count, 0)))
        return output

    def _output_is_used(self, forwards: int) -> None:
        self._left_out -= forwards
        if self._sync and self.size > 1:
            self._begin()

    def _begin(self) -> None:
        if self._pass.begin():
            self._received = False

    def _gradient_is_ready(self, parameter: nn.Parameter) -> None:
        """Runs when autograd has added the last contribution to ``parameter.grad`` in one of its tasks."""
        if self.size == 1:
            return
        if has_hook_of_others(parameter):  # also under no_sync: it would see what is not summed yet
            raise RuntimeError(hook_words(self._watched.name_of(parameter)))
        if not self._sync:
            return
        refuse_a_graph_of_gradients()
        if parameter.grad.layout is not torch.strided:
            raise TypeError("sparse gradients are not supported: make the embedding with sparse=False")
        self._begin()
        if not self._received:
            self._received = True
            self._number += 1
            self.sender.settle()  # of a backward pass that failed half-way: let it leave the gradients alone first
            self._on_first_gradient()
        self._on_gradient(parameter)

    def _send_rest(self) -> None:
        if self._received:
            self._on_backward_end()
        elif not self._has_warned and is_taken_by_autograd_grad(self.parameters_to_sync):
            self._has_warned = True
            warnings.warn(
                "torch.autograd.grad of a data-parallel module's parameters gives this rank's gradients, not the "
                "ranks' mean: call backward(), or average them (ring_all_reduce(gradient.div_(ranks)))",
                stacklevel=2,
            )

    def _finish(self) -> None:
        if self._received:
            self._received = False
            self.sender.wait()
            self._on_received()

    def _send(self, tensor: torch.Tensor, name: str, last: bool) -> None:
        """Starts an exchange. What is compared with the other ranks': the pass's number, and, when the pass has ended,
        how many forwards had no backward, and which parameters are frozen by now. A rank that left a backward out is a
        step ahead of the others; one that froze a parameter alone would get a mean without its own part."""
        label = f"{name}, backward {self._number}"
        if last and self._left_out:
            label += f" ({self._left_out} forwards without one)"
        if last and (frozen := [p for p in self.parameters_to_sync if not p.requires_grad]):
            label += f" ({', '.join(map(self._watched.name_of, frozen))} frozen since wrapping)"
        self.sender.send(tensor, name, label)

    def _on_first_gradient(self) -> None: ...

    def _on_gradient(self, parameter: nn.Parameter) -> None: ...

    def _on_backward_end(self) -> None: ...

    def _on_received(self) -> None: ...

    def _send_zeros(self) -> None: ...


def _remove(hooks: list) -> None:
    for hook in hooks:
        hook.remove()


def _shared(module: nn.Module) -> str | None:
    """A parameter that is in another module with a wrapper."""
    for name, parameter in module.named_parameters():
        other = _wrapper_of.get(parameter, lambda: None)()
        if other is not None and other.module is not module:
            return name
    return None
