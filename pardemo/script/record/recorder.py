"""Runs an unchanged script on a rank, and records each of its first steps when the optimizer steps."""

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
from pardemo.compat import dtype_name
from pardemo.script.record.numbers import (
    Rounding,
    as_in_a_new_process,
    casts_noted,
    draws_noted,
    dropout_noted,
    in_double,
    unseeded_noted,
)
from pardemo.script.record.outputs import Outputs, is_shape_inference
from pardemo.script.record.parameters import Parameters, RecordSettings, noting_optimizers
from pardemo.script.record.pieces import is_engine, parameter_names
from pardemo.script.record.rank_record import (
    BACKWARD,
    CLIP,
    PRINT,
    STEP,
    CurrentStep,
    LossCall,
    RankRecord,
    ReplayReport,
    Step,
)
from pardemo.script.runtime import job, stand_ins
from pardemo.script.runtime.call_sites import CallSites, without_wrappers
from pardemo.script.runtime.collectives import Calls
from pardemo.script.runtime.hooks import Hooks, is_deepspeed
from pardemo.script.runtime.launch_lines import Launch
from pardemo.script.runtime.steps import Enough
from pardemo.zero import gradient_norm


class Recorder(Hooks):
    """Records a script's steps; a step ends with the first step of an optimizer after a backward pass.

    Its parameters after the step are complete when the optimizer has stepped with all that have gradients, or, where it
    steps with others (shards of its own), when the model runs the next time.

    Attributes:
        steps: those that are over. current: what is recorded of the one that runs. parameters: the models' recorder.
        on_model, on_gradients, on_finish: called when a model is about to run for training, when parameters before
            the step are, and when the step is over; for who follows more of it.
        replays: what was replayed in each step, with recorded inputs.
    """

    def __init__(self, sites: CallSites, rank: int, settings: RecordSettings):
        super().__init__()
        self.sites, self.rank = sites, rank
        self.steps: list[Step] = []
        self.current = CurrentStep()
        self.parameters = Parameters(sites, self.current, settings)
        self.on_model: Callable[[], None] = lambda: None
        self.on_gradients: Callable[[], None] = lambda: None
        self.on_finish: Callable[[], None] = lambda: None
        self.replays: list[ReplayReport] = []
        self._settings = settings
        self._outputs = Outputs(sites, self.current, self._model_begins)
        self._rounding = Rounding() if settings.rounded else None
        self._thread = threading.get_ident()
        self._optimizers: dict[str, None] = {}  # names of their classes, and of those that these are made of
        self._engines: set[type] = set()
        self._in_engine = False

    @property
    def complete(self) -> bool:
        """Whether all steps that are to be recorded are over."""
        return len(self.steps) >= self._settings.steps

    def __enter__(self) -> Self:
        module, optimizer, autocast = torch.nn.Module, torch.optim.Optimizer, torch.amp.autocast_mode.autocast
        self.following.enter_context(self._outputs)
        super().__enter__()
        self.following.enter_context(casts_noted(self._outputs.computed_in, self._rounding is not None))
        if self._rounding:
            self.following.enter_context(self._rounding)
        enter = autocast.__enter__

        def begin(context: Any) -> Any:
            made = enter(context)
            if torch.is_autocast_enabled("cpu"):
                self._outputs.computed_in.add(dtype_name(torch.get_autocast_dtype("cpu")))
            return made

        changed: list[tuple[Any, str, Any]] = [(autocast, "__enter__", begin)]
        changed += [(owner, "zero_grad", self._clears(owner.zero_grad)) for owner in (optimizer, module)]
        for name in ("__init__", "__setstate__"):  # made, or read from a file as it was
            changed.append((optimizer, name, noting_optimizers(getattr(optimizer, name), self.parameters.optimizers)))
        for owner, name, function in changed:
            self.following.enter_context(compat.replaced(owner, name, function))
        return self

    # --- what others note

    def loss_call(self, targets: int, ignored: int) -> None:
        """Notes a loss function's call: how many targets it has, and how many of them it ignores."""
        if not is_shape_inference():
            step = self.current.step
            step.loss_calls.append(LossCall(targets, ignored, max(len(step.micro_batches) - 1, 0)))

    def printed(self, value: float) -> None:
        """Notes a loss that the script has printed: of the step that is over, if the next one has not begun."""
        step = self.current.step
        step = self.steps[-1] if self.steps and not step.micro_batches else step
        step.printed.append(value)
        step.lines.setdefault(PRINT, self.sites.file_and_line())

    def clipped(self, norm: Any) -> None:
        """Notes the norm by which gradients were clipped."""
        self.current.note_line(CLIP, self.sites.file_and_line)
        self.current.step.clips.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def scaled(self, scale: float, step: Callable[[], Any]) -> Any:
        """Has a GradScaler step. If it skips the step, as gradients are not finite, what was recorded begins anew."""
        current, over, pending = self.current, len(self.steps), self.current.pending
        current.step.scales.append(scale)
        made = step()
        if over == len(self.steps) and not (pending or current.pending or self._in_engine):
            current.begin(Step(scales=current.step.scales, skipped=current.step.skipped + 1))
        return made

    def before_clipping(self) -> None:
        """Records summed gradients before a function clips them; the last time in a step counts."""
        current = self.current
        if current.step.backwards > current.clipped_after:
            current.step.pieces.clear()
            self._note_before()
            current.summed, current.clipped_after = True, current.step.backwards

    def _note_before(self) -> None:
        self.on_gradients()
        self.parameters.note("before")

    # --- models and engines

    def _model_begins(self, module: torch.nn.Module) -> None:
        if self.current.pending:
            self._finish()
        self.on_model()
        self.parameters.met[id(module)] = module
        self.parameters.multiply(len(self.steps))
        if is_engine(module) and type(module) not in self._engines:
            self._follow_engine(type(module), self._deepspeed_step if is_deepspeed(module) else self._zero_step)
        step = self.current.step
        if step.micro_batches and step.backwards and not self._settings.sketched:
            self.parameters.note_accumulated()

    def _module_ends(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        step = self.current.step
        trains = step.micro_batches and not step.backwards and torch.is_grad_enabled()
        if trains and self._outputs.depth == 1 and threading.get_ident() == self._thread:
            self.parameters.note_used(module)

    def _follow_engine(self, engine: Any, around: Callable[[Any, Callable[[], Any]], Any]) -> None:
        """Has ``around`` take the steps of an engine, which sums and steps in a method of its own."""
        self._engines.add(engine)
        real = engine.step

        def step(owner: Any, *args: Any, **kwargs: Any) -> Any:
            def run() -> Any:
                self._in_engine = True
                try:
                    return real(owner, *args, **kwargs)
                finally:
                    self._in_engine = False

            return around(owner, run)

        self.following.enter_context(compat.replaced(engine, "step", step))

    def _deepspeed_step(self, engine: Any, run: Callable[[], Any]) -> Any:
        self.current.note_line(STEP, self.sites.file_and_line)
        boundary = engine.is_gradient_accumulation_boundary()
        rates = [float(rate) for rate in engine.get_lr()]  # its step also steps the scheduler
        if boundary:
            self._note_before()
            self.current.summed = True
        made = run()
        if boundary:
            norm = engine.get_global_grad_norm()
            if norm is not None and engine.gradient_clipping():
                self.clipped(norm)
            self.current.step.learning_rates = rates
            self._finish()
        return made

    def _zero_step(self, engine: Any, run: Callable[[], Any]) -> Any:
        current = self.current
        current.note_line(STEP, self.sites.file_and_line)
        if current.step.backwards and not current.pending:
            current.step.learning_rates = []
            if not current.summed:
                self._note_before()
                current.summed = True
            self.parameters.note_buffers()
        norm = run()
        if current.step.backwards:
            current.pending = True  # another engine of this rank may step, too
            current.step.learning_rates += [float(group["lr"]) for group in engine.optimizer.param_groups]
            if norm is not None:
                self.clipped(norm)
        return norm

    # --- losses

    def _backward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if compat.graph_task() == -1:  # what is computed again has one within another
            self.current.step.backwards += 1
            self.current.note_line(BACKWARD, self.sites.file_and_line)
            if kwargs.get("accumulate_grad"):  # zero-bubble pipelines ask for gradients of weights by autograd.grad
                self._note_loss(args[0] if args else kwargs["tensors"])
        return run(*args, **kwargs)

    def _note_loss(self, tensors: Any) -> None:
        losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # a pipeline's backward pass in parts begins at edges of the graph
        if len(losses) == 1 and isinstance(losses[0], torch.Tensor) and losses[0].numel() == 1:
            value = losses[0].full_tensor() if hasattr(losses[0], "full_tensor") else losses[0]
            self.current.step.losses.append(float(value.detach()))

    # --- steps

    def _clears(self, clear: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            current = self.current
            if current.step.backwards and not (current.pending or current.summed or self._in_engine):
                stepped = isinstance(owner, torch.optim.Optimizer)
                held = [p for group in owner.param_groups for p in group["params"]] if stepped else owner.parameters()
                cleared, line = {id(p) for p in held if p.grad is not None}, self.sites.here().line
                for root in self.parameters.models() if cleared else ():
                    known = parameter_names(root)
                    current.step.cleared |= {known[key][1][0]: line for key in cleared & known.keys()}
            return clear(owner, *args, **kwargs)

        return zero_grad

    def _step_begins(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread or self._in_engine:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._begins_step(optimizer)
            return None
        evaluated = self._evaluated(optimizer, closure)
        if len(args) > 1:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

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
        current = self.current
        if current.step.backwards == 0:
            return
        self._optimizers |= dict.fromkeys(kind.__name__ for kind in type(optimizer).__mro__[:-2])
        current.note_line(STEP, self.sites.file_and_line)
        if not current.pending:
            current.step.learning_rates = []
            if current.summed:
                self.parameters.note_applied()
            else:
                self._note_before()
            self.parameters.note_buffers()
        current.step.learning_rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        if self._rounding:
            self._rounding.gradients(optimizer)

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        current = self.current
        if threading.get_ident() != self._thread or self._in_engine or current.step.backwards == 0:
            return
        current.pending = True
        current.stepped |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        trained = [p for root in self.parameters.models() for p in root.parameters() if p.requires_grad]
        trained += [p for _, p in self.parameters.in_no_module()]
        # a rank may have none: under FSDP its shard of the parameters may be of frozen ones alone
        awaited = {id(p) for p in trained if p.grad is not None} or {id(p) for p in trained}
        if awaited <= current.stepped:
            self._finish()

    def _finish(self) -> None:
        """The step is over: parameters are what the next one begins with."""
        self.on_finish()
        self.parameters.note("after")
        self.parameters.remember_after()
        step = self.current.step
        step.file = os.path.join(self._settings.folder, f"step{len(self.steps) + 1}.rank{self.rank}.safetensors")
        save_file({name: tensor.contiguous() for name, tensor in self.current.tensors.items()}, step.file)
        self.steps.append(step)
        self.current.begin(Step())
        if self.complete:
            raise Enough

    def end(self) -> None:
        """Ends the record of a script that has ended by itself."""
        with contextlib.suppress(Enough):
            if self.current.pending:
                self._finish()

    def record(self, ended: str, notes: list[str], unseeded: list[str]) -> RankRecord:
        """Returns all that was recorded but tensors, which are in the steps' files."""
        roots = self.parameters.models()
        dtypes = sorted({dtype_name(p.dtype) for root in roots for p in root.parameters()})
        norms = [
            without_wrappers(name)
            for root in roots
            for name, part in root.named_modules()
            if isinstance(part, compat.NormBase)
        ]
        steps = self.steps[: self._settings.steps]
        return RankRecord(
            self.rank, ended, steps, notes, unseeded, dtypes, " ".join(self._optimizers), norms,
            computed_in=sorted(self._outputs.computed_in), replays=self.replays,
        )  # fmt: skip


#: A loss in what a script prints: its name, at most a few other characters, a number.
_LOSS = re.compile(r"\bloss\b[\"']?\s*[:=]?\s*([-+]?\d+\.?\d*(?:[eE][-+]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class RecordedScript:
    """A script to run: what a launcher would start, its path made absolute, or a function in its place.

    ``follow``: makes what follows more of it, of the :class:`Recorder`: a context manager.
    """

    launch: Launch
    folder: str
    settings: RecordSettings
    double: bool = False
    function: Callable[[], Any] | None = None
    follow: Callable[[Recorder], contextlib.AbstractContextManager[Any]] | None = None


def record_script(script: RecordedScript) -> RankRecord:
    """Runs the script on this rank until its steps are recorded."""

    def follow(rank: int, port: int, notes: list[str]) -> RankRecord:
        as_in_a_new_process()
        sites = CallSites()
        recorder = Recorder(sites, rank, script.settings)
        unseeded: list[str] = []
        calls = Calls(sites, lambda: len(recorder.steps), os.path.join(script.settings.folder, f"rank{rank}"))
        followers: tuple[contextlib.AbstractContextManager[Any], ...] = (
            sites, recorder, calls, unseeded_noted(sites, unseeded), _losses_printed(recorder),
            draws_noted(sites, lambda: recorder.current.step.draws if recorder.steps else None),  # weights in the first
            dropout_noted(sites, lambda mask: recorder.current.step.masks.append(mask), notes),
            _clipping_noted(recorder), _loss_calls_noted(recorder), _scaling_noted(recorder),
        )  # fmt: skip
        with contextlib.ExitStack() as stack:
            for follower in followers:
                stack.enter_context(follower)
            if script.follow is not None:
                stack.enter_context(script.follow(recorder))
            if script.double:
                stack.enter_context(in_double(notes))
            ended = calls.to_the_end(lambda: _run_script(script, recorder))
        made = recorder.record(ended, notes, unseeded)
        # links of our own are none of torch's collectives: a script that imports us may have them
        made.alone = script.function is None and not calls.list and not _imports_us(script.launch)
        if dist.is_initialized():
            dist.destroy_process_group()  # a rank that waits for this one hears that it has gone
        return made

    return job.in_job(script.launch, script.folder, follow)


def _imports_us(launch: Launch) -> bool:
    """Whether the script names this package; of a module nobody knows, which may."""
    if launch.module:
        return True
    with open(launch.script, encoding="utf-8", errors="replace") as file:
        return "pardemo" in file.read()


def _run_script(script: RecordedScript, recorder: Recorder) -> str:
    """The script to its end, or to the end of the steps that are recorded: how it ended."""
    try:
        ended = "end"
        if script.function is None:
            ended = job.as_main(script.launch)
        else:
            script.function()
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
    from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp

    def clips(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        recorder.before_clipping()
        norm = function(*args, **kwargs)
        if norm is None:  # clip_grads_with_norm_ is given it
            recorder.clipped(args[2] if len(args) > 2 else kwargs["total_norm"])
        else:
            recorder.clipped(norm)
        return norm

    utils, ours = torch.nn.utils, gradient_norm.clip_grad_norm_
    functions = (Fsdp.clip_grad_norm_, ours, utils.clip_grad_norm_, utils.clip_grads_with_norm_)
    of_fsdp, of_ours, *of_torch = stand_ins.outermost_calls(functions, clips)
    with (
        stand_ins.replaced_everywhere([of_ours, *of_torch]),
        compat.replaced(Fsdp, "clip_grad_norm_", of_fsdp[1]),
        compat.replaced(gradient_norm, "clip_grad_norm_", of_ours[1]),  # for those who import it from now on
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


def _loss_calls_noted(recorder: Recorder) -> contextlib.AbstractContextManager[None]:
    """Calls of torch's loss functions: how many targets each has, and how many of them it ignores."""

    def noted(function: Callable[..., Any], input: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        made = function(input, target, *args, **kwargs)
        if torch.is_grad_enabled() and compat.graph_task() == -1:
            is_tensor = isinstance(target, torch.Tensor)
            classes = is_tensor and not target.is_floating_point()
            ignored = int((target == kwargs.get("ignore_index", -100)).sum()) if classes else 0
            recorder.loss_call(target.numel() if is_tensor else 0, ignored)
        return made

    names = ("cross_entropy", "nll_loss", "mse_loss", "binary_cross_entropy_with_logits", "l1_loss")
    functions = [getattr(torch.nn.functional, name) for name in names]
    return stand_ins.replaced_everywhere(stand_ins.outermost_calls(functions, noted))
