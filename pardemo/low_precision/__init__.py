"""Numbers in fewer bits: formats with their scales, rounding by chance, and collectives that send codes.

- :func:`encode`, :func:`decode`, :func:`rounded`: int8 in blocks, FP8 (E4M3, E5M2), MXFP8, NVFP4 (:mod:`.formats`).
- :func:`to_bf16_by_chance`: stochastic rounding.
- :func:`quantised_all_gather`, :func:`quantised_reduce_scatter`: with the error kept for the next time, or not.
"""

from pardemo.low_precision.collectives import quantised_all_gather, quantised_reduce_scatter
from pardemo.low_precision.formats import FORMATS, Encoded, decode, encode, rounded, to_bf16_by_chance

__all__ = [
    "FORMATS",
    "Encoded",
    "decode",
    "encode",
    "quantised_all_gather",
    "quantised_reduce_scatter",
    "rounded",
    "to_bf16_by_chance",
]
