"""Formats in few bits against their definitions, and collectives that send them against the plain sums."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pardemo import WireMeter
from pardemo.low_precision import (
    FORMATS,
    decode,
    encode,
    quantised_all_gather,
    quantised_reduce_scatter,
    rounded,
    to_bf16_by_chance,
)
from pardemo.small_models import gpt

#: Half a step between neighbours, of a number (FP formats) or of the block's largest (int8); and bits of a number.
HALF_STEP = {"int8": 0.5 / 127, "e4m3": 2**-4, "e5m2": 2**-3, "mxfp8": 2**-3, "nvfp4": 0.25}
BITS = {"int8": 8.25, "e4m3": 8, "e5m2": 8, "mxfp8": 8.25, "nvfp4": 4.5}


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_format_loses_and_takes(name):
    x = gpt.numbers(64, 1024, seed=1)
    back = rounded(x, name)
    block = FORMATS[name].block or x.numel()
    largest = x.view(-1, block).abs().amax(-1, keepdim=True).expand(-1, block).reshape(x.shape)
    allowed = HALF_STEP[name] * (largest if name == "int8" else x.abs().clamp_min(largest / 100))
    if name != "nvfp4":  # whose steps are up to a third
        assert ((back - x).abs() <= 1.001 * allowed).all()
    assert (back - x).norm() / x.norm() < {"int8": 0.01, "nvfp4": 0.12}.get(name, 0.06)
    assert encode(x, name).nbytes == pytest.approx(BITS[name] / 8 * x.numel(), abs=4)
    assert torch.equal(rounded(back, name), back) or name == "nvfp4", "what it can say it says again"


def test_by_hand():
    x = torch.tensor([448.0, -1.0, 17.0, 0.0])  # E4M3 has 16 and 18, and 17 goes to the even one
    assert rounded(x, "e4m3").tolist() == [448, -1, 16, 0]
    x = torch.zeros(32)
    x[:3] = torch.tensor([500.0, 1.0, 0.3])
    assert encode(x, "mxfp8").parts[1].item() == 127, "⌊log₂ 500⌋ − 8 = 0"
    assert rounded(x, "mxfp8")[:3].tolist() == [448, 1, 0.3125], "500 is cut off"
    x = torch.zeros(16)
    x[:9] = torch.tensor([6, -6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]) * 448
    assert (rounded(x, "nvfp4")[:9] / 448).tolist() == [6, -6, 0, 1, 1, 2, 2, 4, 4], "the middle to the even code"
    assert rounded(torch.tensor([127.0, 1.4, -0.6]), "int8").tolist() == [127, 1, -1]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen(name, wrong):
    x = gpt.numbers(300, seed=2)
    x[17] = wrong
    back = rounded(x, name)
    assert back[17].isnan()
    assert not back[17].isfinite()
    if name in ("int8", "mxfp8"):
        assert back[128:].isfinite().all(), "other blocks are as they were"


@given(
    shape=st.lists(st.integers(0, 40), min_size=1, max_size=2), name=st.sampled_from([*FORMATS]),
    power=st.integers(-30, 30),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_any_shape_and_size(shape, name, power, dtype):
    x = (gpt.numbers(*shape, seed=3) * 2.0**power).to(dtype)
    back = rounded(x, name)
    assert back.shape == x.shape
    assert back.dtype == dtype
    assert back.isfinite().all()
    assert (back - x).abs().sum() <= 0.3 * x.abs().sum()
    assert (rounded(torch.zeros_like(x), name) == 0).all()


def test_rounding_by_chance_is_right_on_average():
    x = torch.full((100_000,), 1 + 2**-10)  # an eighth of the way from 1 to its neighbour
    torch.manual_seed(0)
    found = to_bf16_by_chance(x).float()
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert found.double().mean().item() == pytest.approx(1 + 2**-10, abs=1e-4)
    assert (x.bfloat16() == 1).all()
    assert to_bf16_by_chance(-x).double().mean().item() == pytest.approx(-1 - 2**-10, abs=1e-4)
    ends = torch.tensor([math.inf, -math.inf, 0.0, -2.5])
    assert torch.equal(to_bf16_by_chance(ends), ends.bfloat16())
    assert to_bf16_by_chance(torch.tensor([math.nan])).isnan().all()
    with pytest.raises(TypeError, match=r"fp32.*bf16.*torch\.float64"):
        to_bf16_by_chance(x.double())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("shape", "scale"), [((96, 8), 1.0), ((5,), 1e-6), ((3, 7, 11), 1e6)])
def test_collectives_in_few_bits(rank, world_size, name, shape, scale):
    shards = [scale * gpt.numbers(*shape, seed=r) for r in range(world_size)]
    gathered = quantised_all_gather(shards[rank], format=name)
    assert torch.equal(gathered, torch.stack([rounded(shard, name) for shard in shards]))
    whole = [scale * gpt.numbers(shape[0] * world_size, *shape[1:], seed=10 + r) for r in range(world_size)]
    mine = quantised_reduce_scatter(whole[rank], format=name)
    expected = sum(rounded(each.chunk(world_size)[rank], name) for each in whole)
    assert gpt.relative_error(mine, expected) < 1e-6


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["int8", "mxfp8", "nvfp4"])
def test_they_send_the_codes_and_no_more(rank, world_size, name):
    part = 1 << 15
    with WireMeter() as wire:
        quantised_reduce_scatter(gpt.numbers(part * world_size, seed=rank), format=name)
    assert wire.sent_bytes == pytest.approx((world_size - 1) * part * BITS[name] / 8, rel=0.05)


@pytest.mark.ranks(2)
def test_what_was_lost_is_added_the_next_time(rank, world_size):
    """Of a sum over many steps what is left is the last step's error, and not all of them."""
    x = gpt.numbers(64, seed=rank) + 0.3
    error, kept, forgotten = torch.zeros(64), torch.zeros(32), torch.zeros(32)
    for _ in range(50):
        kept += quantised_reduce_scatter(x, format="nvfp4", error=error)
        forgotten += quantised_reduce_scatter(x, format="nvfp4")
    right = 50 * sum(gpt.numbers(64, seed=r) + 0.3 for r in range(2)).chunk(2)[rank]
    assert (kept - right).norm() < 0.1 * (forgotten - right).norm()


@pytest.mark.ranks(2)
def test_what_cannot_be_is_one_line(rank, world_size):
    x = torch.zeros(4)
    for message, call in (
        ("no format 'fp6'; there are int8, e4m3", lambda: encode(x, "fp6")),
        ("no format 'fp6'", lambda: quantised_reduce_scatter(x, format="fp6")),
        (r"a tensor \(3,\) does not divide into 2 parts", lambda: quantised_reduce_scatter(x[:3])),
        (r"error is fp32 \(4,\), as the tensor, not torch.float32 \(2,\)",
         lambda: quantised_reduce_scatter(x, error=x[:2])),
        ("the ranks are at different exchanges", lambda: quantised_all_gather(x, format=["int8", "e4m3"][rank])),
        ("the ranks' tensors differ", lambda: quantised_all_gather(torch.zeros(4 + rank))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"torch\.int32"):
        encode(x.int(), "int8")
    assert decode(encode(torch.zeros(0), "int8")).shape == (0,)
