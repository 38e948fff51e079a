"""Ranks that are given another tensor, model, setting, schedule or file than the others; and what no engine takes."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from pardemo.collectives import parameter_server_all_reduce, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.pipeline_parallel import Schedule, gpipe, one_f_one_b
from pardemo.soak.ranks.fault import FaultCase, fault
from pardemo.soak.ranks.trainers import (
    ENGINES,
    REPLICATED,
    WIDTH,
    ZERO,
    Pipelined,
    Replicated,
    TensorParallel,
    small_net,
)
from pardemo.tensor_parallel import VocabParallelEmbedding, vocab_parallel_cross_entropy
from pardemo.zero import load, save
from pardemo.zero.engine import Engine

# --- tensors that differ

COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "all-reduce": ring_all_reduce,
    "reduce-scatter": ring_reduce_scatter,
    "all-gather": ring_all_gather,
    "parameter server": parameter_server_all_reduce,
}
TENSORS = {
    "elements": lambda x: torch.ones(x.numel() + 1),
    "shape": lambda x: x.reshape(-1),
    "dtype": lambda x: x.double(),
    "strides": lambda x: x.t().contiguous().t(),
    "empty": lambda x: x[:0],
}


@fault("tensor", r"the ranks' tensors differ \(.*rank {who}: ", [f"{c}, {t}" for c in COLLECTIVES for t in TENSORS])
def _tensor(case: FaultCase) -> None:
    collective, difference = case.how.split(", ")
    for step in range(3):
        x = torch.ones(6, 7)
        if case.mine and step == case.when:
            x = TENSORS[difference](x)
        COLLECTIVES[collective](x)


# --- models and settings that differ

MODELS = {
    "shape": lambda net: net.__setitem__(2, nn.Linear(WIDTH, WIDTH + 1)),
    "dtype": lambda net: net[2].to(torch.bfloat16),
    "frozen": lambda net: net[2].weight.requires_grad_(False),
    "one more": lambda net: net.append(nn.Linear(WIDTH, WIDTH)),
    "one less": lambda net: net.__delitem__(4),
    "no bias": lambda net: setattr(net[2], "bias", None),
    "tied": lambda net: setattr(net[4], "weight", net[2].weight),
    "buffer": lambda net: net.register_buffer("more", torch.zeros(3)),
}


@fault("model", r"models differ.*rank {who}|rank {who}.*models differ|models differ", MODELS, REPLICATED)
def _model(case: FaultCase) -> None:
    net = small_net()
    if case.mine:
        MODELS[case.how](net)
    trainer = ENGINES[case.trainer](net=net)
    for step in range(3):
        trainer.step(step)


@fault("bucket size", r"bucket|differ", ("tiny", "larger"), ("bucketed", "zero2"))
def _bucket_size(case: FaultCase) -> None:
    size = {"tiny": 1, "larger": 1 << 20}[case.how] if case.mine else 400
    trainer = ENGINES[case.trainer](bucket_bytes=size)
    for step in range(3):
        trainer.step(step)


@fault("engine", r"differ|engine|stage", REPLICATED, REPLICATED)
def _engine(case: FaultCase) -> None:
    """Another engine on one rank; where the draw gives the same, the next one."""
    other = case.how if case.how != case.trainer else REPLICATED[(REPLICATED.index(case.how) + 1) % len(REPLICATED)]
    trainer = ENGINES[other if case.mine else case.trainer]()
    for step in range(3):
        trainer.step(step)


@fault("clipping", r"max_norm|clip|differ", ("none", "another"), ZERO)
def _clipping(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer](max_norm={"none": None, "another": 0.01}[case.how] if case.mine else 1.0)
    for step in range(3):
        trainer.step(step)


@fault("zero-3 layers", r"layer|order|differ", ("left out", "exchanged", "twice"), ("zero3",))
def _zero3_layers(case: FaultCase) -> None:
    trainer = ENGINES["zero3"]()
    orders = {"left out": (0, 1, 4), "exchanged": (2, 1, 0, 3, 4), "twice": (0, 1, 2, 3, 2, 3, 4)}
    for step in range(3):
        trainer.order = orders[case.how] if case.mine and step == case.when else None
        trainer.step(step)


# --- pipelines


@fault("schedule", r"schedule|micro-batch|differ", ("micro-batches", "order"), ("pp",))
def _schedule(case: FaultCase) -> None:
    order, micro_batches = one_f_one_b, 4
    if case.mine:
        order, micro_batches = (gpipe, 4) if case.how == "order" else (one_f_one_b, 2)
    trainer = Pipelined(schedule=Schedule(order, case.ranks, micro_batches))
    for step in range(2):
        trainer.step(step)
    if case.how == "order":  # both orders send alike, so that they may well go together
        wrong = torch.tensor(0 if trainer.is_right() else 1)
        dist.all_reduce(wrong)
        if not wrong:
            raise RuntimeError("schedules differ, and every gradient is right")


@fault(
    "pipeline's batch", "", ("not divisible", "no inputs", "unlike", "integers"), ("pp",),
    by_way={
        "not divisible": "does not divide into",
        "no inputs": "needs the inputs of the batch",
        "unlike": "micro-batches of one shape|micro-batches of a step have to look alike",
        "integers": "floating-point numbers|integers",
    },
)  # fmt: skip
def _pipeline_batch(case: FaultCase) -> None:
    trainer = Pipelined(ends_with={"unlike": FewerAndFewer, "integers": ToIntegers}.get(case.how))
    x = trainer.batch(0)
    trainer.pipeline.step({"not divisible": x[:-1], "no inputs": None}.get(case.how, x), x)


class FewerAndFewer(nn.Module):
    """A row less of each micro-batch than of the one before."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x[: 3 - self.seen]


