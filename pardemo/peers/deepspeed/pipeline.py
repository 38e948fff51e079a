"""DeepSpeed's PipelineModule (1F1B) on the same stages and micro-batches."""

import contextlib
import io
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from pardemo.peers.deepspeed.engine import (
    deepspeed,  # before anything else of DeepSpeed's: it says that there is no GPU
    prepare,
)


class DeepSpeedPipeline:
    """DeepSpeed's pipeline over all ranks, one stage each, in fp32 with plain SGD.

    Its ``train_batch`` computes, exchanges **and** updates the parameters in one call; :meth:`step` is that.

    Args:
        stages: all of the model's stages, the same on every rank; this rank's is trained.
        micro_batches: into how many parts a batch is cut; samples: how many a batch has.
        loss_of: (output, targets) of a micro-batch to its mean loss.
        lr: of SGD.

    Raises:
        ValueError: samples that do not divide into the micro-batches (DeepSpeed itself would take fewer).
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        micro_batches: int,
        samples: int,
        loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        lr: float = 0.1,
    ):
        if micro_batches < 1 or samples < 1 or samples % micro_batches:
            raise ValueError(f"a batch of {samples} does not divide into {micro_batches} micro-batches of equal size")
        self._micro_batches = micro_batches
        settings = {
            "train_micro_batch_size_per_gpu": samples // micro_batches,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 0.0,
            "steps_per_print": 1 << 30,
        }
        prepare()
        if not deepspeed.comm.is_initialized():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its seeds and its partition
            module = deepspeed.pipe.PipelineModule(
                layers=list(stages), num_stages=len(stages), loss_fn=loss_of, partition_method="uniform"
            )
            mine = list(module.parameters())
            self.engine, *_ = deepspeed.initialize(model=module, config=settings, optimizer=torch.optim.SGD(mine, lr))
        if self.engine.num_stages != len(stages) or self.engine.micro_batches != micro_batches:
            raise RuntimeError(f"DeepSpeed runs {self.engine.num_stages} stages and {self.engine.micro_batches} "
                               f"micro-batches, not {len(stages)} and {micro_batches}")  # fmt: skip

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Forward, backward and update for a batch; returns its mean loss, on every rank."""
        pairs = zip(inputs.chunk(self._micro_batches), targets.chunk(self._micro_batches), strict=True)
        return self.engine.train_batch(iter(pairs)).detach()
