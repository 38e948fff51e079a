"""What constructors refuse: full layers that differ between ranks, and layers that are more than their weight."""

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn
from torch.nn import functional as F

from pardemo import CallMeter
from pardemo.groups import Groups, ParallelDims
from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    on_shards,
)


def linear(i=8, o=8, seed=0, **options):
    return gpt.seeded(lambda: nn.Linear(i, o, **options), seed)


def block(norm_1=None, wrap=lambda mlp: mlp, **options):
    layers = gpt.seeded(lambda: gpt.Block(8, 2))
    attention, mlp = gpt.parallel_attention(layers.attention, **options), gpt.parallel_mlp(layers.mlp, **options)
    return ParallelBlock(norm_1 or layers.norm_1, attention, layers.norm_2, wrap(mlp))


class Scale(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(value)))

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q * self.scale, k, v)


def attention_with(core):
    full = gpt.seeded(lambda: gpt.Attention(8, 2))
    return ParallelAttention(full.qkv, full.out, 2, core=core)


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
    "unseeded columns": (lambda: ColumnParallelLinear(nn.Linear(8, 8)), "ColumnParallelLinear", "0.weight", "rank 1"),
    "unseeded rows": (lambda: RowParallelLinear(nn.Linear(8, 8)), "RowParallelLinear", "0.weight"),
    "unseeded table": (lambda: VocabParallelEmbedding(nn.Embedding(8, 4)), "VocabParallelEmbedding", "weight"),
    "one element": (lambda: ColumnParallelLinear(one_element_off()), "0.weight"),
    "the order": (lambda: RowParallelLinear(two_rows_exchanged()), "0.weight"),
    "the second of two": (lambda: ColumnParallelLinear([linear(), linear(seed=dist.get_rank())]), "1.weight"),
    "norms": (lambda: block(other_norm()), "ParallelBlock", "norm_1.bias"),
    "cores": (lambda: attention_with(Scale(dist.get_rank())), "ParallelAttention", "core.scale"),
    "shapes": (lambda: ColumnParallelLinear(linear(8, 8 + 2 * dist.get_rank())), "sections=[8]", "sections=[10]"),
    "kinds": (
        lambda: (ColumnParallelLinear, RowParallelLinear)[dist.get_rank()](linear()),
        "ColumnParallelLinear", "RowParallelLinear",
    ),
    "dtypes": (
        lambda: ColumnParallelLinear(linear().to((torch.float32, torch.bfloat16)[dist.get_rank()])),
        "float32", "bfloat16",
    ),
    "frozen on one": (
        lambda: RowParallelLinear(linear().requires_grad_(dist.get_rank() == 0)), "(8, 8) trained", "(8, 8)",
    ),
    "biases": (lambda: ColumnParallelLinear(linear(bias=dist.get_rank() == 0)), "0.bias"),
    "settings": (lambda: ColumnParallelLinear(linear(), sequence_parallel=dist.get_rank() == 0), "sequence_parallel"),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", DIFFER)
