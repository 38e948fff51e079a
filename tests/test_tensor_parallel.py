"""Every split layer against the plain one in the same test; ranks begin with different seeds on purpose."""

import copy
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import says
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from pardemo import CallMeter, WireMeter, World
from pardemo.formulas import tensor_parallel as formulas
from pardemo.groups import Groups, ParallelDims
from pardemo.small_models import gpt
from pardemo.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelBlock,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to,
    exchange,
    gather_from,
    gather_sequence,
    reduce_from,
    reduce_scatter_sequence,
    scatter_sequence,
    vocab_parallel_cross_entropy,
)

HIDDEN, HEADS, BATCH, SEQUENCE = 48, 4, 3, 8
SIZES = [1, 2, 4]
#: Relative: fp32 sums in another order differ by some 1e-7 of a tensor's norm. A factor of 1.003 would be 3e-3.
ROUNDING = 1e-5


def size():
    return dist.get_world_size()


def worst(pairs):
    return max(gpt.relative_error(a, b) for a, b in pairs)


# --- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
def test_operators_do_what_they_say_and_change_nothing(rank, world_size):
    """Forward and backward of each operator against what it should be, computed from all ranks' tensors."""
    n = world_size
    inputs = [gpt.numbers(2, 4 * n, 3 * n, seed=r) for r in range(n)]
    parts = [gpt.numbers(2, 4, 3, seed=10 + r) for r in range(n)]
    whole = gpt.numbers(2, 4, 3 * n, seed=20)
    along = [gpt.numbers(2, 4 * n, 3, seed=30 + r) for r in range(n)]
    found = []

    def run(operator, mine, gradient, forward, backward, **options):
        x = mine.clone().requires_grad_()
        kept, handed = x.detach().clone(), gradient.clone()
        y = operator(x, **options)
        y.backward(handed)
        found.append((operator.__name__, worst([(y, forward), (x.grad, backward)])))
        assert torch.equal(x.detach(), kept), "the input was changed"
        assert torch.equal(handed, gradient), "the gradient that was handed over was changed"

    total = sum(inputs)
    run(copy_to, inputs[0], inputs[rank], inputs[0], total)
    run(reduce_from, inputs[rank], inputs[0], total, inputs[0])
    run(gather_from, parts[rank], whole, torch.cat(parts, -1), whole.chunk(n, -1)[rank])
    run(gather_sequence, parts[rank], along[rank], torch.cat(parts, 1), sum(along).chunk(n, 1)[rank])
    run(gather_sequence, parts[rank], along[0], torch.cat(parts, 1), along[0].chunk(n, 1)[rank], whole_gradient=True)
    run(reduce_scatter_sequence, along[rank], parts[rank], sum(along).chunk(n, 1)[rank], torch.cat(parts, 1))
    run(scatter_sequence, along[0], parts[rank], along[0].chunk(n, 1)[rank], torch.cat(parts, 1))
    assert [(name, error) for name, error in found if error > ROUNDING] == []


@pytest.mark.ranks(4)
def test_copy_to_sums_several_gradients_in_one_message(rank):
    a, b = torch.ones(3, requires_grad=True), torch.ones(2, 2, requires_grad=True)
    x, y = copy_to(a, b)
    with CallMeter() as calls:
        ((rank + 1) * x.sum() + 10 * (rank + 1) * y.sum()).backward()
    assert (calls.counts, a.grad[0].item(), b.grad[0, 0].item()) == ({"all_reduce": 1}, 10, 100)


@pytest.mark.ranks(2)
def test_a_second_derivative_is_refused():
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(copy_to(x).square().sum(), x, create_graph=True)


# --- linear layers ---------------------------------------------------------------------------------------------------


def sum_over_ranks(tensor):
    dist.all_reduce(tensor)
    return tensor


