"""On a rank: a script, unchanged, and what its first steps do, written down at the optimizer's step."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pardemo import compat
from pardemo.script.record import parameters
from pardemo.script.record.numbers import (
    Rounding,
    as_in_a_new_process,
    casts_noted,
    dropout_noted,
    in_double,
    unseeded_noted,
)
from pardemo.script.record.parameters import Parameters, Wanted, noting_optimizers
from pardemo.script.record.records import LossCall, Mask, RankRecord, Step, is_shape_inference
from pardemo.script.runtime import job, stand_ins
from pardemo.script.runtime.call_sites import CallSites, Enough, dtype_name, is_deepspeed, without_wrappers
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.step.collectives import Calls
from pardemo.zero import gradient_norm


class Recorder(Parameters):
    """Writes down a script's steps. What a step is, the optimizer says: the first one's after a backward pass.

    Its parameters after the step are complete when the optimizer has stepped with all that have gradients, or, where it
    steps with others (shards of its own), when the model runs the next time.
    """

    def __init__(self, sites: CallSites, rank: int, wanted: Wanted):
        super().__init__(sites, wanted)
        self._rank = rank
        self._pending = False  # an optimizer has stepped, and the parameters are still to be written down
        self._stepped: set[int] = set()
        self._summed = False  # gradients were written down when they were clipped,
        self._clipped_after = 0  # and after how many backward passes
        self._optimizer = ""
        self._engines: set[type] = set()
        self._rounding = Rounding() if wanted.rounded else None
        self._in_engine = False

    @property
    def complete(self) -> bool:
        """Whether all steps that were wanted are over."""
        return len(self.steps) > self._wanted.steps

    def __enter__(self) -> Self:
        super().__enter__()
        self.following.enter_context(casts_noted(self.computed_in, self._rounding is not None))
        if self._rounding:
            self.following.enter_context(self._rounding)
        module, optimizer, autocast = torch.nn.Module, torch.optim.Optimizer, torch.amp.autocast_mode.autocast
        enter = autocast.__enter__

        def begin(context: Any) -> Any:
            made = enter(context)
            if torch.is_autocast_enabled("cpu"):
                self.computed_in.add(dtype_name(torch.get_autocast_dtype("cpu")))
            return made

        for owner, name, function in (
            (module, "__call__", self._called(module.__call__)),
            (autocast, "__enter__", begin),
            (optimizer, "__init__", noting_optimizers(optimizer.__init__, self._all_optimizers)),
            (optimizer, "zero_grad", self._clears(optimizer.zero_grad)),
            (module, "zero_grad", self._clears(module.zero_grad)),
        ):
            self.following.enter_context(compat.replaced(owner, name, function))
        return self

    # --- what others note

    def mask(self, mask: Mask) -> None:
        self.now.masks.append(mask)

    def loss_call(self, targets: int, ignored: int) -> None:
        """A loss function was called with so many targets, of which it ignores some."""
        if not is_shape_inference():
            self.now.loss_calls.append(LossCall(targets, ignored, max(len(self.now.micro_batches) - 1, 0)))

    def printed(self, value: float) -> None:
        self.steps[-2 if len(self.steps) > 1 and not self.now.micro_batches else -1].printed.append(value)

    def clipped(self, norm: Any) -> None:
        """Gradients were clipped by this norm."""
        self.now.clips.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def scaled(self, scale: float, step: Callable[[], Any]) -> Any:
        """Has a GradScaler step. If it skips the step, as gradients are not finite, what was recorded begins anew."""
        self.now.scales.append(scale)
        before = len(self.steps), self._pending
        made = step()
        if before == (len(self.steps), False) and not self._pending and not self._in_engine:
            self._tensors.clear()
            self._numbers.clear()
            self._summed, self._clipped_after, self._accumulated_after = False, 0, 0
            self.steps[-1] = Step(scales=self.now.scales, skipped=self.now.skipped + 1)
        return made

    def before_clipping(self) -> None:
        """Gradients as they are summed, before a function clips them; the last time in a step counts."""
        if self.now.backwards > self._clipped_after:
            self.now.pieces.clear()
            self._note_parameters("before")
            self._summed, self._clipped_after = True, self.now.backwards

    def _on_model(self, module: torch.nn.Module) -> None:
        if self._pending:
            self._finish()
        self._meet(module)
        if self.now.micro_batches and self.now.backwards and not self._wanted.sketched:
            self._note_accumulated()

    def _meet(self, module: torch.nn.Module) -> None:
        """DeepSpeed's engine, and ZeRO's of ours, sum and step in methods of their own."""
        engine: Any = type(module)
        self._kept[id(module)] = module
        if parameters.is_pardemo_engine(module) and engine not in self._engines:
            self._engines.add(engine)
            self.following.enter_context(parameters.around_engine_steps(engine, self._before_zero, self._after_zero))
        if is_deepspeed(module) and engine not in self._engines:
            self._engines.add(engine)
            step, recorder = engine.step, self

            def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
                boundary = self.is_gradient_accumulation_boundary()
                rates = [float(rate) for rate in self.get_lr()]  # its step also steps the scheduler
                if boundary:
                    recorder._note_parameters("before")
                    recorder._summed = True
                recorder._in_engine = True
                try:
                    made = step(self, *args, **kwargs)
                finally:
                    recorder._in_engine = False
                if boundary:
                    recorder._engine_stepped(self, rates)
                return made

            self.following.enter_context(compat.replaced(engine, "step", recorded))

    def _engine_stepped(self, engine: Any, rates: list[float]) -> None:
        norm = engine.get_global_grad_norm()
        if norm is not None and engine.gradient_clipping():
            self.clipped(norm)
        self.now.learning_rates = rates
        self._finish()

    def _before_zero(self) -> None:
        if self.now.backwards and not self._pending:
            self.now.learning_rates = []
            if not self._summed:
                self._note_parameters("before")
                self._summed = True
            self._note_buffers()
        self._in_engine = True

    def _after_zero(self, rates: list[float], clips: list[float]) -> None:
        self._in_engine = False
        if self.now.backwards:
            self._pending = True  # another engine of this rank may step, too
            self.now.learning_rates += rates
            self.now.clips += clips

    # --- losses

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if compat.graph_task() == -1:  # what is computed again has one within another
            self.now.backwards += 1
            if kwargs.get("accumulate_grad"):  # zero-bubble pipelines ask for gradients of weights by autograd.grad
                self._note_loss(args[0] if args else kwargs["tensors"])
        return run(*args, **kwargs)

    def _note_loss(self, tensors: Any) -> None:
        some = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # a pipeline's backward pass in parts begins at edges of the graph
        if len(some) == 1 and isinstance(some[0], torch.Tensor) and some[0].numel() == 1:
            value = some[0].full_tensor() if hasattr(some[0], "full_tensor") else some[0]
            self.now.losses.append(float(value.detach()))

    # --- steps

    def _clears(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if self.now.backwards and not self._pending and not self._in_engine and not self._summed:
                stepped = isinstance(owner, torch.optim.Optimizer)
                some = [p for group in owner.param_groups for p in group["params"]] if stepped else owner.parameters()
                own, line = {id(p) for p in some if p.grad is not None}, self._sites.here().line
                for root in self._models() if own else ():
                    known = parameters.names_of(root)
                    self.now.cleared |= {known[key][1][0]: line for key in own & known.keys()}
            return clear(owner, *args, **kwargs)

        return zero_grad

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or self._in_engine:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begins_step(optimizer)
            return None
        if len(args) > 1:
            return (args[0], self._evaluated(optimizer, closure), *args[2:]), kwargs
        return args, {**kwargs, "closure": self._evaluated(optimizer, closure)}

    def _evaluated(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure that an optimizer calls for its gradients, as Lightning's: behind its first call the step begins.

        What it computes when it is called again, for a line search, belongs to the step that has begun.
        """
        called = [False]

        def evaluate() -> Any:
            made = closure()
            if not called[0]:
                called[0] = True
                self._begins_step(optimizer)
            return made

        return evaluate

    def _begins_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.now.backwards == 0:
            return
        self._optimizer = self._optimizer or type(optimizer).__name__
        if not self._pending:
            self.now.learning_rates = []
            if self._summed:
                self._note_applied()
            else:
                self._note_parameters("before")
            self._note_buffers()
        self.now.learning_rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if self._rounding:
            self._rounding.gradients(optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread or self._in_engine or self.now.backwards == 0:
            return
        self._pending = True
        self._stepped |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        own = {id(p) for root in self._models() for p in root.parameters() if p.requires_grad and p.grad is not None}
        own |= {id(p) for _, p in self._in_no_module() if p.grad is not None}
        if own and own <= self._stepped:
            self._finish()

    def _finish(self) -> None:
        """The step is over: parameters are what the next one begins with."""
        self._note_parameters("after")
        self._remember_after()
        self._pending, self._summed, self._clipped_after, self._accumulated_after = False, False, 0, 0
        self._stepped.clear()
        self._numbers.clear()
        self._write()
        self.steps.append(Step())
        if self.complete:
            raise Enough

    def end(self) -> None:
        """The script has ended by itself."""
        with contextlib.suppress(Enough):
            if self._pending:
                self._finish()
        if not self.complete and not self.now.file:
            self._tensors.clear()

    def _write(self) -> None:
        step = self.now
        step.file = os.path.join(self._wanted.folder, f"step{len(self.steps)}.rank{self._rank}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in self._tensors.items()}, step.file)
        self._tensors = {}

    def record(self, ended: str, notes: list[str], unseeded: list[str]) -> RankRecord:
        """All that was recorded, but tensors, which are in the steps' files."""
        roots = self._models()
        dtypes = sorted({dtype_name(p.dtype) for root in roots for p in root.parameters()})
        norms = [
            without_wrappers(name)
            for root in roots
            for name, part in root.named_modules()
            if isinstance(part, compat.NormBase)
        ]
        steps = self.steps[: self._wanted.steps] if self.complete else self.steps[:-1]
        return RankRecord(
            self._rank, ended, steps, notes, unseeded, dtypes, self._optimizer, norms,
            computed_in=sorted(self.computed_in),
        )  # fmt: skip


#: A loss in what a script prints: its name, at most a few other characters, a number.
_LOSS = re.compile(r"\bloss\b[\"']?\s*[:=]?\s*([-+]?\d+\.?\d*(?:[eE][-+]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Recording:
    """A script to run: what a launcher would start, its path made absolute, or a function in its place.

    ``follow``: makes what records it, of call sites, rank and what is wanted; a :class:`Recorder` where it is None.
    """

    launch: Launch
    folder: str
    wanted: Wanted
    double: bool = False
    function: Callable[[], Any] | None = None
    follow: Callable[[CallSites, int, Wanted], Recorder] | None = None


def record_script(asked: Recording) -> RankRecord:
    """Runs the script on this rank until its steps are recorded."""

    def follow(rank: int, port: int, notes: list[str]) -> RankRecord:
        as_in_a_new_process()
        sites = CallSites(job.own_folder(asked.launch) if asked.function is None else os.getcwd())
        recorder = (asked.follow or Recorder)(sites, rank, asked.wanted)
        unseeded: list[str] = []
        calls = Calls(sites, lambda: len(recorder.steps) - 1, os.path.join(asked.wanted.folder, f"rank{rank}"))
        with contextlib.ExitStack() as stack:
            for one in (sites, recorder, calls, unseeded_noted(sites, unseeded), _losses_printed(recorder)):
                stack.enter_context(one)
            stack.enter_context(dropout_noted(sites, recorder.mask, notes))
            stack.enter_context(_clipping_noted(recorder))
            stack.enter_context(_loss_calls_noted(recorder))
            stack.enter_context(_scaling_noted(recorder))
            if asked.double:
                stack.enter_context(in_double(notes))
            ended = calls.to_the_end(lambda: _run_script(asked, recorder))
        made = recorder.record(ended, notes, unseeded)
        # links of our own are none of torch's collectives: a script that imports us may have them
        made.alone = asked.function is None and not calls.list and not _imports_us(asked.launch)
        if dist.is_initialized():
            dist.destroy_process_group()  # a rank that waits for this one hears that it has gone
        return made

    return job.in_job(asked.launch, asked.folder, follow)


def _imports_us(launch: Launch) -> bool:
    """Whether the script names this package; of a module nobody knows, which may."""
    if launch.module:
        return True
    with open(launch.script, encoding="utf-8", errors="replace") as file:
        return "pardemo" in file.read()


def _run_script(asked: Recording, recorder: Recorder) -> str:
    """The script to its end, or to the end of the steps that are recorded: how it ended."""
    try:
        ended = "end"
        if asked.function is None:
            ended = job.as_main(asked.launch)
        else:
            asked.function()
    except Enough:
        ended = "enough"
    except (RuntimeError, ConnectionError, job.Exited):
        with contextlib.suppress(Exception):  # the groups that hold a step's parameters may be gone already
            recorder.end()
        if not recorder.complete:
            raise
        ended = "enough"  # it waited for a rank that had all its steps, too
    recorder.end()
    return ended


@contextlib.contextmanager
def _losses_printed(recorder: Recorder) -> Iterator[None]:
    """Losses that the script prints, found by their name."""
    write = sys.stdout.write

    def noted(text: str) -> int:
        for number in _LOSS.findall(text):
            recorder.printed(float(number))
        return write(text)

    with compat.replaced(sys.stdout, "write", noted):
        yield


@contextlib.contextmanager
def _clipping_noted(recorder: Recorder) -> Iterator[None]:
    """Calls of torch's functions that clip, and of ours: gradients before them, the norm that they found."""
    clip: Any = torch.nn.utils.clip_grad_norm_
    clip_by: Any = torch.nn.utils.clip_grads_with_norm_  # which clip_grad_norm_ calls, too
    inside = [False]
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    ours: Any = gradient_norm.clip_grad_norm_

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        kept = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        recorder.before_clipping()
        inside[0] = True
        try:
            norm = clip(kept, max_norm, *args, **kwargs)
        finally:
            inside[0] = False
        recorder.clipped(norm)
        return norm

    def clip_grads_with_norm_(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        if not inside[0]:
            recorder.before_clipping()
            recorder.clipped(total_norm)
        clip_by(parameters, max_norm, total_norm, *args, **kwargs)

    def noted(function: Any) -> Any:
        def clips(*args: Any, **kwargs: Any) -> Any:
            recorder.before_clipping()
            norm = function(*args, **kwargs)
            recorder.clipped(norm)
            return norm

        return clips

    clip_of_ours = noted(ours)
    with (
        stand_ins.replaced_everywhere(
            [(clip, clip_grad_norm_), (clip_by, clip_grads_with_norm_), (ours, clip_of_ours)]
        ),
        compat.replaced(Fsdp, "clip_grad_norm_", noted(Fsdp.clip_grad_norm_)),
        compat.replaced(gradient_norm, "clip_grad_norm_", clip_of_ours),  # for those who import it from now on
    ):
        yield


def _scaling_noted(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Steps of torch's GradScaler, and of those that are made of it: the scale, and which steps it skips."""
    scaler = torch.amp.grad_scaler.GradScaler
    real = scaler.step

    def step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled():
            return real(self, optimizer, *args, **kwargs)
        return recorder.scaled(float(self.get_scale()), lambda: real(self, optimizer, *args, **kwargs))

    return compat.replaced(scaler, "step", step)


@contextlib.contextmanager
def _loss_calls_noted(recorder: Recorder) -> Iterator[None]:
    """Calls of torch's loss functions: how many targets each has, and how many of them it ignores."""
    functional: Any = torch.nn.functional
    inside = [False]

    def noted(function: Callable) -> Callable:
        def loss(input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                return function(input, target, *args, **kwargs)
            inside[0] = True
            try:
                made = function(input, target, *args, **kwargs)
            finally:
                inside[0] = False
            if torch.is_grad_enabled() and compat.graph_task() == -1:
                ignore = kwargs.get("ignore_index", -100)
                whole = isinstance(target, torch.Tensor) and not target.is_floating_point()
                ignored = int((target == ignore).sum()) if whole else 0
                count = target.numel() if isinstance(target, torch.Tensor) else 0
                recorder.loss_call(count, ignored)
            return made

        return loss

    names = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "l1_loss")
    with stand_ins.replaced_everywhere([(f := getattr(functional, name), noted(f)) for name in names]):
        yield
