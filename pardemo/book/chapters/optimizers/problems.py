"""The problems of this chapter, and the way to each answer."""

import itertools
import math

from pardemo.book.page.problems import problem
from pardemo.formulas import optimizers as formulas
from pardemo.planner import hardware, rates
from pardemo.planner.layouts.configurations import shape_of

#: Llama 3 8B, as torch has its matrices: an MLP's two that widen and the one that narrows, and those of attention.
_TALL, _WIDE = (14_336, 4096), (4096, 14_336)
_MLP = [_TALL, _TALL, _WIDE]
_ATTENTION = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
_BLOCKS = 32


@problem("times")
def _shampoo_beside_adam():
    """A matrix of Llama 3 8B's MLP has 14,336 rows and 4,096 columns. How many times as many bytes of states does
    Shampoo keep for it as Adam, if it is not cut into pieces?"""
    rows, columns = _TALL
    shampoo, adam = (formulas.kept_bytes(name, [_TALL]) for name in ("Shampoo", "Adam"))
    return shampoo / adam, f"""Shampoo keeps 8 · (rows² + columns²) = {shampoo / 1e9:.2f} GB, and Adam keeps 8 · rows ·
        columns = {adam / 1e9:.2f} GB. The ratio is rows/columns + columns/rows = {rows / columns:g} +
        {columns / rows:.3f} = {shampoo / adam:.2f}. It is smallest, 2, for a square matrix, which is one reason to cut
        long ones into pieces first."""  # fmt: skip


@problem("GPUs")
def _worth_eight_bits():
    """FSDP cuts all states of Llama 3 8B (8.03 billion parameters) evenly over N GPUs. You think of 8-bit Adam, with
    2.03 bytes of states a parameter. From how many GPUs on would it save less than 1 GB on each of them?"""
    params, least = shape_of("llama3-8b").params, 1e9
    adam, small = (formulas.kept_bytes(name, [(params,)]) for name in ("Adam", "8-bit Adam"))
    gpus = next(n for n in itertools.count(1) if (adam - small) / n < least)
    return gpus, f"""Adam's two states take 8Ψ = {adam / 1e9:.1f} GB and in 8 bits {small / 1e9:.1f} GB; the fp32 copy
        is there in both. The {(adam - small) / 1e9:.1f} GB that are saved are cut by N, too, so they are less than 1 GB
        on a GPU from {gpus} GPUs on. There it is not the optimizer any more that fills a GPU."""  # fmt: skip


@problem("GPUs")
def _shared_iteration():
    """Muon updates the matrices of 14,336 × 4,096 in Llama 3 8B's MLPs. In a step each GPU takes 16,384 tokens through
    them, forward and backward. GPUs can share the Newton–Schulz iterations evenly. How many GPUs have to do so, if the
    iterations may add at most 5 % to a GPU's operations for these matrices?"""
    rows, columns = _TALL
    tokens, least = 16_384, 0.05
    muon, model = formulas.newton_schulz_flops(rows, columns), 6 * rows * columns * tokens
    gpus = math.ceil(muon / model / least)
    return gpus, f"""The matrix is turned, so that x xᵀ is small: a round has two matrix multiplications of 2 · 4,096² ·
        14,336 operations and one of 2 · 4,096³. Five rounds are {muon / 1e12:.2f}·10¹² operations, and the tokens take
        6 · 4,096 · 14,336 · T = {model / 1e12:.2f}·10¹². If every GPU does all rounds, they add
        {100 * muon / model:.0f} %. N GPUs that share them add an N-th of this, and it is 5 % at N =
        {muon / model / least:.2f}: it takes {gpus} GPUs."""  # fmt: skip


@problem("s")
def _by_products():
    """FSDP2 cuts Llama 3 8B by rows over 64 GPUs, each with a card of 400 Gbit/s, of which 24 GB/s are
    reached. The MLP of each of 32 blocks has two
    matrices of 14,336 × 4,096 and one of 4,096 × 14,336. How long do the messages of torch's Muon for them take in a
    step, if all go over the cards in 16 bits?"""
    ranks, card = 64, rates.between(hardware.link("infiniband-400g"))
    square = _WIDE[0] ** 2 * (ranks - 1) / ranks
    tall, wide = (sum(formulas.muon_by_products(*shape, ranks)) / square for shape in (_TALL, _WIDE))
    sent = 2 * _BLOCKS * sum(formulas.muon_dtensor(*shape, ranks) for shape in _MLP)
    owned = 2 * _BLOCKS * formulas.muon_owned(sum(map(math.prod, _MLP)), ranks)
    return sent / card, f"""Count in squares of 4,096², times 63/64. In a round a wide matrix gathers itself twice and a
        square once, 2 · 3.5 + 1 = {wide:g}; a tall one all-reduces a square twice, and each all-reduce sends it twice,
        {tall:g}. A block sends 2 · {tall:g} + {wide:g} = {2 * tall + wide:g} in each of 5 rounds, and 32 blocks send
        {sent / 1e9:.1f} GB, which takes {sent / card:.2f} s. With an owner for each matrix a GPU would send
        {owned / 1e9:.2f} GB, in {1e3 * owned / card:.0f} ms."""  # fmt: skip


@problem("GB/s")
def _inside_or_across():
    """Eight nodes of eight GPUs (636 TFLOP/s each) train Llama 3 8B with ShardedMuon. The matrices of its blocks have
    6.98 billion parameters, and the iteration takes 6.66·10¹⁴ operations for them. Nothing hides; leave NVLink out. Up
    to which rate of a node's card is the optimizer's step shorter with HSDP, sharded inside a node, than sharded over
    all 64 GPUs?"""
    hosts, each, rate = 8, 8, rates.matrix(hardware.gpu("H100"))
    shapes = _BLOCKS * (_MLP + _ATTENTION)
    flops = sum(formulas.newton_schulz_flops(*shape) for shape in shapes)
    inside, everywhere = (flops / rate / ranks for ranks in (each, each * hosts))
    sent = 2 * formulas.muon_across(sum(map(math.prod, shapes)), hosts)
    card = sent / (inside - everywhere)
    return card / 1e9, f"""Under HSDP 8 GPUs share the work, which takes {1e3 * inside:.0f} ms, and all 64 would need
        {1e3 * everywhere:.0f} ms. For that gain of {1e3 * (inside - everywhere):.0f} ms, 2 · 7/8² · Ψ numbers of 2
        bytes leave each node, {sent / 1e9:.2f} GB. A card carries them in that time at {card / 1e9:.1f} GB/s. So the
        optimizer's step is shorter with HSDP on cards of 100 Gbit/s. On cards of 400 Gbit/s, of which 24 GB/s are
        reached, the two hardly differ."""  # fmt: skip
