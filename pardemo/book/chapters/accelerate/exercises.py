"""The exercises of this chapter, and what checks an answer to each."""

import hashlib
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pardemo.book.page.exercises import TIMEOUT_S, Mistake, call, exercise, fresh_seed, on_ranks
from pardemo.meters import WireMeter
from pardemo.small_models import gpt
from pardemo.world import World
from pardemo.world.errors import RankFailed

WIDTH = 512
PEERS = ("pardemo.peers.accelerate.training", "pardemo.peers.accelerate.scripts.train_accelerate")


def check_config(function: Callable[[], dict[str, Any]]) -> str:
    """``function()`` is an Accelerate configuration for FSDP2 on two processes in bf16, a shard per ``Block``."""
    from pardemo.peers.accelerate import config_checks
    from pardemo.peers.accelerate.configurations import Configuration, write

    config = call(function)
    if not isinstance(config, dict):
        raise Mistake(f"A dictionary of keys and values is asked for, not {type(config).__name__}.")
    if config.get("num_processes") != 2:
        raise Mistake(f"Two processes are asked for: num_processes is {config.get('num_processes')!r}.")
    with tempfile.TemporaryDirectory() as folder:
        try:
            path = write(Path(folder) / "yours.yaml", config)
            environment = config_checks.environment(path)
        except ValueError as error:
            raise Mistake(f"It is refused: {error}.") from None
        if environment.get("FSDP_VERSION") != "2":
            raise Mistake("That is not FSDP2: fsdp_config needs fsdp_version: 2, for Accelerate's default is 1.")
        with World(2, preload=PEERS, timeout_s=2 * TIMEOUT_S) as world:
            try:
                units = world.run(_units, environment, Configuration("fsdp2", 2, "bf16").expected())
            except RankFailed as error:
                raise Mistake(f"It starts, but {error.first[1].message}.") from None
    if min(units) < 3:  # the whole model, and each of two blocks
        raise Mistake(
            "It runs, but the model is one single shard: all of it is gathered at once. Name the layer class: "
            "fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap Block."
        )
    return f"Right: two processes trained in bf16, the model in {units[0]} units."


def _units(environment: dict[str, str], expected: dict[str, Any]) -> int:
    from torch.distributed.fsdp import FSDPModule

    from pardemo.peers.accelerate import training as accelerate
    from pardemo.peers.accelerate.scripts import train_accelerate

    with accelerate.as_launched(environment):
        model, *_ = next(train_accelerate.train(train_accelerate.parse(["--steps", "1"])))
        accelerate.assert_runs(accelerate.what_runs(model), expected)
        return sum(isinstance(module, FSDPModule) for module in model.modules())


CASES = {
    "equal": "All ranks hold the same parameters.",
    "one differs": "On rank 2 one element of the last parameter is another.",
    "swapped": "On rank 1 two elements have changed places, so that a sum does not tell.",
    "opposite": "Ranks 1 and 2 are as far from rank 0, in opposite directions, so that a mean does not tell.",
    "half precision": "All ranks hold the same parameters, in bf16.",
}


def check_in_step(function: Callable[[nn.Module], bool]) -> str:
    """``function(model)`` tells on every rank alike whether all ranks' parameters are equal, for few bytes."""
    for case, words in CASES.items():
        verdicts, sent, changed = zip(*on_ranks(3, _try, function, case, fresh_seed()), strict=True)
        if len(set(verdicts)) > 1:
            raise Mistake(f"The ranks do not agree with one another: {list(verdicts)}. {words}")
        if verdicts[0] != (case in ("equal", "half precision")):
            raise Mistake(f"{words} Your answer: {verdicts[0]}.")
        if any(changed):
            raise Mistake("Right, but a parameter is another one afterwards: look at the model, and leave it alone.")
        if max(sent) > 1 << 16:
            raise Mistake(f"Right, but a rank sent {max(sent):,} bytes, as much as parameters: send a few numbers.")
    return "Right, for a few numbers on the wire: worth its line in every training script."


def _try(function: Callable[[nn.Module], bool], case: str, seed: int) -> str | tuple[bool, int, bool]:
    """The answer, bytes that this rank sent for it, and whether it has changed the model."""
    rank = dist.get_rank()
    model = gpt.seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4)), seed)
    last = list(model.parameters())[-2]
    first, second = random.Random(seed).sample(range(last.numel()), 2)
    with torch.no_grad():
        flat = last.view(-1)
        if case == "one differs" and rank == 2:
            flat[first] += 0.5
        if case == "swapped" and rank == 1:
            flat[first], flat[second] = flat[second].clone(), flat[first].clone()
        if case == "opposite":
            last += (0, 0.25, -0.25)[rank]
    if case == "half precision":
        model.to(torch.bfloat16)
    before = [parameter.clone() for parameter in model.parameters()]
    with WireMeter() as wire:
        answer = function(model)
    if not isinstance(answer, bool):
        return f"it should return True or False, not {answer!r}."
    return answer, wire.sent_bytes, not all(map(torch.equal, model.parameters(), before))


@exercise("config")
def my_config():
    """Most keys stand at the top: how many processes, which distributed_type, which precision. What FSDP needs
    stands under fsdp_config: its version, and how it finds the layers that become units of their own."""
    return {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "num_processes": 2,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            # Without a policy the whole model would be one unit, gathered all at once.
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "Block",
        },
    }


@exercise("in_step")
def my_in_step(model):
    """Different parameters can have the same sum and the same mean. Which short text changes when a single bit of
    them does?"""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        values = parameter.detach().cpu().contiguous()
        digest.update(values.view(torch.uint8).numpy().tobytes())  # as bytes: NumPy has no bf16
    digests = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    return len(set(digests)) == 1  # everybody sees all of them, so everybody answers alike
