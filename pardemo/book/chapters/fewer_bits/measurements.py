"""Measures tensors of a trained model, a task with rare words and DeepSpeed's ZeRO++; and reads what NVIDIA has
published."""

from dataclasses import replace

import torch
from torch import nn

from pardemo import project
from pardemo.meters import WireMeter
from pardemo.planner.layouts.published import loaders
from pardemo.planner.layouts.step import predict_step
from pardemo.small_models import gpt
from pardemo.world.rank import device

WORDS, CLASSES, DOCUMENTS, LENGTH = 256, 8, 512, 16


def tensors_of_a_trained_gpt(steps: int = 100) -> dict[str, torch.Tensor]:
    """Weights, inputs and the output's gradients of the last MLP's second layer, of a GPT after some steps of AdamW."""
    model, seen = gpt.seeded(lambda: gpt.GPT(128, 64, 2, 4, 32)), {}
    layer = model.blocks[-1].mlp.second

    def look(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        output.retain_grad()
        seen["activations"], seen["output"] = inputs[0].detach(), output

    layer.register_forward_hook(look)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # layers this small wait for a second thread longer than it helps
    try:
        for step in range(steps):
            optimizer.zero_grad()
            model.loss(gpt.text(8, 33, 128, seed=step)).backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return {"parameters": layer.weight.detach(), "activations": seen["activations"], "gradients": seen["output"].grad}


def documents(rank: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's documents, as counts of words [512, 256], and the class of each [512]; few words are frequent.

    The nth most frequent word is n times as rare as the first (Zipf), and a class depends on rare words as much as on
    frequent ones. Words stand in no order, so that both share a block.
    """
    dice = torch.Generator().manual_seed(0)
    often = (1 / torch.arange(1, WORDS + 1))[torch.randperm(WORDS, generator=dice)]
    drawn = torch.multinomial(often.expand(ranks * DOCUMENTS, -1), LENGTH, True, generator=dice)
    counts = torch.zeros(ranks * DOCUMENTS, WORDS).scatter_add_(1, drawn, torch.ones(drawn.shape))
    teacher = torch.randn(WORDS, CLASSES, generator=dice) * (often.mean() / often).sqrt()[:, None]
    mine = slice(rank * DOCUMENTS, (rank + 1) * DOCUMENTS)
    return counts[mine].to(device()), (counts @ teacher).argmax(1)[mine].to(device())


def deepspeed_step(**options: object) -> tuple[str, int]:
    """Returns why DeepSpeed's ZeRO-3 refuses keys of ``zero_optimization``, "" if not, and the bytes of a step.
    Collective."""
    from pardemo.peers.deepspeed import engine as peer

    width = 512
    settings = peer.zero_settings(3, **(peer.ALWAYS_SHARDED | options))
    try:
        engine = peer.engine(gpt.linear_stack(width, 4).to(device()), settings)
    except ValueError as error:
        peer.give_back_linear()
        return str(error), 0
    x = gpt.numbers(8, width, dtype=torch.bfloat16).to(device())
    for _ in range(3):  # opens the connections, and learns the order of the layers
        with WireMeter() as wire:
            engine.backward(engine(x).square().mean())
            engine.step()
    peer.close(engine)
    return "", wire.sent_bytes


def speeds_by_precision() -> dict[str, dict[str, tuple[float | None, float]]]:
    """Model -> precision -> tokens a second of a GB300: published by NVIDIA (None where nothing is), and planned.

    The layout is that of the run with the fewest bits; a run with another one is left out.
    """
    file = project.root() / "data" / "published_runs" / "megatron_bridge.csv"
    runs = [run for run in loaders.read(file) if run.job.machine.gpu.name == "GB300"]
    speeds: dict[str, dict[str, tuple[float | None, float]]] = {}
    for model, release, title in (("deepseek-v3", "25.11", "DeepSeek-V3"), ("llama3-70b", "26.02", "Llama 3 70B")):
        rows = [run for run in runs if run.job.shape.name == model and run.source.endswith(release)]
        by_precision = {run.job.precision: run for run in rows}
        last = by_precision.get("nvfp4", by_precision["mxfp8"])
        tokens = last.layout.batch * last.job.sequence / last.job.machine.gpus
        speeds[title] = {}
        for precision in ("bf16", *(name for name in ("mxfp8", "nvfp4") if name in by_precision)):
            run = by_precision.get(precision)
            same = run is not None and run.layout == last.layout
            planned = tokens / predict_step(replace(last.job, precision=precision), last.layout).seconds
            speeds[title][precision] = tokens / run.seconds if same else None, planned
    return speeds
