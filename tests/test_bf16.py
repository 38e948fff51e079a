"""bf16 by way of fp32 against torch's own kernels, on a rank that is made to go that way whatever its processor."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch.nn import functional as F

from pardemo import MemoryMeter, World, compat
from pardemo.small_models import gpt
from pardemo.world import bf16

#: b, m, k, n; with rows alone, nothing to add up, and no result at all
SIZES = [(3, 5, 64, 7), (2, 64, 96, 33), (1, 1, 256, 1), (2, 4, 0, 3), (2, 0, 4, 3), (0, 4, 4, 4)]


@pytest.fixture(scope="module")
def rank():
    """Runs functions on a rank that multiplies bf16 by way of fp32."""
    with World(1) as world:
        world.run(bf16.through_fp32)
        yield lambda function, *args: world.run(function, *args)[0]


def whole(*shape, seed):
    """Whole numbers from −8 to 8 in bf16: sums of their products are exact in fp32, in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def laid_out(x, how):
    """The same numbers, otherwise in memory."""
    if how == "transposed":
        return x.mT.contiguous().mT
    if how == "with gaps":
        return torch.stack([x, -x], dim=-1).flatten(-2)[..., ::2]
    return x


def calls(b, m, k, n, how):
    """Multiplications with their result by the operators in place, which stay torch's own kernels."""
    x, y = laid_out(whole(b, m, k, seed=1), how), laid_out(whole(b, k, n, seed=2), how)
    rows, every, row = whole(b, m, n, seed=3), whole(m, n, seed=4), whole(n, seed=5)
    nan = torch.full((b, m, n), torch.nan).bfloat16()
    yield torch.bmm(x, y), nan.clone().baddbmm_(x, y, beta=0)
    yield x @ y, nan.clone().baddbmm_(x, y, beta=0)
    yield torch.baddbmm(rows, x, y), rows.clone().baddbmm_(x, y)
    yield (
        torch.baddbmm(every, x, y, beta=0.5, alpha=-2),
        every.expand(b, m, n).clone().baddbmm_(x, y, beta=0.5, alpha=-2),
    )
    yield torch.baddbmm(nan, x, y, beta=0), nan.clone().baddbmm_(x, y, beta=0)
    yield torch.bmm(x, y, out=torch.empty_like(rows)), nan.clone().baddbmm_(x, y, beta=0)
    yield torch.bmm(x, y, out=rows.mT.contiguous().mT), nan.clone().baddbmm_(x, y, beta=0)
    if not b:
        return
    x, y, rows, nan = x[0], y[0], rows[0], nan[0]
    yield torch.mm(x, y), nan.clone().addmm_(x, y, beta=0)
    yield torch.mm(x, y, out=torch.empty_like(rows)), nan.clone().addmm_(x, y, beta=0)
    yield torch.addmm(row, x, y), row.expand(m, n).clone().addmm_(x, y)
    yield torch.addmm(rows, x, y, beta=3, alpha=0.25), rows.clone().addmm_(x, y, beta=3, alpha=0.25)
    yield torch.addmm(row, x, y, out=torch.empty_like(rows)), row.expand(m, n).clone().addmm_(x, y)
    yield F.linear(x, y.T, row), row.expand(m, n).clone().addmm_(x, y)
    into = rows.clone()
    yield torch.addmm(into, x, y, out=into), rows.clone().addmm_(x, y)


@pytest.mark.parametrize("how", ["as made", "transposed", "with gaps"])
@pytest.mark.parametrize("sizes", SIZES)
def test_bit_for_bit_where_the_order_of_additions_makes_no_difference(rank, sizes, how):
    """Sums of whole numbers are exact in fp32 and longer than bf16: a second rounding would show."""

    def compare():
        done = bf16.multiplied()
        for ours, theirs in calls(*sizes, how):
            assert ours.dtype is torch.bfloat16
            assert torch.equal(ours, theirs)
        return bf16.multiplied() - done

    assert rank(compare) == (14 if sizes[0] else 7)


def test_sums_are_in_fp32_and_rounded_once(rank):
    """Of any numbers: half of the last bit of bf16, and what fp32 loses of sums of that length."""

    def compare():
        x, y = gpt.numbers(64, 512, seed=1).bfloat16(), gpt.numbers(512, 48, seed=2).bfloat16()
        exact, lost = x.double() @ y.double(), 512 * 2**-24 * (x.abs().double() @ y.abs().double())
        half_a_bit = 2.0 ** (exact.abs().log2().floor() - 8)
        for result in (x @ y, torch.empty(64, 48).bfloat16().addmm_(x, y, beta=0)):  # torch's own: as much
            assert ((result.double() - exact).abs() <= half_a_bit + lost).all()

    rank(compare)


def test_gradients_experts_and_what_else_multiplies(rank):
    """Backward passes, too, and operators that are made of these; as in fp32, rounded where bf16 rounds."""

    def compare():
        x, w = whole(4, 6, 8, seed=1).requires_grad_(), whole(5, 8, seed=2).requires_grad_()
        gradient = whole(4, 6, 5, seed=3)
        done = bf16.multiplied()
        F.linear(x, w).backward(gradient)
        assert bf16.multiplied() == done + 3
        wide = [one.detach().float().requires_grad_() for one in (x, w)]
        F.linear(*wide).backward(gradient.float())
        for one, in_fp32 in zip((x, w), wide, strict=True):
            assert torch.equal(one.grad, in_fp32.grad.bfloat16())
        made = {
            "einsum": lambda: torch.einsum("bik,jk->bij", x, w),
            "vmap": lambda: torch.vmap(lambda rows: rows @ w.T)(x),
            "grouped": lambda: F.grouped_mm(x.flatten(0, 1), whole(2, 8, 8, seed=4), offs=torch.tensor([8, 24]).int()),
            "checkpoint": lambda: torch.utils.checkpoint.checkpoint(F.linear, x, w, use_reentrant=False),
        }
        for name, multiply in made.items():
            done = bf16.multiplied()
            assert multiply().dtype is torch.bfloat16
            assert bf16.multiplied() > done, name
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(wide[0] @ wide[1].T, x @ w.T)

    rank(compare)


