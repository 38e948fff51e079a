"""Whose code asks for memory: the model's, an optimizer's, an engine's, or an engine's that gathers parameters."""

import sys
from types import FrameType

#: Parts of file names that tell whose code asked for memory; the innermost frame that has one of them decides.
_ENGINES = ("/deepspeed/", "/torch/distributed/fsdp/", "/torch/distributed/tensor/", "/torch/distributed/_")
_OPTIMIZERS = ("/torch/optim/",)
#: DeepSpeed's stand-in for torch's linear function under stage 3: what it makes is the model's.
_STAND_IN = "/deepspeed/runtime/zero/linear.py"
_GATHERING = ("partition_parameters.py", "partitioned_param_coordinator.py", "_fsdp_param.py")
_MODEL = ("/torch/nn/modules/", "/torch/utils/checkpoint.py", "/torch/autograd/graph.py", "/transformers/", "/peft/",
          "/pardemo/baichuan2/")  # fmt: skip


def origin() -> str:
    """Whose code called the caller: ``model``, ``optimizer``, ``engine`` or ``gather``."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if "/pardemo/meters/" not in name and "/pardemo/planner/" not in name:
            if name.endswith(_STAND_IN):
                return "model"
            if any(part in name for part in _ENGINES):
                gathers = name.endswith(_GATHERING) or "all_gather" in frame.f_code.co_name
                return "gather" if gathers else "engine"
            if any(part in name for part in _OPTIMIZERS):
                return "optimizer"
            if any(part in name for part in _MODEL):
                return "model"
        frame = frame.f_back
    return "model"
