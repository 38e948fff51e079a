"""What training engines do with what they send and offload: DeepSpeed 0.19.8's stages, FSDP2, DDP."""

HIDDEN = 0.8  # of the computation beside which something is sent, where an engine does so at all
BACKWARD = 2 / 3  # of a micro-batch's time
#: A host's, of all its GPUs together, as DeepSpeed offloads: parameter by parameter, one thing after the other. PCIe
#: and memory could do several times as much. From LLaMA-7B on 8 A800s (2.3 and 2.2 times the step without offload) and
#: Falcon-7B on 8 A100s (DeepSpeed issue 3901).
HOST_COPY_BYTES_PER_S = 16e9
HOST_ADAM_PARAMS_PER_S = 1.3e9


def stage_of(engine: str) -> int | None:
    """DeepSpeed's ZeRO stage of ``zero-2``; None for other engines."""
    return int(engine[-1]) if engine.startswith("zero-") else None


def reductions(engine: str, accumulation: int) -> int:
    """How often a step of so many micro-batches reduces gradients: stages 0 and 1, and DDP, wait for the last one."""
    return 1 if stage_of(engine) in (0, 1) or engine == "plain" else accumulation


def overlaps(engine: str, setting: bool | None = None) -> bool:
    """Whether the engine sends while it computes: FSDP2 does, DeepSpeed where ``overlap_comm`` (``setting``) says so.

    Left out it is DeepSpeed's default: stage 3 alone. Stage 0 reduces after the backward pass whatever it says. The
    plain engine sends nothing here.
    """
    stage = stage_of(engine)
    if stage is None:
        return engine == "fsdp2"
    return stage > 0 and (stage == 3 if setting is None else bool(setting))


def exposed(engine: str, exchange: float, busy: float, setting: bool | None = None) -> float:
    """Of the seconds that a micro-batch's exchange takes, those that its ``busy`` seconds of computation do not cover.

    ``setting``: DeepSpeed's ``overlap_comm``.
    """
    if not overlaps(engine, setting):
        return exchange
    beside = busy * (BACKWARD if stage_of(engine) in (1, 2) else 1)  # stages 1 and 2 send gradients alone
    return max(exchange - HIDDEN * beside, (1 - HIDDEN) * exchange)


def offload_seconds(
    offload: str, updated: float, params: float, rounds: int, accumulation: int, checkpointing: bool
) -> float:
    """What DeepSpeed's offload adds to a step; its hosts' GPUs share memory, links and cores, and nothing overlaps.

    Of each updated parameter: with every micro-batch the gradients so far to the GPU and back, 2 bytes each way (stages
    2 and 3), at the end the sum in fp32, 4 bytes, and the new parameter back, 2. Adam's update once. Offloaded
    parameters come with each pass of a micro-batch: forward, recomputation where there is one, backward.

    Args:
        offload: ``none``, ``optimizer`` or ``optimizer+parameters``. updated, params: parameters of one host's GPUs
            that are updated, and all. rounds: as :func:`reductions`.

    Source: ``async_accumulate_grad_in_cpu_via_gpu`` and ``partition_grads`` of DeepSpeed 0.19.8.
    """
    if offload == "none":
        return 0.0
    copied = updated * (4 * (rounds - 1) + 4 + 2)
    if offload == "optimizer+parameters":
        copied += (2 + checkpointing) * accumulation * 2 * params
    return copied / HOST_COPY_BYTES_PER_S + updated / HOST_ADAM_PARAMS_PER_S
