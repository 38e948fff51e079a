"""Records what of a script a plan at full size needs: what is trained, and what its memory depends on."""

import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from pardemo.meters.tensors import local_tensors, unwrap_optimizer
from pardemo.script.runtime.call_sites import CallSites
from pardemo.script.runtime.hooks import Hooks, is_deepspeed
from pardemo.script.step.operations import equal_layers
from pardemo.script.step.script_memory import LEAST_VOCABULARY


class Trained(Hooks):
    """Notes the optimizers that step, and the tokens that reach an embedding, while the block runs."""

    def __init__(self, sites: CallSites):
        super().__init__()
        self._sites = sites
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._tokens: tuple[int, ...] = ()

    def seen(self) -> dict[str, Any]:
        """Returns what is trained, and what a step's memory depends on.

        ``elements`` that this rank's optimizers update; ``weight``, ``gradient``, ``state``: bytes for each of them on
        average, gradients None where there is none any more; ``unlike``: whether a state has another shape than its
        parameter. ``tokens``: samples and tokens of a micro-batch. ``layers``, how many of them are recomputed, and
        whether anything else is.
        ``bucket_view``: whether DDP's gradients lie in its buckets. ``deepspeed``: of its configuration what decides
        over memory.
        """
        layer_names = equal_layers(self._sites.roots, self._sites.name)
        recomputed = {name for name in layer_names if name in self._sites.recomputed}
        parts = [part for root in self._sites.roots for part in root.modules()]
        ddp = [part for part in parts if isinstance(part, torch.nn.parallel.DistributedDataParallel)]
        return {
            "optimizers": sorted(type(optimizer).__name__ for optimizer in self._optimizers),
            **_bytes_each(self._optimizers),
            "tokens": self._tokens,
            "layers": len(layer_names),
            "layers_recomputed": len(recomputed),
            "recomputed_inside": bool(self._sites.recomputed - recomputed),
            "bucket_view": bool(ddp) and all(part.gradient_as_bucket_view for part in ddp),
            "deepspeed": _deepspeed(self._sites.roots),
        }

    def _step_ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizers.add(unwrap_optimizer(optimizer))

    def _module_begins(self, module: torch.nn.Module, inputs: Any) -> None:
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
            elements, weight = elements + count, weight + _nbytes(parameter)
            if parameter.grad is not None:
                with_gradient, gradient = with_gradient + count, gradient + _nbytes(parameter.grad)
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, torch.Tensor) and (many := _elements(value)) > 1:  # a count of steps is a number
                    unlike |= many != count
                    state += _nbytes(value)
    total = max(elements, 1)
    return {
        "elements": elements, "weight": weight / total, "gradient": gradient / with_gradient if with_gradient else None,
        "state": state / total, "unlike": unlike,
    }  # fmt: skip


def _elements(tensor: torch.Tensor) -> int:
    return sum(part.numel() for part in local_tensors(tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in local_tensors(tensor))


def _deepspeed(roots: Iterable[torch.nn.Module]) -> dict[str, Any]:
    engines: list[Any] = [root for root in roots if is_deepspeed(root)]
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
