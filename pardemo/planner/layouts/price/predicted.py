"""What is said of a job in a layout: a step's seconds, a GPU's bytes."""

from dataclasses import dataclass

from pardemo.planner.estimate import Estimate


@dataclass(frozen=True)
class PredictedStep:
    """A step of the rank that the others wait for.

    Args:
        parts: seconds by :data:`pardemo.planner.layouts.price.work.PARTS`.
        model_flops: operations of all ranks that the model needs, nothing recomputed. peak_flops: of a GPU.
        tokens: of a step. stages: layers of each. sent_bytes: of a rank, where that is reckoned.
    """

    parts: dict[str, float]
    model_flops: float
    peak_flops: float
    tokens: int
    gpus: int
    stages: tuple[float, ...]
    sent_bytes: float | None = None

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def limit(self) -> str:
        """The largest part."""
        return max(self.parts, key=self.parts.__getitem__)

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds / self.gpus

    @property
    def mfu(self) -> float:
        """The model's operations over what the GPUs could have done (Chowdhery et al. 2022, appendix B)."""
        return self.model_flops / self.seconds / self.gpus / self.peak_flops


@dataclass(frozen=True)
class Memory(Estimate):
    """Bytes of the fullest rank line by line, and the stage that it is in; of a fine-tune with the moment (phase)."""

    stage: int = 0
