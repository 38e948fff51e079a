"""Gives what GPUs and links reach of their data sheets' rates: one table for the book, its rule and the planner.

A data sheet's rate is an upper bound. Three things take off it: large matrix multiplications alone reach 0.7 to 0.9 of
the operations; inside a training step, where the GPU is warm and its power is shared, again less
(:class:`pardemo.planner.hardware.Gpu` has both, with their sources); and a collective reaches a part of a link's rate.
"""

from typing import NamedTuple

from pardemo.planner.hardware import Gpu

#: Of a link's rate, what large messages and collectives of few hosts reach: 370 of an H100's 450 GB/s by nccl's ring
#: (NVIDIA/nccl-tests issue 212), at most 370 in JAX's scaling book.
LINK_SHARE = 0.8
#: Of that, what gathers and reductions over many hosts reach: fitted to torchtitan's published runs.
MANY_HOSTS = 0.6
#: GPU -> bytes/s of an all-reduce that NVSwitch adds up on its way (NVLink SHARP), as bus bandwidth; nccl's default
#: inside a node of H100s (issue 212 again). Gathers and reduce-scatters do not gain as much.
SHARP = {"H100": 480e9, "H200": 480e9}


class Rates(NamedTuple):
    """Rates of one GPU: operations/s of bf16 matrix multiplications, bytes/s one way."""

    sheet: float
    alone: float
    in_a_step: float
    link: float
    inside: float


def rates(gpu: Gpu) -> Rates:
    """Lists a GPU's rates: operations/s by data sheet, alone, in a step; its link's bytes/s by data sheet, reached."""
    return Rates(gpu.flops, gpu.reachable, matrix(gpu), gpu.link_bytes_per_s, inside(gpu))


def matrix(gpu: Gpu) -> float:
    """F: operations/s that large matrix multiplications reach inside a training step."""
    return gpu.reachable * gpu.sustained


def inside(gpu: Gpu) -> float:
    """B inside a node: bytes/s that a ring over its GPUs reaches, each GPU one way."""
    return LINK_SHARE * gpu.link_bytes_per_s


def between(link: float) -> float:
    """B between nodes: bytes/s that gathers and reductions over many nodes reach of ``link``, a data sheet's rate."""
    return MANY_HOSTS * LINK_SHARE * link
