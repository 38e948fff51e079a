"""The exercises of this chapter, and what checks an answer to each."""

import tempfile
from collections.abc import Callable
from numbers import Real

import torch
import torch.distributed as dist

from pardemo.book.page.exercises import Exercise, Mistake, call
from pardemo.claims import Ledger
from pardemo.data_parallel import BucketedDataParallel
from pardemo.formulas import communication
from pardemo.formulas import tensor_parallel as formulas
from pardemo.groups import Groups, ParallelDims
from pardemo.meters import WireMeter
from pardemo.small_models import gpt
from pardemo.world import World

EXERCISES = {
    "step_bytes": Exercise(
        "my_step_bytes",
        "Two things travel: activations among the tp ranks, in each direction once, and gradients among the dp "
        "replicas. Ask of both how large they are on one rank, and what an all-reduce on a ring sends of that.",
    ),
    "verdict": Exercise(
        "my_verdict",
        'Write a little function for "is near to", and ask it twice. Only if neither prediction is near does the '
        "kind of evidence matter.",
    ),
}

RANKS = 4
TIMEOUT_S = 60
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
SHAPES = [(2, 512, 128, 2, 2), (1, 128, 256, 4, 1), (2, 128, 256, 1, 4)]  # batch, sequence, hidden, tp, dp


def check_verdict(function: Callable[..., str]) -> str:
    """``function(predicted, measured, rel, evidence, instead)`` is the verdict that the ledger gives."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger("exercise", folder)
        for number, ((predicted, measured, rel, evidence, instead), hint) in enumerate(CASES.items()):
            second = None if instead is None else (instead, "a reason")
            case = f"case_{number}"
            right = ledger.check(case, "", predicted, measured, rel=rel, evidence=evidence, instead=second)
            answer = call(function, predicted, measured, rel, evidence, instead)
            if not isinstance(answer, str) or answer != right:
                arguments = f"predicted {predicted}, measured {measured}, rel {rel}, {evidence}, instead {instead}"
                raise Mistake(f"For {arguments} the verdict is {right!r}, not {answer!r}: {hint}.")
    return "You judge as the ledger does."


def check_step_bytes(function: Callable[..., float]) -> str:
    """``function(batch, sequence, hidden, tp, dp)`` is what a rank sends in a step of a split MLP, in bytes."""
    with World(RANKS, timeout_s=TIMEOUT_S) as world:
        for shape in SHAPES:
            sent = max(world.run(_step, *shape))
            answer = call(function, *shape)
            if not isinstance(answer, Real) or isinstance(answer, bool):
                raise Mistake(f"It returned {answer!r}; it should return a number of bytes.")
            if not abs(answer - sent) <= 0.01 * sent:  # headers and the meter's barrier are below; NaN is not
                raise Mistake(_overlooked(answer, sent, *shape))
    return "As counted on 2 × 2, 4 × 1 and 1 × 4 real ranks."


def _overlooked(answer: float, sent: int, batch: int, sequence: int, hidden: int, tp: int, dp: int) -> str:
    activations = 4 * formulas.phi(batch, sequence, hidden, tp)
    all_gradients = communication.ring_all_reduce(4 * 8 * hidden**2, dp).sent
    guesses = {
        "That is the tensor-parallel part alone; the replicas all-reduce their gradients, too": activations,
        "That is the data-parallel part alone; activations travel, too": all_gradients / tp,
        "A tensor-parallel rank has 1/tp of the gradients": activations + all_gradients,
        "Activations are all-reduced forward and backward, and each all-reduce sends 2φ: 4φ": (
            activations / 2 + all_gradients / tp
        ),
        "fp32 takes 4 bytes": (activations + all_gradients / tp) / 4,
    }
    hint = next((text for text, guess in guesses.items() if guess and abs(answer - guess) <= 0.01 * guess), "")
    case = f"batch {batch}, sequence {sequence}, hidden {hidden}, tp {tp}, dp {dp}"
    return f"For {case} a rank sent {sent:,} bytes, not {answer:,.0f}." + (f" {hint}." if hint else "")


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


def my_verdict(predicted, measured, rel, evidence, instead):
    def near(value):
        return abs(measured - value) <= rel * abs(value)

    if near(predicted):
        return "holds"
    if instead is not None and near(instead):
        return "differs"
    # Seconds depend on the machine; bytes and results do not.
    return "off" if evidence in ("time", "paced") else "fails"


def my_step_bytes(batch, sequence, hidden, tp, dp):
    activation = 4 * batch * sequence * hidden  # fp32
    weights = 4 * 2 * hidden * (4 * hidden) / tp  # h → 4h and 4h → h: a rank has 1/tp of both
    # On a ring an all-reduce among N sends 2(N−1)/N of what is summed.
    forward = backward = 2 * (tp - 1) / tp * activation
    gradients = 2 * (dp - 1) / dp * weights
    return forward + backward + gradients