def linear(kind, strided, frozen, dtype, input_needs_gradient=True):
    """Largest errors of output and gradients of a column or row layer against the plain one."""
    rank, n = dist.get_rank(), size()
    full = gpt.seeded(lambda: nn.Linear(24, 32)).to(dtype)
    full.weight.requires_grad_(not frozen)
    x = gpt.numbers(BATCH, SEQUENCE, 24, seed=1, dtype=dtype)
    if strided:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not x.is_contiguous()
    gradient = gpt.numbers(1, 1, 32, seed=2, dtype=dtype).expand(BATCH, SEQUENCE, 32)  # strides of 0
    x = x.detach().requires_grad_(input_needs_gradient)
    mine = x.detach().requires_grad_(input_needs_gradient)
    expected = full(x)
    expected.backward(gradient)
    if kind == "column":
        layer = ColumnParallelLinear(full)
        y = layer(mine)
        y.backward(gradient.chunk(n, -1)[rank])
        pairs = [(y, expected.chunk(n, -1)[rank]), (layer.bias.grad, full.bias.grad.chunk(n)[rank])]
        weight = None if frozen else full.weight.grad.chunk(n, 0)[rank]
    else:
        layer = RowParallelLinear(full)
        y = layer(mine.chunk(n, -1)[rank])
        y.backward(gradient)
        mine.grad = mine.grad if mine.grad is None else sum_over_ranks(mine.grad)
        pairs = [(y, expected), (layer.bias.grad, full.bias.grad)]
        weight = None if frozen else full.weight.grad.chunk(n, 1)[rank]
    assert layer.weight.requires_grad is not frozen
    if frozen:
        assert layer.weight.grad is None
    else:
        pairs.append((layer.weight.grad, weight))
    if input_needs_gradient:
        pairs.append((mine.grad, x.grad))
    return worst(pairs), y.dtype


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize(
    ("strided", "frozen", "input_needs_gradient"),
    [(False, False, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_linear_layers_equal_the_plain_one(kind, strided, frozen, input_needs_gradient):
    error, _ = linear(kind, strided, frozen, torch.float32, input_needs_gradient)
    assert error < ROUNDING


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_bf16_layers_stay_bf16(kind):
    error, dtype = linear(kind, True, False, torch.bfloat16)
    assert error < 2**-7, "bf16 has 8 bits: each of two numbers may be 2^-9 off, and partial sums are rounded too"
    assert dtype == torch.bfloat16


@pytest.mark.ranks(2)
def test_autocast_works_as_with_plain_layers():
    mlp = gpt.seeded(lambda: gpt.MLP(HIDDEN))
    x = gpt.numbers(BATCH, SEQUENCE, HIDDEN)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    layer = gpt.parallel_mlp(mlp)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(mine), mlp(theirs)
    y.float().sum().backward()
    expected.float().sum().backward()
    assert (y.dtype, layer.first.weight.grad.dtype) == (torch.bfloat16, torch.float32)
    assert worst([(y, expected)]) < 2**-7, "the partial sums are rounded to bf16 before they are added"


@pytest.mark.ranks(*SIZES)
def test_gated_mlp_is_one_product_and_one_all_reduce_backward(rank, world_size):
    """Gate and up as one product, an output gathered again, and the full layers untouched."""
    gate, up, down = gpt.seeded(
        lambda: nn.ModuleList([nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False), nn.Linear(32, 16)])
    )
    before = copy.deepcopy([gate, up, down])
    x = gpt.numbers(2, 5, 16).requires_grad_()
    mine = x.detach().requires_grad_()
    expected = down(F.silu(gate(x)) * up(x))
    expected.sum().backward()
    layer = ParallelMLP([gate, up], down, activation=F.silu)
    y = layer(mine)
    with CallMeter() as calls:
        y.sum().backward()
    gathered = gather_from(ColumnParallelLinear(up)(x))
    same = all(torch.equal(a.weight, b.weight) for a, b in zip(before, (gate, up, down), strict=True))
    wanted = torch.cat([gate.weight.grad.chunk(world_size)[rank], up.weight.grad.chunk(world_size)[rank]])
    pairs = [(y, expected), (mine.grad, x.grad), (layer.first.weight.grad, wanted), (gathered, up(x))]
    assert worst(pairs) < ROUNDING
    assert calls.counts == ({} if world_size == 1 else {"all_reduce": 1})
    assert same


# --- MLP, attention, block -------------------------------------------------------------------------------------------


@pytest.mark.ranks(*SIZES)
@pytest.mark.parametrize("in_sequence", [False, True])
def test_block_equals_the_plain_one(in_sequence):
    full = gpt.seeded(lambda: gpt.Block(HIDDEN, HEADS))
    x = gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=1).requires_grad_()
    gradient = gpt.numbers(BATCH, SEQUENCE, HIDDEN, seed=2)
    expected = full(x)
    expected.backward(gradient)
    layer = gpt.parallel_block(full, sequence_parallel=in_sequence)
    mine = x.detach().clone().requires_grad_()
    y = layer(scatter_sequence(mine) if in_sequence else mine)
    y = gather_sequence(y, whole_gradient=True) if in_sequence else y
    y.backward(gradient)
    truth = dict(gpt.parallel_block(gpt.gradients_as_weights(full)).named_parameters())
    found = gpt.gradients(layer)
    assert found.keys() == truth.keys()
    pairs = [(y, expected), (mine.grad, x.grad), *((found[name], truth[name]) for name in truth)]
    assert worst(pairs) < ROUNDING


def llama():
    """A model from elsewhere: every linear layer of a small Llama replaced by its part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, attn_implementation="sdpa",
    )  # fmt: skip
    full = gpt.seeded(lambda: LlamaForCausalLM(config))
    split = copy.deepcopy(full)
    for layer in split.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(layer.self_attn, name, ColumnParallelLinear(getattr(layer.self_attn, name)))
        layer.self_attn.o_proj = RowParallelLinear(layer.self_attn.o_proj)
        for name in ("gate_proj", "up_proj"):
            setattr(layer.mlp, name, ColumnParallelLinear(getattr(layer.mlp, name)))
        layer.mlp.down_proj = RowParallelLinear(layer.mlp.down_proj)
    split.lm_head = ColumnParallelLinear(split.lm_head)
    split.lm_head.register_forward_hook(lambda _, inputs, outputs: gather_from(outputs))
    tokens = gpt.text(2, 9, 64)
    losses = [model(tokens, labels=tokens).loss for model in (full, split)]
    for loss in losses:
        loss.backward()
    rank, n = dist.get_rank(), size()
    pairs = [(losses[0], losses[1])]
    pairs.append((split.model.embed_tokens.weight.grad, full.model.embed_tokens.weight.grad))
    for mine, whole in zip(split.model.layers, full.model.layers, strict=True):
        pairs.append((mine.self_attn.k_proj.weight.grad, whole.self_attn.k_proj.weight.grad.chunk(n, 0)[rank]))
        pairs.append((mine.mlp.down_proj.weight.grad, whole.mlp.down_proj.weight.grad.chunk(n, 1)[rank]))
    return worst(pairs)


def test_a_llama_can_be_split_layer_by_layer():
    with World(2, preload=["transformers"]) as world:
        assert max(world.run(llama)) < ROUNDING


@pytest.mark.ranks(2)
def test_frozen_weights_accumulation_and_double_use():
    """Frozen weights, gradients accumulated over micro-batches, no_grad, eval, one layer used twice."""
    mlp = gpt.seeded(lambda: gpt.MLP(16))
    mlp.requires_grad_(False)
    mlp.second.bias.requires_grad_(True)
    x = gpt.numbers(2, 4, 16)
    layer = gpt.parallel_mlp(mlp)
    for part in x.split(1):
        layer(layer(part)).sum().backward()
        mlp(mlp(part)).sum().backward()
    with torch.no_grad():
        quiet = worst([(layer.eval()(x), mlp(x))])
    trained = [name for name, p in layer.named_parameters() if p.grad is not None]
    assert max(quiet, worst([(layer.second.bias.grad, mlp.second.bias.grad)])) < ROUNDING
    assert trained == ["second.bias"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_layer_does_not_keep_its_input(frozen):
    layer = ColumnParallelLinear(_linear(64, 64).requires_grad_(not frozen))
    own, kept = {p.data_ptr() for p in layer.parameters()}, []
    x = torch.randn(128, 64, requires_grad=True)

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept.append(tensor.numel() * 4)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    assert sum(kept) == (0 if frozen else 128 * 64 * 4)


@pytest.mark.ranks(2)
def test_copies_and_saved_weights():
    full = gpt.seeded(lambda: gpt.GPT(vocabulary=64, hidden=32))
    net = gpt.ParallelGPT(full)
    twin = copy.deepcopy(net)
    tokens = gpt.text(2, 9, 64)
    assert torch.equal(net.loss(tokens), twin.loss(tokens))
    assert twin.head.weight is not net.head.weight
    assert twin.head.weight is twin.embedding.weight
    other = gpt.ParallelGPT(gpt.seeded(lambda: gpt.GPT(vocabulary=64, hidden=32), seed=5), sequence_parallel=True)
    other.load_state_dict(net.state_dict())  # the same names with and without sequence parallelism
    assert abs(other.loss(tokens) - net.loss(tokens)).item() < ROUNDING


@pytest.mark.ranks(2)
def test_inputs_of_one_two_and_four_dimensions(rank, world_size):
    """Inputs without a batch: [in] alone, [sequence, in], and with a dimension more."""
    full = gpt.seeded(lambda: nn.Linear(8, 8))
    found = []
    for shape in ((8,), (4, 8), (2, 3, 4, 8)):
        x = gpt.numbers(*shape)
        mine, theirs = (x.clone().requires_grad_() for _ in range(2))
        layer = ColumnParallelLinear(full)
        y = RowParallelLinear(full)(layer(mine))
        y.sum().backward()
        expected = full(full(theirs))
        expected.sum().backward()
        found.append(worst([(y, expected), (mine.grad, theirs.grad)]))
    logits = gpt.numbers(6)
    loss = vocab_parallel_cross_entropy(logits.chunk(world_size)[rank], torch.tensor(3))
    found.append(abs(loss - F.cross_entropy(logits, torch.tensor(3))).item())
    assert max(found) < ROUNDING


@pytest.mark.ranks(2)
def test_autocast_leaves_fp64_alone_as_torch_does():
    layer = ColumnParallelLinear(_linear(4, 4).double())
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64


# --- the exchange is counted -----------------------------------------------------------------------------------------


FORWARD_BACKWARD = [
    ("mlp", "", 2, 2, {"all_reduce": 1}, {"all_reduce": 1}),
    ("attention", "", 2, 2, {"all_reduce": 1}, {"all_reduce": 1}),
    ("block", "", 4, 4, {"all_reduce": 2}, {"all_reduce": 2}),
    ("block", "recomputed", 4, 8, {"all_reduce": 2}, {"all_reduce": 4}),
    ("block", "recomputed early reentrant", 4, 8, {"all_reduce": 2}, {"all_reduce": 4}),
    ("block", "recomputed early tanh", 4, 8, {"all_reduce": 2}, {"all_reduce": 4}),
    ("block", "recomputed early", 4, 6, {"all_reduce": 2}, {"all_reduce": 3}),
    ("mlp", "sequence", 2, 3, {"all_gather": 1, "reduce_scatter": 1},
     {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 1}),
    ("block", "sequence", 4, 6, {"all_gather": 2, "reduce_scatter": 2},
     {"all_gather": 4, "all_reduce": 4, "reduce_scatter": 2}),
]  # fmt: skip


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("what", "mode", "forward", "backward", "calls_f", "calls_b"), FORWARD_BACKWARD)
def test_collectives_and_bytes(world_size, what, mode, forward, backward, calls_f, calls_b):
    b, s, h = 1, 1024, 256  # 1 MiB: headers do not matter
    full = gpt.seeded(lambda: gpt.Block(h, 4))
    in_sequence = mode == "sequence"
    layer = gpt.parallel_block(full, sequence_parallel=in_sequence)
    layer = {"mlp": layer.mlp, "attention": layer.attention, "block": layer}[what]
    if "tanh" in mode:  # behind the last all-reduce, of whose result it keeps a function
        layer.mlp = nn.Sequential(layer.mlp, nn.Tanh())
    x = gpt.numbers(b, s // world_size if in_sequence else s, h).requires_grad_()

    def run():
        if "recomputed" not in mode:
            return layer(x)
        return checkpoint(layer, x, use_reentrant="reentrant" in mode)

    with set_checkpoint_early_stop("early" in mode):
        run().sum().backward()
        with WireMeter() as sent_forward, CallMeter() as calls_forward:
            loss = run().sum()
        with WireMeter() as sent_backward, CallMeter() as calls_backward:
            loss.backward()
    phi = formulas.phi(b, s, h, world_size)
    # 0.02: norms' and biases' gradients under sequence parallelism, 6·h numbers of b·s·h
    expected = pytest.approx([forward, backward], rel=0.02 if in_sequence else 0.01)
    assert [m.sent_bytes / phi for m in (sent_forward, sent_backward)] == expected
    assert [m.received_bytes / phi for m in (sent_forward, sent_backward)] == expected
    assert [calls_forward.counts, calls_backward.counts] == [calls_f, calls_b]


@pytest.mark.ranks(1)
def test_a_group_of_one_moves_nothing(wire):
    full = gpt.seeded(lambda: gpt.GPT(vocabulary=64))
    net = gpt.ParallelGPT(full, sequence_parallel=True)
    with wire, CallMeter() as calls:
        net.loss(gpt.text(2, 33, 64)).backward()
    assert wire.sent_bytes == 0
    assert set(calls.counts) <= {"all_reduce"}, "the loss alone asks its group of one"


@pytest.mark.ranks(2)
def test_the_input_gradient_travels_while_the_weight_gradient_is_computed(monkeypatch):
    """An exchange that takes 0.2 s beside a weight gradient that takes about as long."""
    all_reduce = exchange.all_reduce_in_place
    threads = []

    def slow(*args):
        threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(0.2)
        return all_reduce(*args)

    layer = ColumnParallelLinear(_linear(512, 1024))
    x = torch.randn(1024, 512, requires_grad=True)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            begin, out = time.monotonic(), func(*args, **(kwargs or {}))
            if str(func) == "aten.mm.default":
                seen.append((begin, time.monotonic()))
            return out

    y = layer(x).sum()
    monkeypatch.setattr(exchange, "all_reduce_in_place", slow)
    dist.barrier()
    with Watch():
        y.backward()
    (_, first_ended), (second_began, _) = seen
    assert threads == [False], "it is in the communication thread"
    assert second_began - first_ended < 0.2, "while the exchange was still asleep"


# --- bad input -------------------------------------------------------------------------------------------------------


def _linear(i, o, **options):
    return gpt.seeded(lambda: nn.Linear(i, o, **options))


def _embedding(*sizes):
    return gpt.seeded(lambda: nn.Embedding(*sizes))


def _frozen_bias():
    layer = _linear(8, 8)
    layer.bias.requires_grad_(False)
    return layer


def mixed(of_attention, of_mlp, group=None):
    full = gpt.seeded(lambda: gpt.Block(8, 2))
    attention = gpt.parallel_attention(full.attention, sequence_parallel=of_attention)
    return ParallelBlock(full.norm_1, attention, full.norm_2, gpt.parallel_mlp(full.mlp, group, **of_mlp))


def loss(logits, targets, **options):
    return vocab_parallel_cross_entropy(torch.zeros(logits), targets, **options)


ONE = torch.zeros(2, dtype=torch.long)
BAD = {
    "columns": (lambda: ColumnParallelLinear(_linear(8, 9)), "an output width of 9", "2 ranks", "10"),
    "rows": (lambda: RowParallelLinear(_linear(9, 8)), "an input width of 9", "2 ranks"),
    "heads": (lambda: ParallelAttention(_linear(9, 27), _linear(9, 9), 9), "number of heads of 9", "2 ranks"),
    "key heads": (lambda: ParallelAttention(_linear(12, 24), _linear(12, 12), 6, 3), "key/value heads of 3", "2 ranks"),
    "groups of heads": (lambda: ParallelAttention(_linear(8, 16), _linear(8, 8), 4, 3), "4 heads", "groups for 3"),
    "head width": (lambda: ParallelAttention(_linear(8, 24), _linear(8, 8), 3), "8", "3 heads"),
    "thirds": (lambda: ParallelAttention(_linear(8, 23), _linear(8, 8), 4), "[8, 8, 8]", "[23]"),
    "three layers": (
        lambda: ParallelAttention([_linear(8, 8), _linear(8, 8), _linear(8, 4)], _linear(8, 8), 4),
        "[8, 8, 8]", "[8, 8, 4]",
    ),
    "sections": (lambda: ColumnParallelLinear(_linear(8, 12), sections=[6, 4]), "[6, 4]", "10", "12"),
    "copies": (lambda: ColumnParallelLinear(_linear(8, 12), copies=[3]), "copies [3]", "1 sections", "2"),
    "some biases": (lambda: ColumnParallelLinear([_linear(8, 8), _linear(8, 8, bias=False)]), "a bias or none"),
    "some frozen biases": (lambda: ColumnParallelLinear([_linear(8, 8), _frozen_bias()]), "trained alike"),
    "inner width": (lambda: ParallelMLP(_linear(8, 32), _linear(16, 8)), "[32]", "16"),
    "trained activation": (lambda: ParallelMLP(_linear(8, 8), _linear(8, 8), activation=nn.PReLU()), "PReLU", "train"),
    "vocabulary": (lambda: VocabParallelEmbedding(nn.Embedding(7, 2)), "vocabulary of 7", "2 ranks", "8"),
    "sparse": (lambda: VocabParallelEmbedding(nn.Embedding(8, 2, sparse=True)), "sparse"),
    "token": (lambda: VocabParallelEmbedding(_embedding(8, 2))(torch.tensor([[1, 8]])), "token 8", "0 to 7"),
    "negative token": (lambda: VocabParallelEmbedding(_embedding(8, 2))(torch.tensor([[-1]])), "token -1"),
    "narrow tokens": (
        lambda: VocabParallelEmbedding(_embedding(256, 2))(torch.tensor([[1, 200]], dtype=torch.uint8)),
        "tokens", "int32 or int64", "uint8",
    ),
    "target": (lambda: loss((2, 4), torch.tensor([0, 8])), "target 8", "0 to 7"),
    "float targets": (lambda: loss((2, 4), torch.zeros(2)), "targets", "int32 or int64", "float32"),
    "shapes": (lambda: loss((2, 3, 4), ONE), "(2, 3, 4)", "(2,)"),
    "uneven logits": (lambda: loss((2, 4 - dist.get_rank()), ONE), "3 to 4 logits"),
    "reduction": (lambda: loss((2, 4), ONE, reduction="max"), "'max'"),
    "half a sequence-parallel block": (lambda: mixed(True, {}), "sequence_parallel"),
    "another group": (lambda: mixed(False, {}, dist.new_group([0, 1])), "one group"),
    "tokens of one dimension": (
        lambda: ColumnParallelLinear(_linear(8, 8), sequence_parallel=True)(torch.ones(8)), "(8,)", "-2",
    ),
    "sequence": (lambda: scatter_sequence(torch.zeros(1, 3, 4)), "a sequence of 3", "2 ranks"),
    "no sequence": (lambda: scatter_sequence(torch.zeros(4)), "(4,)", "-2"),
    "partial sums": (lambda: reduce_scatter_sequence(torch.zeros(3, 4)), "a sequence of 3"),
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case):
    make, *words = BAD[case]
    with pytest.raises((ValueError, TypeError, IndexError)) as refusal:
        make()
    assert says(str(refusal.value), *words)
    assert "\n" not in str(refusal.value)


@pytest.mark.ranks(2)
def test_the_communication_thread_ends_with_its_group():
    earlier = set(threading.enumerate())  # of groups that other tests have left: they live as long as the World

    def threads():
        return [t for t in threading.enumerate() if "group-communication" in t.name and t not in earlier]

    for _ in range(3):
        with Groups(ParallelDims(tp=2)) as groups:
            layer = ColumnParallelLinear(_linear(512, 1024), groups.tp)
            layer(torch.randn(1024, 512, requires_grad=True)).sum().backward()
            assert threads()
        del layer, groups
    import gc

    gc.collect()
    until = time.monotonic() + 20
    while len(threads()) > 1:
        assert time.monotonic() < until, threads()  # a thread hears a moment later that its executor has gone
        time.sleep(0.01)


@pytest.mark.ranks(2)
def test_lazy_negatives_over_the_backend(monkeypatch, rank):
    """The exchanges as of CUDA tensors, which torch's collectives carry, of a negative that nobody has computed yet."""
    wholes = [torch.view_as_complex(torch.arange(16.0).reshape(2, 4, 2) + r) for r in range(2)]
    zero, one = values = [whole.conj().imag.clone().resolve_neg() for whole in wholes]
    lazy = wholes[rank].conj().imag  # [2, 4]
    assert lazy.is_neg()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        found = [
            exchange.all_reduce(lazy, dist.group.WORLD),
            exchange.all_reduce(lazy, dist.group.WORLD, "max"),
            exchange.all_gather(lazy, dist.group.WORLD, 1),
            exchange.reduce_scatter(lazy, dist.group.WORLD, 1),
            exchange.all_reduce_in_place(wholes[rank].clone().conj().imag, dist.group.WORLD),
        ]
    assert torch.equal(lazy.resolve_neg(), values[rank]), "what was given is as it was"
    total = zero + one
    expected = [total, torch.maximum(zero, one), torch.cat([zero, one], 1), total.chunk(2, 1)[rank], total]
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.resolve_neg(), theirs)
