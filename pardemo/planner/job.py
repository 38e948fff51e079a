"""Describes the job to plan: a model, how it is trained, and by which engine on how many ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pardemo import argument_checks
from pardemo.planner.layouts.job import ENGINES
from pardemo.planner.layouts.layout import SHARDING
from pardemo.planner.layouts.tuning import FULL, Tuning

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class RankJob:
    """One rank's share of a training step in bf16.

    Args:
        config: the model's, of Transformers or :mod:`pardemo.baichuan2`.
        batch: samples of a micro-batch on one rank. sequence: tokens of each.
        tuning: what is trained. A dry run knows weights in bf16, AdamW, whole logits and adapters alone.
        checkpointing: recompute each layer in the backward pass.
        engine: ``plain`` (bf16 parameters and states, torch's AdamW), DeepSpeed's ``zero-0`` to ``zero-3`` (bf16,
            fp32 optimizer states), or ``fsdp2`` (fp32 shards of what is trained, bf16 computation).
        ranks: data-parallel ranks.
        labels: share of the tokens that have a label; matters where logits are made for those alone.
        accumulation: micro-batches of a step.
        clipping: largest norm of the gradients, 0 for none.
        zero: further keys of DeepSpeed's ``zero_optimization``.
        precision: of the parameters; ``fp32`` for ``plain`` alone, ``fp16`` takes the bytes of bf16.
        on_gpu: attention without a mask and a fused optimizer, as on a GPU; else as on this machine's CPU.

    Raises:
        ValueError: a size of 0, an engine that does not exist, a share outside 0 to 1.
    """

    config: "PreTrainedConfig"
    batch: int = 1
    sequence: int = 1024
    tuning: Tuning = FULL
    checkpointing: bool = True
    engine: str = "plain"
    ranks: int = 1
    labels: float = 1.0
    accumulation: int = 1
    clipping: float = 0.0
    zero: Mapping[str, Any] = field(default_factory=dict)
    on_gpu: bool = True
    precision: str = "bf16"

    def __post_init__(self):
        for name in ("batch", "sequence", "ranks", "accumulation"):
            argument_checks.whole_number(getattr(self, name), name)
        if self.engine not in ENGINES:
            raise ValueError(f"engine must be one of {', '.join(ENGINES)}, not {self.engine!r}")
        if self.precision not in ("bf16", "fp16", "fp32") or (self.precision == "fp32" and self.engine != "plain"):
            raise ValueError(f"precision must be bf16 or fp16 (or fp32 with the plain engine), not {self.precision!r}")
        if not 0 < self.labels <= 1:
            raise ValueError(f"labels is a share above 0 and up to 1, not {self.labels!r}")
        context = getattr(self.config, "max_position_embeddings", None)
        if context is not None and self.sequence > context:
            raise ValueError(f"a sequence of {self.sequence} is longer than the model's context of {context}")

    @property
    def stage(self) -> int | None:
        """DeepSpeed's ZeRO stage; None under other engines."""
        program, sharding = ENGINES[self.engine]
        return SHARDING.index(sharding) if program == "deepspeed" else None

    @property
    def labelled(self) -> int:
        """Tokens of a micro-batch that have a label: as many in each sample."""
        return self.batch * max(1, round(self.labels * (self.sequence - 1)))

    @property
    def described(self) -> str:
        """The job as text: equal jobs have equal text."""
        rest = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "config"}
        return f"{self.config.to_json_string()} {rest}"

    def but(self, **changes: Any) -> "RankJob":
        """Returns this job with some fields changed."""
        return replace(self, **changes)


def check_tensor_parallel(config: "PreTrainedConfig", tp: int) -> None:
    """Raises ValueError where the heads do not divide by ``tp``."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    for name, count in (("attention heads", heads), ("key-value heads", groups)):
        if count % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0 and groups % n == 0]
            raise ValueError(f"{count} {name} do not divide by --tp {tp}; {', '.join(map(str, fits))} would do")
