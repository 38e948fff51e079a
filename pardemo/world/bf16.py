"""Matrix multiplications of bf16 by way of fp32, on a CPU that has no fast ones of its own.

torch gives a bf16 matrix multiplication to oneDNN where the processor has AVX-512 (on Arm: bf16), and else to a plain
loop, which takes some 40 times as long as fp32. :func:`through_fp32` puts kernels in that loop's place: they copy the
factors to fp32, multiply there and round the result once to bf16. The loop and oneDNN add in fp32 and round once, too:
the results differ by the order of the additions alone.

The kernels stand below autograd, DTensor and every dispatch mode: backward passes have them as well, and meters see
the operation and not its copies. numpy allocates the copies, so that torch's own count of allocated bytes is without
them, too. Other dtypes go on to torch's own kernels; GPUs never come here.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pardemo import compat

_aten = torch.ops.aten
#: torch's matrix multiplications, by the dimensions of their factors; linear, matmul, einsum, grouped_mm call these.
#: The last of a row is the same kernel in place, which stays torch's own: the others are made of it. Unlike
#: :func:`torch.library.get_kernel`, it lets other threads of Python run meanwhile.
_OPERATORS = {2: ("mm", "addmm", _aten.addmm_.default), 3: ("bmm", "baddbmm", _aten.baddbmm_.default)}

_kernels: list[torch.library.Library] = []
_multiplied = 0


def slow() -> bool:
    """Whether torch multiplies bf16 matrices in its plain loop here: oneDNN is asked, nothing is timed."""
    return not (torch.backends.mkldnn.is_available() and compat.bf16_in_onednn())


def through_fp32() -> None:
    """Has this process, and those that it forks, multiply bf16 matrices by way of fp32 from now on."""
    if _kernels:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's kernels are replaced, which is meant
        for dimensions, (plain, adding, in_place) in _OPERATORS.items():
            for name in (plain, adding, f"{plain}.out", f"{adding}.out"):
                library.impl(name, _kernel(name, dimensions, in_place, adds=name.startswith(adding)), "CPU",
                             with_keyset=True)  # fmt: skip
    _kernels.append(library)


def through_fp32_where_slow() -> None:
    """Calls :func:`through_fp32` where bf16 is :func:`slow`, and does nothing elsewhere."""
    if slow():
        through_fp32()


def multiplied() -> int:
    """Counts the matrix multiplications of bf16 that this process has made by way of fp32."""
    return _multiplied


def _kernel(name: str, dimensions: int, in_place: Callable[..., Tensor], adds: bool) -> Callable[..., Tensor]:
    """What stands for the operator ``name``, whose factors have that many dimensions."""
    torchs_own = torch.library.get_kernel(f"aten::{name}", "CPU")

    def kernel(keys: Any, *operands: Tensor, out: Tensor | None = None, **scales: float) -> Tensor:
        x, y = operands[-2:]  # [.., m, k], [.., k, n]
        if not _fit(operands, dimensions, out):
            return torchs_own.call_boxed(keys, *operands, **scales, **({} if out is None else {"out": out}))
        with compat.without_functions_of_torch():
            low, shape, product = x.dtype is torch.bfloat16, (*x.shape[:-1], y.shape[-1]), out
            if low:
                product, x, y = _fp32(shape), _in_fp32(x), _in_fp32(y)
            elif product is None:
                product = x.new_empty(shape)
            if not adds:
                scales = {"beta": 0}  # what is there is not read
            elif scales.get("beta", 1) != 0:
                product.copy_(operands[0].expand(shape))
            in_place(product, x, y, **scales)
            if not low:
                return product
            global _multiplied
            _multiplied += 1
            return product.bfloat16() if out is None else out.copy_(product)

    return kernel


def _fp32(shape: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.empty(shape, np.float32))


def _in_fp32(x: Tensor) -> Tensor:
    """A copy of matrices, as they lie in memory where that is by columns."""
    if x.mT.is_contiguous():
        return _fp32(x.mT.shape).copy_(x.mT).mT
    return _fp32(x.shape).copy_(x)


def _fit(operands: tuple[Tensor, ...], dimensions: int, out: Tensor | None) -> bool:
    """Whether factors and result have the sizes and the dtype of one multiplication.

    Where they have not, torch raises its error, or gives ``out`` another size.
    """
    x, y = operands[-2:]
    return (
        x.dim() == y.dim() == dimensions
        and x.shape[:-2] == y.shape[:-2]
        and x.shape[-1] == y.shape[-2]
        and all(tensor.dtype is x.dtype for tensor in operands)
        and (out is None or (out.dtype is x.dtype and out.shape == (*x.shape[:-1], y.shape[-1])))
    )
