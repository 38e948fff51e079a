"""Predicts, for offloading, the widths from which it hides, and what a step waits for."""

from collections.abc import Iterable


def offload_thresholds(name: str, flops: float, link: float) -> dict[str, str]:
    """A row of a table: from which h + s/6 on a GPU of ``flops`` operations/s hides copies to the host.

    A block in bf16 keeps 34·b·s·h bytes and computes 24·b·s·h²·(1 + s/6h) operations forward; ``link`` carries bytes/s
    each way.
    """
    ratio = flops / link  # operations a byte
    return {
        "GPU": name,
        "F/B": f"{ratio:,.0f}",
        "all hides": f"{34 / 24 * ratio:,.0f}",
        "beats recomputing": f"{17 / 24 * ratio:,.0f}",
        "checkpoint": f"{2 / 24 * ratio:,.0f}",
    }


def offloaded_step_s(blocks: int, forward_s: float, travel_s: float) -> float:
    """Seconds of a step whose blocks' activations travel for ``travel_s`` each way; backward is twice forward.

    The last block's activations stay, and at most one block's are under way while another one computes.
    """
    forward = (blocks - 2) * max(0.0, travel_s - forward_s)
    backward = (blocks - 1) * max(0.0, travel_s - 2 * forward_s)
    return 3 * blocks * forward_s + forward + backward


def offloaded_steps_s(blocks: int, forward_s: float, travels: Iterable[str]) -> dict[str, float]:
    """Seconds of a step by way: all kept, recomputed, and offloaded with each travel, in forward passes."""
    ways = {"keep": 3 * blocks * forward_s, "recompute": 4 * blocks * forward_s}
    offloaded = {
        f"offload, {travel}·τF": offloaded_step_s(blocks, forward_s, float(travel) * forward_s) for travel in travels
    }
    return ways | offloaded


def adam_on_host_s(layers: int, forward_s: float, gradient_s: float, update_s: float) -> dict[str, float]:
    """Predicts a step's seconds with Adam on the host: the computation, and each thing that it waits for.

    Args:
        gradient_s: of one layer's gradient on the link, and of its parameters on the way back.
        update_s: of Adam on the host.
    """
    out = gradient_s + (layers - 1) * max(0.0, gradient_s - 2 * forward_s)
    return {
        "computation": 3 * layers * forward_s,
        "gradients out": out,
        "Adam": update_s,
        "parameters back": layers * gradient_s,
    }


def tokens_for_adam_on_host(gpus: int, flops: float, link: float, host_memory: float) -> dict[str, str]:
    """A row of a table: the tokens of a step at which Adam on the host takes as long as the computation, or a tenth.

    Args:
        gpus: of a node. flops: operations/s that each reaches. link: bytes/s between each and the host.
        host_memory: bytes/s of the host's memory, which all of them share.
    """
    seconds = 4 / (gpus * link) + 30 / host_memory  # for each parameter
    tokens = seconds * gpus * flops / 6
    return {
        "GPUs": f"{gpus}",
        "as long as the computation": f"{tokens:,.0f} tokens",
        "a tenth of it": f"{10 * tokens:,.0f} tokens",
        "of that Adam on the CPU": f"{30 / host_memory / seconds:.0%}",
    }