class ToIntegers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.long()


# --- tensor parallelism


INPUTS = {
    "shape": lambda x: x[:-1],
    "width": lambda x: x[..., :-1],
    "dtype": lambda x: x.double(),
}


@fault(
    "tensor parallel input", "", INPUTS, ("tp",),
    by_way={
        "shape": r"the ranks' tensors differ",
        "width": "the input's last dimension is",
        "dtype": "the input is torch.float64, the layer's weight",
    },
)  # fmt: skip
def _tensor_parallel_input(case: FaultCase) -> None:
    trainer = TensorParallel()
    for step in range(3):
        x = trainer.batch(step).requires_grad_()
        trainer.module(INPUTS[case.how](x) if case.mine and step == case.when else x).sum().backward()


@fault("tensor parallel gradient", "gradient|differ", trainers=("tp",), at_limit="")
def _tensor_parallel_gradient(case: FaultCase) -> None:
    """An input that needs a gradient on some ranks alone: documented to leave those waiting."""
    trainer = TensorParallel()
    for step in range(3):
        trainer.module(trainer.batch(step).requires_grad_(not case.mine)).sum().backward()


@fault(
    "vocabulary", "", ("token", "target", "width", "rows"), ("tp",),
    by_way={
        "token": "token 99 is outside the vocabulary",
        "target": "target 99 is outside the vocabulary",
        "width": "the ranks have different numbers of logits",
        "rows": "differ|need targets of shape",
    },
)  # fmt: skip
def _vocabulary(case: FaultCase) -> None:
    rows, width = 3 + (case.mine and case.how == "rows"), 4 + (case.mine and case.how == "width")
    tokens = torch.full((rows,), 99 if case.how == "token" and case.mine else 1)
    VocabParallelEmbedding(nn.Embedding.from_pretrained(torch.ones(4 * case.ranks, 5)))(tokens)
    targets = torch.full((rows,), 99 if case.how == "target" and case.mine else 1)
    vocab_parallel_cross_entropy(torch.ones(rows, width, requires_grad=True), targets).backward()


# --- what is loaded


@fault(
    "state", "", ("missing key", "unknown key", "other shape"), ("naive", "bucketed", "zero1", "zero2"),
    by_way={"missing key": "Missing key.*bias", "unknown key": "Unexpected key.*more", "other shape": "size mismatch"},
)  # fmt: skip
def _state(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer]()
    trainer.step(0)
    values = trainer.engine.state_dict()
    if case.mine:
        key = next(name for name in values if name.endswith("bias"))
        if case.how == "missing key":
            del values[key]
        else:
            values["more" if case.how == "unknown key" else key] = torch.ones(1)
    trainer.engine.load_state_dict(values)
    trainer.step(1)


@fault(
    "checkpoint", "", ("stage", "model", "nothing", "damaged"), ZERO,
    by_way={
        "stage": "has stage",
        "model": "is of another model",
        "nothing": "no whole checkpoint",
        "damaged": "is not the file that was written",
    },
)  # fmt: skip
def _checkpoint(case: FaultCase) -> None:
    folder = f"{case.folder}/{case.number}"
    trainer = ENGINES[case.trainer]()
    trainer.step(0)
    save(_zero(trainer), folder)
    if case.how == "damaged" and dist.get_rank() == 0:
        with open(f"{folder}/rank-00000.safetensors", "ab") as file:
            file.write(b"x")
    dist.barrier()
    other = ZERO[ZERO.index(case.trainer) - 1] if case.how == "stage" else case.trainer
    net = nn.Sequential(*small_net(), nn.Linear(WIDTH, 3)) if case.how == "model" else small_net()
    load(_zero(ENGINES[other](net=net)), folder + "x" * (case.how == "nothing"))


def _zero(trainer: Replicated) -> Engine:
    assert isinstance(trainer.engine, Engine)
    return trainer.engine


# --- what no engine takes


@fault("dtype", "is torch.float(16|64); trained parameters are bfloat16 or float32", ("fp16", "fp64"), ZERO)
def _dtype(case: FaultCase) -> None:
    ENGINES[case.trainer](net=small_net().to({"fp16": torch.float16, "fp64": torch.float64}[case.how]))


@fault("nothing to train", "no parameter that requires a gradient", trainers=REPLICATED)
def _nothing_to_train(case: FaultCase) -> None:
    ENGINES[case.trainer](net=small_net().requires_grad_(False))


# (ZeRO makes them dense before it sums them, which is right: tests/test_zero_training_code.py.)
@fault("sparse gradients", "sparse", trainers=[name for name in REPLICATED if name not in ZERO])
def _sparse_gradients(case: FaultCase) -> None:
    trainer = ENGINES[case.trainer](net=nn.Sequential(nn.Embedding(9, WIDTH, sparse=True), *small_net()))
    trainer.engine(torch.tensor([1, 2])).square().mean().backward()
    trainer.update()