def others():
    """Of other dtypes, by each operator."""
    for dtype in (torch.float32, torch.float64, torch.float16, torch.complex64, torch.int64):
        x, y = (8 * gpt.numbers(3, 9, 17, seed=1)).to(dtype), (8 * gpt.numbers(3, 17, 9, seed=2)).to(dtype)
        z = (8 * gpt.numbers(3, 9, 9, seed=3)).to(dtype)
        yield from (x @ y, torch.baddbmm(z, x, y, beta=2, alpha=3), torch.bmm(x, y.mT.contiguous().mT, out=z.clone()))
        x, y, z = x[0], y[0], z[0]
        yield from (x @ y, torch.addmm(z[0], x, y), torch.addmm(z, x, y, beta=0), torch.mm(x, y, out=z.clone()))
        yield torch.addmm(z, x, y, beta=2, alpha=-1, out=z.T.contiguous().T)


def refused():
    """What torch says of factors that do not fit, and of a result of another size."""
    a, b = torch.ones(2, 3), torch.ones(4, 5)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = a.to(dtype), b.to(dtype)
        for call in (
            lambda x=x, y=y: torch.mm(x, y),
            lambda x=x, y=y: torch.mm(x[0], y),
            lambda x=x, y=y: torch.addmm(y[0], x, x.T),
            lambda x=x: torch.mm(x, x.T.double()),
            lambda x=x: torch.bmm(x[None], x[None]),
            lambda x=x: torch.bmm(x.expand(2, 2, 3), x.T.expand(3, 3, 2)),
            lambda x=x, y=y: torch.baddbmm(y[None], x[None], x.T[None]),
            lambda x=x: torch.mm(x, x.T, out=torch.empty(2, 2).half()),
        ):
            with pytest.raises((RuntimeError, IndexError)) as error:
                call()
            yield str(error.value)
    for dtype in (torch.float32, torch.bfloat16):
        yield str(torch.mm(a.to(dtype), a.T.to(dtype), out=torch.empty(0, dtype=dtype)))


def peak():
    """What a step of two layers in bf16 takes, by the meter."""
    net = gpt.seeded(lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))).bfloat16()
    x = gpt.numbers(128, 64).bfloat16()
    with MemoryMeter(net) as memory:
        net(x).sum().backward()
    return memory.figures()


def test_all_else_is_as_before():
    """Other dtypes to the last bit, torch's errors word by word, and the bytes that a meter counts."""

    def before_and_after():
        before = [list(others()), list(refused()), peak()]
        bf16.through_fp32()
        return before, [list(others()), list(refused()), peak()]

    with World(1) as world:
        (numbers, errors, memory), (numbers_after, errors_after, memory_after) = world.run(before_and_after)[0]
    assert len(numbers) == 40
    assert all(map(torch.equal, numbers, numbers_after))
    assert errors == errors_after
    assert memory == memory_after


@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() != "x86_64", reason="oneDNN is held back by its variable for these processors")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_ranks_go_that_way_where_the_processor_is_slow():
    """And torch's own count of allocated bytes is that of its loop: a dry run knows of no copies."""
    program = """if True:
        import torch
        from pardemo import World
        from pardemo.book.run import doctor
        from pardemo.planner.dry_run import measured_peak
        from pardemo.world import bf16

        def on_rank():
            x = torch.ones(2, 2).bfloat16()
            return bf16.slow(), (x @ x).sum().item(), bf16.multiplied()

        def step(mark):
            layer, x = torch.nn.Linear(64, 256).bfloat16(), torch.ones(128, 64).bfloat16()
            with mark(measured_peak.MARK):
                layer(x).backward(torch.ones(128, 256).bfloat16())

        if __name__ == "__main__":
            assert bf16.slow()
            with World(1) as world:
                print(*world.run(on_rank)[0])
            by_the_loop = measured_peak.measure_peak_bytes(step)
            bf16.through_fp32()
            assert measured_peak.measure_peak_bytes(step) == by_the_loop > 0
            assert bf16.multiplied() == 2
            print(next(row["found"] for row in doctor.examine() if row["what"] == "bf16"))
    """
    held_back = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", program], env=held_back, capture_output=True, text=True, check=True)
    on_rank, found = ran.stdout.splitlines()
    assert on_rank == "True 8.0 1"
    assert "through fp32" in found


def test_where_it_is_fast_nothing_is_replaced():
    if bf16.slow():
        pytest.skip("this processor has no fast bf16")

    def on_rank():
        x = torch.ones(2, 2).bfloat16()
        bf16.through_fp32_where_slow()
        return (x @ x).sum().item(), bf16.multiplied()

    with World(1) as world:
        assert world.run(on_rank) == [(8.0, 0)]
    assert compat.bf16_in_onednn()
