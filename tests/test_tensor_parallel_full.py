"""What constructors refuse: full layers that differ between ranks, and layers that are more than their weight."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from pardemo import CallMeter, World
from pardemo.groups import Groups, ParallelDims
from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelBlock,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    full_layers,
)
from pardemo.world.errors import RankFailed


def linear(i=8, o=8, seed=0, **options):
    return gpt.seeded(lambda: nn.Linear(i, o, **options), seed)


def block(norm_1=None, wrap=lambda mlp: mlp, **options):
    layers = gpt.seeded(lambda: gpt.Block(8, 2))
    attention, mlp = gpt.parallel_attention(layers.attention, **options), gpt.parallel_mlp(layers.mlp, **options)
    return ParallelBlock(norm_1 or layers.norm_1, attention, layers.norm_2, wrap(mlp), **options)


def one_element_off():
    layer = linear(1024, 1024)
    with torch.no_grad():
        layer.weight[-1, -3] *= 1 + 2**-23 if dist.get_rank() else 1  # its last bit
    return layer


def two_rows_exchanged():
    layer = linear()
    layer.weight.data = layer.weight.data.roll(dist.get_rank(), 0)
    return layer


def other_norm():
    norm = nn.LayerNorm(8)
    norm.bias.data += dist.get_rank()
    return norm


DIFFER = {
    "unseeded columns": (
        lambda: ColumnParallelLinear(nn.Linear(8, 8)),
        "ColumnParallelLinear: the full layer's weight float32 (8, 8) trained has other values on rank 1 of the group "
        "than on rank 0: make it from one seed on all ranks, or broadcast it from one of them",
    ),
    "unseeded rows": (lambda: RowParallelLinear(nn.Linear(8, 8)), "RowParallelLinear: the full layer's weight"),
    "unseeded table": (
        lambda: VocabParallelEmbedding(nn.Embedding(8, 4)), "VocabParallelEmbedding: the full layer's weight",
    ),
    "one element": (
        lambda: ColumnParallelLinear(one_element_off()), "weight float32 (1024, 1024) trained has other values",
    ),
    "the order": (lambda: RowParallelLinear(two_rows_exchanged()), "weight float32 (8, 8) trained has other values"),
    "the second of two": (
        lambda: ColumnParallelLinear([linear(), linear(seed=dist.get_rank())]), "the full layer's 1.weight float32",
    ),
    "norms": (lambda: block(other_norm()), "ParallelBlock: the full layer's norm_1.bias float32 (8,) trained has"),
    "shapes": (
        lambda: ColumnParallelLinear(linear(8, 8 + 2 * dist.get_rank())),
        "the ranks make different layers: rank 0 ColumnParallelLinear(weight float32 (8, 8) trained, bias",
    ),
    "kinds": (
        lambda: (ColumnParallelLinear, RowParallelLinear)[dist.get_rank()](linear()),
        "bias float32 (8,) trained, input_is_whole=False, sequence_parallel=False)",
    ),
    "dtypes": (
        lambda: ColumnParallelLinear(linear().to((torch.float32, torch.bfloat16)[dist.get_rank()])),
        "rank 1 ColumnParallelLinear(weight bfloat16 (8, 8) trained",
    ),
    "frozen on one": (
        lambda: RowParallelLinear(linear().requires_grad_(dist.get_rank() == 0)),
        "rank 1 RowParallelLinear(weight float32 (8, 8), bias float32 (8,), input_is_whole=False",
    ),
    "biases": (
        lambda: ColumnParallelLinear(linear(bias=dist.get_rank() == 0)),
        "rank 1 ColumnParallelLinear(weight float32 (8, 8) trained, sections=",
    ),
    "settings": (
        lambda: ColumnParallelLinear(linear(), sequence_parallel=dist.get_rank() == 0), "sequence_parallel=False",
    ),
}  # fmt: skip


def told_by(case, table):
    try:
        table[case][0]()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "it was accepted"


@pytest.mark.parametrize("case", DIFFER)
def test_full_layers_that_differ_between_ranks_are_refused(world_of, case):
    for told in world_of(2).run(told_by, case, DIFFER):
        assert told.startswith("ValueError: ")
        assert DIFFER[case][1] in told, told
        assert "\n" not in told


def rank_of_four():
    layer = linear(seed=5 if dist.get_rank() == 2 else 0)
    with pytest.raises(ValueError, match=r"values.*2.*0"):
        ColumnParallelLinear(layer)
    with Groups(ParallelDims(tp=2, dp=2)) as groups:  # each group by itself: what others have does not matter
        ColumnParallelLinear(linear(seed=dist.get_rank(groups.dp)), groups.tp)


def test_the_rank_that_differs_is_named_and_groups_are_compared_by_themselves(world_of):
    world_of(4).run(rank_of_four)


def nothing_compared():
    with torch.device("meta"):
        ColumnParallelLinear(nn.Linear(8, 8))
        VocabParallelEmbedding(nn.Embedding(8, 4))
    with CallMeter() as calls:
        ColumnParallelLinear(linear())
    return calls.counts


def test_meta_tensors_and_groups_of_one_are_not_compared(world_of):
    assert world_of(2).run(nothing_compared) == [{}] * 2, "a meter counts what the reader asked for"
    (told,) = world_of(1).run(told_by, "unseeded columns", DIFFER)
    assert told == "it was accepted"


def only_one_constructs():
    full_layers.MEETING_S = 1.0
    if dist.get_rank() == 0:
        ColumnParallelLinear(linear())


def test_a_construction_on_one_rank_alone_ends_in_an_error():
    message = "ColumnParallelLinear: after 1 s not all ranks of its group were making it: every rank makes the same"
    with World(2, timeout_s=180) as world, pytest.raises(RankFailed, match=f"^rank 0: TimeoutError: {message}"):
        world.run(only_one_constructs)


# --- layers that are more than their weight --------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def adapted(layer):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(nn.Sequential(layer), LoraConfig(r=2, target_modules=["0"])).base_model.model[0]


def lora():
    return adapted(linear())


def conv1d():
    from transformers.pytorch_utils import Conv1D

    return Conv1D(8, 8)


def quantised():
    return torch.ao.nn.qat.Linear(8, 8, qconfig=torch.ao.quantization.default_qconfig)


def weight_normed(normalise):
    return normalise(linear())


def replaced_forward():
    layer = linear()
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)
    return layer


def hooked():
    layer = linear()
    layer.register_forward_hook(lambda module, args, y: 2 * y)
    return layer


def emptied():
    layer = linear()
    layer.weight.data = torch.empty(0)
    return layer


old_norm = torch.nn.utils.weight_norm
new_norm = torch.nn.utils.parametrizations.weight_norm
KINDS = {
    "LoRA columns": (lambda: ColumnParallelLinear(lora()), "TypeError: peft's Linear is an adapter around a layer, of"),
    "LoRA rows": (lambda: RowParallelLinear(lora()), "merge it first (merge_and_unload), or split its base_layer"),
    "LoRA in an MLP": (lambda: ParallelMLP(linear(), lora()), "TypeError: peft's Linear is an adapter"),
    "LoRA in a pair": (lambda: ParallelMLP([linear(), lora()], linear()), "TypeError: peft's Linear is an adapter"),
    "LoRA table": (lambda: VocabParallelEmbedding(adapted(nn.Embedding(8, 4))), "TypeError: peft's Embedding is an"),
    "Conv1D": (
        lambda: RowParallelLinear(conv1d()),
        "TypeError: transformers's Conv1D keeps its weight as [in, out]: make an nn.Linear with the transposed weight",
    ),
    "quantised": (
        lambda: ColumnParallelLinear(quantised()),
        "torch's Linear computes in a way of its own: give the plain nn.Linear that it stands for",
    ),
    "a subclass": (lambda: RowParallelLinear(Doubled(8, 8)), "Doubled computes in a way of its own: give the"),
    "a forward of its own": (lambda: RowParallelLinear(replaced_forward()), "computes in a way of its own"),
    "another module": (lambda: ColumnParallelLinear(nn.Bilinear(8, 8, 8)), "torch's Bilinear computes in a way of its"),
    "parametrized": (lambda: RowParallelLinear(weight_normed(new_norm)), "weight is computed from others: remove"),
    "weight norm": (lambda: RowParallelLinear(weight_normed(old_norm)), "has hooks, which its part would not run"),
    "hooks": (lambda: ColumnParallelLinear(hooked()), "has hooks, which its part would not run: remove them first"),
    "emptied": (lambda: ColumnParallelLinear(emptied()), "ValueError: the layer's weight has shape (0,), not (8, 8)"),
}  # fmt: skip


@pytest.mark.parametrize("case", KINDS)
def test_layers_that_are_more_than_their_weight_are_refused(world_of, case):
    for told in world_of(2).run(told_by, case, KINDS):
        assert KINDS[case][1] in told, told
        assert "\n" not in told


class SameForward(nn.Linear):
    """Another name, the same computation: as ``NonDynamicallyQuantizableLinear`` in torch's own attention."""


