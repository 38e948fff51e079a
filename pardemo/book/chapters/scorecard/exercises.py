"""The exercises of this chapter, and what checks an answer to each."""

import tempfile

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import exercise, formula, on_ranks
from pardemo.claims import Claim, Ledger
from pardemo.data_parallel import BucketedDataParallel
from pardemo.formulas import communication
from pardemo.formulas import tensor_parallel as formulas
from pardemo.groups import Groups, ParallelDims
from pardemo.meters import WireMeter
from pardemo.small_models import gpt

CASES = {  # what is judged -> what a wrong verdict has overlooked
    (100, 100, 0.0, "wire", None): "it is equal",
    (100, 101, 0.02, "wire", None): "101 lies within 2 % of 100",
    (100, 101, 0.0, "wire", None): "without a tolerance 101 is not 100, and bytes are never off",
    (-100, -101, 0.02, "numeric", None): "the tolerance is a share of |predicted|: −101 lies within 2 % of −100",
    (2, 3, 0.01, "wire", 3): "the second prediction holds, and the first does not",
    (2, 4, 0.01, "wire", 3): "neither prediction holds",
    (3, 3, 0.01, "wire", 3): "the first prediction holds; the second is not asked",
    (1.0, 1.5, 0.1, "time", None): "a time may be off",
    (1.0, 1.5, 0.1, "paced", 2.0): "a time may be off, and the second prediction does not hold",
    (1.0, 1.5, 0.1, "time", 1.5): "the second prediction holds, for a time as well",
}


@formula(CASES, "You judge as the ledger does.", asked="a verdict")
def check_verdict(predicted: float, measured: float, rel: float, evidence: str, instead: float | None):
    """The verdict that the ledger gives."""
    claim = Claim("case", "what is judged", within=rel, because="it says so", evidence=evidence, off="a reason")
    with tempfile.TemporaryDirectory() as folder:
        right = Ledger("exercise", folder).check(claim, predicted, measured, instead)
    return right, [(lambda _: True, CASES[predicted, measured, rel, evidence, instead])]


@formula(
    ((2, 512, 128, 2, 2), (1, 128, 256, 4, 1), (2, 128, 256, 1, 4)),
    "As counted on 2 × 2, 4 × 1 and 1 × 4 real ranks.",
    unit="bytes",
    rel=0.01,  # headers and the meter's barrier are below
)
def check_step_bytes(batch: int, sequence: int, hidden: int, tp: int, dp: int):
    """Checks what a rank sends in a step of a split MLP, in bytes, as it is counted on the ranks."""
    activations = 4 * formulas.phi(batch, sequence, hidden, tp)
    all_gradients = communication.ring_all_reduce(4 * 8 * hidden**2, dp).sent
    both_ways = "activations are all-reduced forward and backward, and each all-reduce sends 2φ: 4φ"
    mistakes = [
        (activations, "that is the tensor-parallel part alone; the replicas all-reduce their gradients, too"),
        (all_gradients / tp, "that is the data-parallel part alone; activations travel, too"),
        (activations + all_gradients, "a tensor-parallel rank has 1/tp of the gradients"),
        (activations / 2 + all_gradients / tp, both_ways),
        ((activations + all_gradients / tp) / 4, "fp32 takes 4 bytes"),
    ]
    sent = max(on_ranks(tp * dp, _step, batch, sequence, hidden, tp, dp))
    return sent, [(wrong, why) for wrong, why in mistakes if wrong]


def _step(batch: int, sequence: int, hidden: int, tp: int, dp: int) -> int:
    """A step of an MLP without biases, h → 4h → h, on tp × dp ranks; bytes that this rank sent."""
    with Groups(ParallelDims(tp=tp, dp=dp)) as groups:
        mlp = gpt.seeded(lambda: gpt.MLP(hidden, bias=False))
        model = BucketedDataParallel(gpt.parallel_mlp(mlp, groups.tp), groups.dp)
        x = torch.ones(batch, sequence, hidden, requires_grad=True)
        model(x).sum().backward()  # opens the connections
        dist.barrier()
        with WireMeter() as wire:
            model(x).sum().backward()
        return wire.sent_bytes


@exercise("verdict")
def my_verdict(predicted, measured, rel, evidence, instead):
    """Write a little function for "is near to", and ask it twice. Only if neither prediction is near does the kind
    of evidence matter."""

    def near(value):
        return abs(measured - value) <= rel * abs(value)

    if near(predicted):
        return "holds"
    if instead is not None and near(instead):
        return "differs"
    # Seconds depend on the machine; bytes and results do not.
    return "off" if evidence in ("time", "paced") else "fails"


@exercise("step_bytes")
def my_step_bytes(batch, sequence, hidden, tp, dp):
    """Two things travel: activations among the tp ranks, in each direction once, and gradients among the dp
    replicas. Ask of both how large they are on one rank, and what an all-reduce on a ring sends of that."""
    activation = 4 * batch * sequence * hidden  # fp32
    weights = 4 * 2 * hidden * (4 * hidden) / tp  # h → 4h and 4h → h: a rank has 1/tp of both
    # On a ring an all-reduce among N sends 2(N−1)/N of what is summed.
    forward = backward = 2 * (tp - 1) / tp * activation
    gradients = 2 * (dp - 1) / dp * weights
    return forward + backward + gradients
