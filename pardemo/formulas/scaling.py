"""How long a step of Megatron's weak-scaling study takes: arithmetic, memory traffic, and two kinds of exchange.

The study: Shoeybi et al. 2019 (arXiv 1909.08053), 5.1, Table 1 and Figure 5: GPT-2 models that grow with the number of
GPUs, alone (MP) and in 64 replicas (MP + DP). All that the model knows about the machine is in :data:`DGX2H`. One
constant, the rate of matrix multiplications, is set so that the one-GPU step runs at the paper's 39 TFLOP/s. It
takes up what is left out: the optimizer, the attention core's own memory traffic, launching kernels.
"""

from dataclasses import dataclass, replace

#: Figure 5, per cent of linear scaling, by tensor-parallel size
FIGURE_5_MP = {1: 100, 2: 95, 4: 82, 8: 77}
FIGURE_5_MP_DP = {1: 96, 2: 83, 4: 79, 8: 74}
BASELINE_FLOPS = 39e12


@dataclass(frozen=True)
class ScalingJob:
    """One configuration: ``tp`` GPUs share each layer, ``dp`` copies of the model see ``batch`` samples each."""

    hidden: int
    heads: int
    layers: int
    tp: int
    dp: int = 1
    batch: int = 8
    sequence: int = 1024
    vocabulary: int = 51_200
    gradient_bytes: int = 2  # each as it travels: fp16

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def parameters(self) -> int:
        """Weights, biases and norms of the blocks, embedding (tied), positions and the last norm.

        12lh²(1 + 13/12h) + (V + s)h of Narayanan et al. 2021 (arXiv 2104.04473), and the last norm's 2h.
        """
        h, layers = self.hidden, self.layers
        return 12 * layers * h * h + 13 * layers * h + (self.vocabulary + self.sequence) * h + 2 * h

    @property
    def flops(self) -> float:
        """Of one copy's step with every block recomputed: 96bslh²(1 + s/6h + V/16lh) (2104.04473, 5.1)."""
        b, s, h, layers, v = self.batch, self.sequence, self.hidden, self.layers, self.vocabulary
        return 96 * b * s * layers * h * h * (1 + s / (6 * h) + v / (16 * layers * h))

    @property
    def activation_bytes(self) -> int:
        """One activation [batch, sequence, hidden] in fp16."""
        return 2 * self.batch * self.sequence * self.hidden


@dataclass(frozen=True)
class ClusterRates:
    """Rates of one GPU and its links; bytes/s one way, seconds."""

    host_gpus: int
    memory_bytes_per_s: float
    inside_bytes_per_s: float  # of each GPU to the others of its host
    inside_base_s: float  # of an all-reduce
    inside_hop_s: float  # of each of its 2(N−1) steps
    host_bytes_per_s: float  # of a host's network adapters together
    network_hop_s: float
    matmul_flops: float = 0.0  # set by ``calibrated``


#: NVIDIA DGX-2H, 16 V100 SXM3.
#: 16 GPUs a host: 512 in 32 hosts, 1909.08053 5. Memory: 14.4 TB/s for 16 GPUs (DGX-2's published total).
#: Inside: NVLink 2, 6 links of 25 GB/s one way; NCCL reckons with 20 to 22 of them (nccl src/graph/topo.h): 6 · 20.
#: Base and hop: NCCL's own model of 2019 for its Simple protocol (src/graph/tuning.cc): 8.4, then 5.7 or 6.6 µs.
#: Between hosts: eight 100 Gb/s adapters, of which NCCL counts on 12 GB/s each (topo.h): 96 GB/s.
DGX2H = ClusterRates(
    host_gpus=16,
    memory_bytes_per_s=900e9,
    inside_bytes_per_s=120e9,
    inside_base_s=8.4e-6,
    inside_hop_s=5.7e-6,
    host_bytes_per_s=96e9,
    network_hop_s=6.6e-6,
)

TABLE_1 = {
    1: ScalingJob(1536, 16, 40, tp=1),
    2: ScalingJob(1920, 20, 54, tp=2),
    4: ScalingJob(2304, 24, 64, tp=4),
    8: ScalingJob(3072, 32, 72, tp=8),
}

ALL_REDUCES_PER_BLOCK = 6  # two forward, two recomputed, two backward
#: Bytes of memory traffic per element of an activation that every GPU does in full, whatever t is: norm, dropout and
#: residual sum in fp16, each a pass of its own, twice forward (4 + 5 + 6) and once backward (6 + 5 + 6), in each half.
WHOLE_TRAFFIC = 2 * (2 * (4 + 5 + 6) + (6 + 5 + 6))


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step, part by part."""

    products: float
    whole_traffic: float
    tensor_parallel: float
    data_parallel: float

    @property
    def seconds(self) -> float:
        """Nothing overlaps."""
        return self.products + self.whole_traffic + self.tensor_parallel + self.data_parallel

    @property
    def overlapped_seconds(self) -> float:
        """The gradients' exchange hides behind the backward pass as far as it can: behind half the rest of the step.

        With every block recomputed, forward : recomputation : backward is 1 : 1 : 2.
        """
        rest = self.seconds - self.data_parallel
        return rest + max(0.0, self.data_parallel - rest / 2)


def ring_seconds(nbytes: float, ranks: int, bytes_per_s: float, base_s: float, hop_s: float) -> float:
    """One ring all-reduce: base + 2(N−1) hops + 2(N−1)/N·S/B."""
    if ranks == 1:
        return 0.0
    return base_s + 2 * (ranks - 1) * hop_s + 2 * (ranks - 1) / ranks * nbytes / bytes_per_s


def tensor_parallel_seconds(job: ScalingJob, cluster: ClusterRates) -> float:
    """All of a step's all-reduces over ``job.tp`` neighbours of one host; none of them can hide."""
    one = ring_seconds(
        job.activation_bytes, job.tp, cluster.inside_bytes_per_s, cluster.inside_base_s, cluster.inside_hop_s
    )
    return ALL_REDUCES_PER_BLOCK * job.layers * one