def accepted():
    return [
        type(ColumnParallelLinear(given)).__name__
        for given in (
            gpt.seeded(lambda: SameForward(8, 8)),
            nn.ModuleList([linear(), linear(seed=1)]),
            gpt.seeded(lambda: nn.MultiheadAttention(8, 2)).out_proj,
        )
    ]


def test_plain_layers_by_another_name_are_taken(world_of):
    assert world_of(2).run(accepted) == [["ColumnParallelLinear"] * 3] * 2


# --- activations and dropout -----------------------------------------------------------------------------------------

gain = nn.Parameter(torch.ones(()))


def by_default(x, gain=gain):
    return F.gelu(x) * gain


def by_global(x):
    return F.gelu(x) * gain


def scaled(gain, x):
    return F.gelu(x) * gain


def mlp(activation):
    return ParallelMLP(linear(8, 16), linear(16, 8), activation=activation)


def enclosed():
    inner = nn.PReLU()
    return lambda x: inner(x)


OUTSIDE = "uses parameters from outside, which each rank would train for itself"
ALONE = "does not work element by element: a rank would show it its own columns alone"
ACTIVATIONS = {
    "a closure": (lambda: mlp(enclosed()), f"<lambda> {OUTSIDE}"),
    "a default": (lambda: mlp(by_default), f"by_default {OUTSIDE}"),
    "a global": (lambda: mlp(by_global), f"by_global {OUTSIDE}"),
    "a partial": (lambda: mlp(functools.partial(scaled, gain)), OUTSIDE),
    "a method": (lambda: mlp(nn.PReLU().forward), f"forward {OUTSIDE}"),
    "a softmax": (lambda: mlp(nn.Softmax(-1)), f"Softmax {ALONE}"),
    "a function of all": (lambda: mlp(lambda x: x - x.mean(-1, keepdim=True)), f"<lambda> {ALONE}"),
    "dropout behind": (
        lambda: block(wrap=lambda inner: nn.Sequential(inner, nn.Dropout(0.1))),
        "Dropout(p=0.1, inplace=False) would drop other elements on every rank: put it into the attention's core or",
    ),
    "dropout in a norm": (lambda: block(nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1))), "would drop other elements"),
}  # fmt: skip


@pytest.mark.parametrize("case", ACTIVATIONS)
def test_what_a_rank_would_see_a_part_of_is_refused(world_of, case):
    for told in world_of(2).run(told_by, case, ACTIVATIONS):
        assert told.startswith("ValueError: ")
        assert ACTIVATIONS[case][1] in told, told


def fine():
    constant = torch.tensor(2.0)
    mlp(nn.Sequential(nn.GELU(), nn.Dropout(0.5)))
    mlp(lambda x: F.silu(x) * constant)
    mlp(functools.partial(F.gelu, approximate="tanh"))
    block(wrap=lambda inner: nn.Sequential(inner, nn.Dropout(0.0)))
    block(wrap=lambda inner: nn.Sequential(inner, nn.Dropout(0.1)), sequence_parallel=True)


def test_activations_and_dropout_on_elements_of_ones_own_are_taken(world_of):
    world_of(2).run(fine)
