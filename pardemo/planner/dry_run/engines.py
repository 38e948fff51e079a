"""Sets up the same training step under each engine, real or dry: model, PEFT, DeepSpeed or FSDP2, AdamW.

One code for both, so that what is predicted is what is run. On fake tensors and a fake process group the engine does
all that it does on real ranks, but for the numbers.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pardemo import compat, extras

with extras.needed_by(__name__):
    from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import pardemo.baichuan2  # noqa: F401, registers the model
from pardemo.finetune import lora
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.tuning import Tuning
from pardemo.project import first_line


@dataclass
class Running:
    """A model in its engine. ``states()`` are the tensors of each kind of model state that this rank keeps.

    ``make_states()`` makes the optimizer's states without a forward pass, where the engine allows it.
    """

    module: nn.Module
    backward_and_step: tuple[Callable[[torch.Tensor], None], Callable[[], None]]
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    states: Callable[[], Mapping[str, list[torch.Tensor]]]
    close: Callable[[], None] = lambda: None
    make_states: Callable[[], None] | None = None


def outline(job: RankJob) -> PreTrainedModel:
    """Makes the job's model on the meta device, in its precision: names, shapes and what is trained, without values.

    Raises:
        ValueError: Transformers has no causal LM for the configuration; LoRA's target is no module of it.
    """
    config = _without_cache(job.config)
    with torch.device("meta"), _silence():
        try:
            model = AutoModelForCausalLM.from_config(config)  # attention as Transformers chooses: fused where it can
        except ValueError as error:
            raise ValueError(f"{config.model_type}: no causal language model ({first_line(error)})") from None
    if job.tuning.lora:
        model = _with_adapter(model, job.tuning)
    # PEFT's adapters too: DeepSpeed's engine casts them, FSDP2 wants one type; fp16 has the bytes of bf16
    return model.to(torch.float32 if job.precision == "fp32" else torch.bfloat16)


def materialize(module: PreTrainedModel, device: torch.device | str) -> PreTrainedModel:
    """Gives an outline memory, in place and without values; ties the head to the embeddings again."""
    module.to_empty(device=device)
    module.tie_weights()
    return module


def start(job: RankJob, module: PreTrainedModel) -> Running:
    """Puts ``module``, which has memory, into training mode and into the job's engine."""
    module.train()
    if job.checkpointing:
        with _silence():
            module.gradient_checkpointing_enable({"use_reentrant": False})
            if job.tuning.lora:
                module.enable_input_require_grads()
    if job.stage is not None:
        return _deepspeed(job, module)
    return _fsdp2(job, module) if job.engine == "fsdp2" else _plain(job, module)


def trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def one_step(job: RankJob, running: Running, ids: torch.Tensor, labels: torch.Tensor, phase: Callable) -> None:
    """Runs one optimizer step; enters ``phase(name)`` around each of its parts."""
    backward, step = running.backward_and_step
    for _ in range(job.accumulation):
        with phase("forward"):
            loss = running.forward(ids, labels)
        with phase("backward"):
            backward(loss)
        if job.stage is not None:  # DeepSpeed counts micro-batches itself
            with phase("step"):
                step()
        del loss
    if job.stage is None:
        with phase("step"):
            step()


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers: the longest list of modules in ``module``."""
    lists: list[nn.ModuleList] = [part for part in module.modules() if isinstance(part, nn.ModuleList)]
    return [*max(lists, key=lambda layers: len(layers))]


def _loss(model: Callable[..., Any], ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids, labels=labels, use_cache=False).loss


def _plain(job: RankJob, module: nn.Module) -> Running:
    optimizer = torch.optim.AdamW(trained(module), lr=1e-4, fused=job.on_gpu or None, foreach=False)

    def step() -> None:
        if job.clipping:
            nn.utils.clip_grad_norm_(trained(module), job.clipping)
        optimizer.step()
        optimizer.zero_grad()

    from pardemo.peers.pytorch import fsdp

    def make_states() -> None:
        for parameter in trained(module):
            parameter.grad = torch.zeros_like(parameter)
        step()

    forward, states = functools.partial(_loss, module), functools.partial(fsdp.states, module, optimizer)
    return Running(module, (lambda loss: loss.backward(), step), forward, states, make_states=make_states)


def _fsdp2(job: RankJob, module: nn.Module) -> Running:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for parameter in trained(module):
        parameter.data = parameter.data.float()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    with compat.without_modes():  # a mesh of real numbers, in a dry run too
        mesh = init_device_mesh(next(module.parameters()).device.type, (job.ranks,))
    for layer in layers_of(module):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    running = _plain(job, module)
    running.make_states = None  # the layers' whole parameters are made in a forward pass
    return running


def _deepspeed(job: RankJob, module: nn.Module) -> Running:
    from pardemo.peers.deepspeed import engine as deepspeed

    engine = deepspeed.engine(module, deepspeed_settings(job))
    # stage 3 learns the order of the layers in a first step, which makes the states as well
    make_states = functools.partial(deepspeed.make_states, engine) if job.stage != 3 else None
    return Running(
        module, (engine.backward, engine.step), functools.partial(_loss, engine), lambda: deepspeed.states(engine),
        functools.partial(deepspeed.close, engine), make_states,
    )  # fmt: skip


def deepspeed_settings(job: RankJob) -> dict[str, Any]:
    """Returns DeepSpeed's configuration of the job; its buckets are DeepSpeed's own unless ``job.zero`` has others."""
    fused = {"fused": True, "foreach": False} if job.on_gpu else {"foreach": False}
    return {
        "train_micro_batch_size_per_gpu": job.batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": job.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True, **fused}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": job.stage, **job.zero},
    }


def _with_adapter(model: PreTrainedModel, tuning: Tuning) -> PreTrainedModel:
    from peft import get_peft_model

    with torch.device("meta"), _silence():
        return get_peft_model(model, lora_config(model, tuning), autocast_adapter_dtype=False)


def lora_config(model: PreTrainedModel, tuning: Tuning) -> Any:
    """Returns PEFT's configuration of LoRA.

    Raises:
        ValueError: its target is no module of the model.
    """
    return lora.config(model, tuning.target, r=tuning.rank, lora_alpha=tuning.alpha, lora_dropout=tuning.dropout)


def _without_cache(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a copy without a cache; the job's own stays as it is, since runs are looked up by it."""
    config = copy.deepcopy(config)
    config.use_cache = False
    return config


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