def data_parallel_seconds(job: ScalingJob, cluster: ClusterRates) -> float:
    """One all-reduce of the gradients, S = ``gradient_bytes``·parameters/t on each GPU, over ``job.dp`` copies.

    The t groups run side by side, and each one's ring enters and leaves a host once: its adapters carry t rings. Every
    step of the ring is charged the network's hop, which is under 1 ms in all. Within one host the ring is NVLink's.
    """
    nbytes = job.gradient_bytes * job.parameters / job.tp
    if job.gpus <= cluster.host_gpus:
        return ring_seconds(nbytes, job.dp, cluster.inside_bytes_per_s, cluster.inside_base_s, cluster.inside_hop_s)
    rate = min(cluster.host_bytes_per_s / job.tp, cluster.inside_bytes_per_s)
    return ring_seconds(nbytes, job.dp, rate, cluster.inside_base_s, cluster.network_hop_s)


def step(job: ScalingJob, cluster: ClusterRates) -> StepSeconds:
    """The step's parts on a calibrated cluster."""
    if not cluster.matmul_flops:
        raise ValueError("the cluster has no rate for matrix multiplications yet: use calibrated(cluster, job, flops)")
    return StepSeconds(
        products=job.flops / job.tp / cluster.matmul_flops,
        whole_traffic=_whole_traffic_seconds(job, cluster),
        tensor_parallel=tensor_parallel_seconds(job, cluster),
        data_parallel=data_parallel_seconds(job, cluster),
    )


def calibrated(cluster: ClusterRates, job: ScalingJob, flops_per_s: float) -> ClusterRates:
    """The cluster whose GPUs do ``job``, on one GPU, at ``flops_per_s``: the one thing taken from the measurement."""
    products_s = job.flops / flops_per_s - _whole_traffic_seconds(job, cluster)
    return replace(cluster, matmul_flops=job.flops / products_s)


def efficiency(job: ScalingJob, seconds: float, baseline_flops: float = BASELINE_FLOPS) -> float:
    """Operations per second and GPU over the baseline's, as in the paper: 1 is linear scaling."""
    return job.flops / job.tp / seconds / baseline_flops


#: What a step spends beside its share of the products, in the order of a stack.
PARTS = ("what every GPU does whole", "tensor-parallel all-reduces", "data-parallel all-reduce")
OVERLAPPED = (
    4,
    8,
)  # t of the models whose MP + DP runs are taken to have hidden their all-reduce: see ``longer``


def longer(
    job: ScalingJob, cluster: ClusterRates, overlap: bool = False, baseline_flops: float = BASELINE_FLOPS
) -> dict[str, float]:
    """How much longer than with linear scaling a step takes, part by part of :data:`PARTS`, in per cent."""
    predicted, linear = step(job, cluster), job.flops / job.tp / baseline_flops
    alone = predicted.seconds - predicted.data_parallel
    shown = (predicted.overlapped_seconds if overlap else predicted.seconds) - alone
    seconds = (predicted.products + predicted.whole_traffic - linear, predicted.tensor_parallel, shown)
    return {part: 100 * each / linear for part, each in zip(PARTS, seconds, strict=True)}


def figure_5(cluster: ClusterRates) -> dict[int, tuple[dict[str, float], float]]:
    """GPUs -> per cent longer than with linear scaling: by the formulas, part by part, and in Figure 5.

    Nothing overlaps with 64 copies of the two smaller models, and the gradients' sum does with the two larger ones:
    Megatron-LM's README of December 2019 says that overlap lifts the 8.3B on 512 GPUs from 60 to 74 % and slows the
    1.2B and the 2.5B; of the 4.2B it says nothing. One GPU alone is the calibration and is left out.
    """
    shares = {}
    for dp, figure in ((1, FIGURE_5_MP), (64, FIGURE_5_MP_DP)):
        for tp, job in TABLE_1.items():
            parts = longer(replace(job, dp=dp), cluster, overlap=dp > 1 and tp in OVERLAPPED)
            shares[tp * dp] = parts, 100 * (100 / figure[tp] - 1)
    del shares[1]
    return shares


def _whole_traffic_seconds(job: ScalingJob, cluster: ClusterRates) -> float:
    elements = job.batch * job.sequence * job.hidden * job.layers
    return WHOLE_TRAFFIC * elements / cluster.memory_bytes_per_s
