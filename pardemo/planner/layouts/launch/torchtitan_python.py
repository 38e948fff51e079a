"""torchtitan's configuration in Python for a layout, ``torchtitan_config.py``, for its main branch since February 2026.

Releases until 0.2.2 read ``torchtitan.toml``. Names are those of pytorch/torchtitan at :data:`COMMIT`:
``config/configs.py``, ``models/llama3/config_registry.py``, ``distributed/parallel_dims.py``. No release has them yet.
"""

from pardemo.planner.layouts.job.job import Job
from pardemo.planner.layouts.job.layout import Layout

FILE, FUNCTION = "torchtitan_config.py", "planned"
COMMIT, DATE = "b5bcd76c6", "2026-08-21"
_RECOMPUTES = {"none": "None", "selective": "SelectiveAC.Config()", "full": "FullAC.Config()"}


def why_not(job: Job, layout: Layout) -> str | None:
    """Why the main branch cannot run a layout that 0.2.2 runs; None where it can.

    Expert-parallel ranks have whole experts there, and without expert parallelism tensor parallelism cuts them.
    """
    experts = job.shape.experts is not None
    if experts and layout.tp > 1 and layout.etp != (1 if layout.ep > 1 else layout.tp):
        return f"torchtitan's main branch cuts no experts by ETP {layout.etp} beside EP {layout.ep} and TP {layout.tp}"
    if layout.micro_batch * job.sequence % (layout.tp * (2 * layout.cp if layout.cp > 1 else 1)):
        return f"{layout.micro_batch} × {job.sequence} tokens do not divide by TP {layout.tp} and CP {layout.cp}"
    return None


def text(job: Job, layout: Layout, name: str, flavor: str, degrees: dict[str, int | str], comments: list[str]) -> str:
    """The file.

    Args:
        name, flavor: torchtitan's, of the model. degrees: the toml's section of parallelism. comments: its first lines.
    """
    stages = layout.pp > 1
    # a pipeline's micro-batches have a number now; experts' tensor parallelism follows from the rest
    kept = {key: value for key, value in degrees.items()
            if key not in ("pipeline_parallel_microbatch_size", "expert_tensor_parallel_degree")}  # fmt: skip
    kept |= {"num_pp_microbatches": layout.accumulation} if stages else {}
    kept |= {"context_parallel_load_balancer": "ptrr"} if layout.cp > 1 else {}  # flex attention's
    parallelism = "".join(f"            {key}={_quoted(value)},\n" for key, value in kept.items())
    compiled = job.stack.name.endswith("-compiled")
    converted, imported = "", ""
    if job.rate > 1:
        imported = "from torchtitan.components.quantization import Float8LinearConverter\n"
        converted = f', converters=[Float8LinearConverter.Config(filter_fqns=["lm_head"], ' \
                    f"model_compile_enabled={compiled})]"  # fmt: skip
    chosen = _RECOMPUTES[layout.recompute]
    if chosen != "None":
        chosen_class = chosen.partition(".")[0]
        imported += f"from torchtitan.distributed.activation_checkpoint import {chosen_class}\n"
    head = "\n".join(comments)
    return f'''{head}
from torchtitan.components.data import ConcatThenSplitPackingConfig, GrainDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
{imported}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{name} import model_registry
from torchtitan.trainer import Trainer


def {FUNCTION}() -> Trainer.Config:
    model_spec = model_registry("{flavor}"{converted})
    return Trainer.Config(
        model_spec=model_spec,
        hf_assets_path="./tests/assets/tokenizer",
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(model_spec)),
        optimizer=default_adamw(lr=1.5e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank={layout.micro_batch} * {job.sequence},
            num_tokens_per_train_step={layout.batch} * {job.sequence},
            max_context_length={job.sequence},
            steps=100,
            disable_cuda_graphs=True,  # as it is planned
        ),
        dataloader=GrainDataLoader.Config(
            dataset=ConcatThenSplitPackingConfig(dataset=DATASETS["c4_test"]), shuffle=False
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(
{parallelism}        ),
        activation_checkpoint={chosen},
        compile=CompileConfig(enable={compiled}),
    )
'''


def _quoted(value: int | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)
