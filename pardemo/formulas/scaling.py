"""Figures of Megatron's weak-scaling study, and the size of its models.

The study: Shoeybi et al. 2019 (arXiv 1909.08053), 5.1, Table 1 and Figure 5: GPT-2 models that grow with the number of
GPUs, alone (MP) and in 64 replicas (MP + DP). How long their steps should take, the planner says
(:mod:`pardemo.planner.layouts.published.megatron_2019`).
"""

from dataclasses import dataclass

#: Figure 5, per cent of linear scaling, by tensor-parallel size
FIGURE_5_MP = {1: 100, 2: 95, 4: 82, 8: 77}
FIGURE_5_MP_DP = {1: 96, 2: 83, 4: 79, 8: 74}
#: Operations/s of one GPU with the smallest model (5.1): 100 per cent.
BASELINE_FLOPS = 39e12


@dataclass(frozen=True)
class ScaledModel:
    """A model of Table 1, and what each replica's step takes: ``batch`` samples of ``sequence`` tokens."""

    hidden: int
    heads: int
    layers: int
    batch: int = 8
    sequence: int = 1024
    vocabulary: int = 51_200

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of the blocks, embedding (tied), positions and the last norm.

        12lh²(1 + 13/12h) + (V + s)h of Narayanan et al. 2021 (arXiv 2104.04473), and the last norm's 2h.
        """
        h, layers = self.hidden, self.layers
        return 12 * layers * h * h + 13 * layers * h + (self.vocabulary + self.sequence) * h + 2 * h

    @property
    def flops(self) -> float:
        """Operations of a replica's step with all blocks recomputed: 96bslh²(1 + s/6h + V/16lh) (2104.04473, 5.1)."""
        b, s, h, layers, v = self.batch, self.sequence, self.hidden, self.layers, self.vocabulary
        return 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))

    @property
    def activation_bytes(self) -> int:
        """One activation [batch, sequence, hidden] in fp16."""
        return 2 * self.batch * self.sequence * self.hidden

    def linear_seconds(self, gpus: int) -> float:
        """Seconds of a step on ``gpus`` GPUs if each of them did as much in a second as the baseline's."""
        return self.flops / gpus / BASELINE_FLOPS


#: The models by the GPUs that share one: t.
TABLE_1 = {
    1: ScaledModel(1536, 16, 40),
    2: ScaledModel(1920, 20, 54),
    4: ScaledModel(2304, 24, 64),
    8: ScaledModel(3072, 32, 72),
}