def test_full_layers_that_differ_between_ranks_are_refused(case):
    make, *words = DIFFER[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the words are compared
        make()
    assert says(str(refusal.value), *words)
    assert "\n" not in str(refusal.value)


@pytest.mark.ranks(4)
def test_the_rank_that_differs_is_named_and_groups_are_compared_by_themselves(rank):
    layer = linear(seed=5 if rank == 2 else 0)
    with pytest.raises(ValueError, match=r"rank 0 .*0\.weight.*rank 2"):
        ColumnParallelLinear(layer)
    with Groups(ParallelDims(tp=2, dp=2)) as groups:  # each group by itself: what others have does not matter
        ColumnParallelLinear(linear(seed=dist.get_rank(groups.dp)), groups.tp)


@pytest.mark.ranks(2)
def test_meta_tensors_and_groups_of_one_are_not_compared(rank):
    with torch.device("meta"):
        ColumnParallelLinear(nn.Linear(8, 8))
        VocabParallelEmbedding(nn.Embedding(8, 4))
    ColumnParallelLinear(nn.Linear(8, 8), dist.new_group([rank], use_local_synchronization=True))
    with CallMeter() as calls:
        ColumnParallelLinear(linear())
    assert calls.counts == {}, "a meter counts what the reader asked for"


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


old_norm = torch.nn.utils.weight_norm
new_norm = torch.nn.utils.parametrizations.weight_norm
KINDS = {
    "LoRA columns": lambda: ColumnParallelLinear(lora()),
    "LoRA rows": lambda: RowParallelLinear(lora()),
    "LoRA in a pair": lambda: ParallelMLP([linear(), lora()], linear()),
    "LoRA table": lambda: VocabParallelEmbedding(adapted(nn.Embedding(8, 4))),
    "Conv1D": lambda: RowParallelLinear(conv1d()),
    "quantised": lambda: ColumnParallelLinear(quantised()),
    "a subclass": lambda: RowParallelLinear(Doubled(8, 8)),
    "a forward of its own": lambda: RowParallelLinear(replaced_forward()),
    "another module": lambda: ColumnParallelLinear(nn.Bilinear(8, 8, 8)),
    "parametrized": lambda: RowParallelLinear(weight_normed(new_norm)),
    "weight norm": lambda: RowParallelLinear(weight_normed(old_norm)),
    "hooks": lambda: ColumnParallelLinear(hooked()),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", KINDS)
def test_layers_that_are_more_than_their_weight_are_refused(case):
    with pytest.raises(TypeError, match=r"plain nn\.(Linear|Embedding)"):
        KINDS[case]()


class SameForward(nn.Linear):
    """Another name, the same computation: as ``NonDynamicallyQuantizableLinear`` in torch's own attention."""


@pytest.mark.ranks(2)
def test_plain_layers_by_another_name_are_taken():
    ColumnParallelLinear(gpt.seeded(lambda: SameForward(8, 8)))
    ColumnParallelLinear(nn.ModuleList([linear(), linear(seed=1)]))
    ColumnParallelLinear(gpt.seeded(lambda: nn.MultiheadAttention(8, 2)).out_proj)


# --- activations, cores and dropout ---------------------------------------------------------------------------------


def mlp(activation):
    return ParallelMLP(linear(8, 16), linear(16, 8), activation=activation)


class OverChannels(nn.BatchNorm1d):
    """Batch norm takes [batch, channels, sequence]."""

    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def behind(layer):
    return lambda inner: nn.Sequential(inner, layer)


PARTED = {
    "dropout behind": (lambda: block(wrap=behind(nn.Dropout(0.1))), "Dropout(p=0.1", "attention's core"),
    "dropout in a norm": (lambda: block(nn.Sequential(nn.LayerNorm(8), nn.Dropout(0.1))), "Dropout(p=0.1"),
    "batch norm": (lambda: block(OverChannels(8), sequence_parallel=True), "OverChannels", "LayerNorm"),
    "batch norm behind": (lambda: block(wrap=behind(OverChannels(8)), sequence_parallel=True), "OverChannels"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", PARTED)
def test_what_would_part_the_ranks_is_refused(case):
    make, *words = PARTED[case]
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the words are compared
        make()
    assert says(str(refusal.value), *words)


@pytest.mark.ranks(2)
def test_random_numbers_on_elements_of_ones_own_are_taken_and_drawn():
    block(wrap=behind(nn.Dropout(0.0)))
    block(wrap=behind(nn.Dropout(0.1)), sequence_parallel=True)
    x = gpt.numbers(2, 4, 8)
    for layer in (mlp(nn.Sequential(nn.GELU(), nn.Dropout(0.5))), attention_with(lambda q, k, v: F.dropout(v, 0.5))):
        assert not torch.equal(layer(x), layer(x))


@pytest.mark.ranks(2)
def test_a_norm_over_all_tokens_is_refused_where_ranks_have_their_own():
    with pytest.raises(ValueError, match=r"BatchNorm1d.*LayerNorm"):
        on_shards(nn.Sequential(nn.BatchNorm1d(6)), None, torch.randn(2, 6, 8))


@pytest.mark.ranks(2)
def test_batch_norm_on_whole_sequences_equals_one_process():
    """Without sequence parallelism every rank has all tokens, and the same statistics."""
    full = gpt.seeded(lambda: gpt.Block(8, 2))
    full.norm_1 = gpt.seeded(lambda: OverChannels(8))
    net, x = gpt.parallel_block(full), gpt.numbers(2, 16, 8)
    errors = [gpt.relative_error(net(x), full(x)) for _ in range(2)]
    assert max(*errors, gpt.relative_error(net.norm_1.running_var, full.norm_1.running_var)) < 1e-5


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gated", [False, True])
def test_activations_in_place_equal_one_process(rank, world_size, gated):
    gate, up, down = (linear(16, 16, seed) for seed in range(3))
    layer = ParallelMLP([gate, up] if gated else gate, down, activation=nn.SiLU(inplace=True))
    x, gradient = (gpt.numbers(2, 8, 16, seed=seed) for seed in (1, 2))
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    inner = F.silu(gate(theirs))
    expected, y = down(inner * up(theirs) if gated else inner), layer(mine)
    y.backward(gradient)
    expected.backward(gradient)
    own = [one.weight.grad.chunk(world_size)[rank] for one in ([gate, up] if gated else [gate])]
    pairs = [(y, expected), (mine.grad, theirs.grad), (layer.first.weight.grad, torch.cat(own))]
    assert max(gpt.relative_error(a, b) for a, b in pairs) < 1e-5
