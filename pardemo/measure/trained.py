"""What a plan at full size takes over from a script: bytes for each parameter, layers, tokens of a micro-batch."""

import json
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from pardemo.measure.held import LEAST_VOCABULARY
from pardemo.measure.places import Places
from pardemo.measure.work import layers
from pardemo.meters.inside import innermost, plain_tensors


class Trained:
    """Notes the optimizers that step, and the tokens that reach an embedding, while the block runs."""

    def __init__(self, places: Places):
        self._places = places
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._tokens: tuple[int, ...] = ()
        self._hooks: list[Any] = []

    def __enter__(self) -> "Trained":
        self._hooks = [
            register_optimizer_step_post_hook(lambda optimizer, *_: self._optimizers.add(innermost(optimizer))),
            register_module_forward_pre_hook(self._runs),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def seen(self) -> dict[str, Any]:
        """As an optimizer's step ends.

        ``elements`` that this rank's optimizers update; ``weight``, ``gradient``, ``state``: bytes for each of them on
        average, gradients None where there is none any more; ``unlike``: whether a state has another shape than its
        parameter. ``tokens``: samples and tokens of a micro-batch. ``layers``, how many of them are recomputed, and
        whether anything else is.
        ``bucket_view``: whether DDP's gradients lie in its buckets. ``deepspeed``: of its configuration what decides
        over memory.
        """
        layer_names = layers(self._places.roots, self._places.name)
        recomputed = {name for name in layer_names if name in self._places.recomputed}
        ddp = [
            part
            for root in self._places.roots
            for part in root.modules()
            if isinstance(part, torch.nn.parallel.DistributedDataParallel)
        ]
        return {
            "optimizers": sorted(type(one).__name__ for one in self._optimizers),
            **_bytes_each(self._optimizers),
            "tokens": self._tokens,
            "layers": len(layer_names),
            "layers_recomputed": len(recomputed),
            "recomputed_inside": bool(self._places.recomputed - recomputed),
            "bucket_view": bool(ddp) and all(part.gradient_as_bucket_view for part in ddp),
            "deepspeed": _deepspeed(self._places.roots),
        }

    def _runs(self, module: torch.nn.Module, inputs: Any) -> None:
        if not isinstance(module, torch.nn.Embedding) or module.num_embeddings < LEAST_VOCABULARY:
            return
        if inputs and isinstance(inputs[0], torch.Tensor) and inputs[0].dim() == 2 and torch.is_grad_enabled():
            self._tokens = tuple(inputs[0].shape)


def _bytes_each(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    elements = weight = state = with_gradient = gradient = 0
    unlike = False
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            count = _elements(parameter)
            elements += count
            weight += _nbytes(parameter)
            if parameter.grad is not None:
                with_gradient += count
                gradient += _nbytes(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and (many := _elements(value)) > 1:  # a count of steps is a number
                    unlike |= many != count
                    state += _nbytes(value)
    whole = max(elements, 1)
    return {
        "elements": elements,
        "weight": weight / whole,
        "gradient": gradient / with_gradient if with_gradient else None,
        "state": state / whole,
        "unlike": unlike,
    }


def _elements(tensor: torch.Tensor) -> int:
    return sum(part.numel() for part in plain_tensors(tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in plain_tensors(tensor))


def _deepspeed(roots: Iterable[torch.nn.Module]) -> dict[str, Any]:
    library = sys.modules.get("deepspeed")
    engines = [root for root in roots if library is not None and isinstance(root, library.DeepSpeedEngine)]
    if len(engines) != 1:
        return {}
    (engine,) = engines
    config = engine.config if isinstance(engine.config, dict) else json.loads(Path(engine.config).read_text("utf-8"))
    zero = config.get("zero_optimization", {})
    offloads = [
        name for name in ("offload_optimizer", "offload_param") if zero.get(name, {}).get("device", "none") != "none"
    ]
    return {
        "zero": {key: value for key, value in zero.items() if isinstance(value, bool | int) and key != "stage"},
        "offloads": offloads,
        "clipping": float(engine.gradient_clipping()),
        "half": bool(engine.bfloat16_enabled() or engine.fp16_enabled()),
    }
