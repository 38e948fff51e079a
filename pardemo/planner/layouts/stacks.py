"""Constants of training programs, with a physical meaning, fitted to their published runs.

``python tests/calibration/fit.py`` fits those of each program to ``data/published_runs`` again and prints them beside
those of ``stacks.toml``, which are its results rounded. Of Megatron-core it fits eleven; its products, small, whole,
cut, start, hides_tensor, hides_experts, hidden and launch_s, and how much of its rate a Blackwell sustains, were set by
hand before that, and which terms the model has was decided with all rows in view.

A program becomes faster from release to release, so a program may have constants by release: those of ``release`` in
``stacks.toml``, and for each later one that was fitted the constants that differ from the one before. ``stack("NAME")``
has the newest, ``stack("NAME@26.04")`` those that stand for that release.
"""

import difflib
import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pardemo.planner.layouts.layout import Layout


@dataclass(frozen=True)
class Stack:
    """A training program.

    Of time:
        products: of the rate of large matrix multiplications, what its products reach in a step.
        small: rows, columns or depth that a product loses to tiles that are not full and to its start.
        fp8, fp4: of what the data sheet says products in 8 and in 4 bits are quicker than bf16's, what they reach.
        casts: bytes through memory of each number that is converted to them.
        graphs: whether CUDA graphs start kernels of models with experts.
        attention: of FlashAttention-2's rate. scores: times that scores go through memory where it is not fused.
        whole, cut: times that an activation of the hidden width goes through memory in a layer's forward pass, by
            operations that tensor parallelism does not cut, and that it cuts.
        layer_s: seconds of both passes of a micro-batch through a layer on one rank, its traffic left out, where they
            have been measured: in place of products, attention, memory and launches. It holds for the micro-batch, the
            sequence and the tensor parallelism that it was measured with; full recomputation adds a third.
        launch_s: host time for a layer's kernels, forward and backward; launch_rank_s: more of it for each further
            tensor-parallel rank; crossing_rank_s: the same for each rank where a pipeline spans hosts. gradient_s: of
            a trained tensor's gradient, where DeepSpeed's stages handle it.
        start: of the machine's latency, what a tensor-parallel exchange waits; crossing_s: more of it where its ranks
            are on several hosts.
        routed, routed_fused: times that a token on its way to an expert and back goes through memory, in a pass, sorted
            for NCCL or by a fused kernel. dispatch: which of the two is usual.
        expert_launch_s: host time for a layer's experts, both passes, unless a fused kernel sends tokens and graphs
            start the rest. hides_experts: of an overlapped exchange of tokens, what is hidden; hides_routed:
            the same of the tokens' way through memory. beside: whether another micro-batch's computation usually runs
            beside the exchange, so that it is overlapped.
        biased: times that outputs of experts with biases go through memory once more. filtered: times that a Mamba
            mixer's inner width does, with its scan. adapters: times that LoRA's adapters go through memory, of what
            they move where they are operations of their own of 16 bits.
        ends_as_layers: whether embedding and loss may take a layer's place in a pipeline.
        send_s: host time of a message between stages.
        hides_tensor: of tensor-parallel traffic, what is hidden (asynchronous tensor parallelism).
        hidden: of the computation beside which data-parallel traffic runs, what hides it; hides_shards: whether that
            holds for sharded states too.
        reduce_s: of an exchange of gradients, for each doubling of ranks; reduce_share: of the links' rate that it
            reaches; reduce_most: bytes/s of one ring between hosts. bucket: gradients, by number, that go in one
            exchange; bucket_host_s: of each of these, for each host that its ring goes on to: it grows with the hosts,
            and not with their logarithm.
        regathers: whether stage 2 gathers parameters for each micro-batch, as PyTorch's FSDP does (SHARD_GRAD_OP); else
            they stay whole and are gathered once a step.
        selective_products: of a layer's products, those that selective recomputation makes again;
            selective_attention: whether it makes attention again.
        even_context: whether the ranks that share a causal sequence have the same to do; gathers_context: whether they
            gather keys and values and do not pass them on, message by message.

    Of memory, in bytes:
        weight, gradient, state: of a parameter, of its gradient (where it is kept and where it is sent), of its
            optimizer's states with their master copy.
        gradient_copy: of a gradient in the products' precision, where it stays beside its sum in fp32.
        gathered: of each token and hidden width, what buffers take that all layers gather their inputs into.
        keeps_whole, keeps_split, keeps_heads, keeps_middle: kept of each token and layer, for each of the hidden width
            (on every tensor-parallel rank; cut along the sequence), of all heads' queries, keys and values, and of an
            MLP's width without a gate. keeps_low: whether inputs of products in 8 or 4 bits are kept in these
            (TransformerEngine), and not in bf16 (torchao). selective_keeps: the share of it that is left with selective
            recomputation.
        logits: of a token and word. program: of the program itself. queued: gradients, by number, that wait in buckets
            until more come, under stages 2 and 3; under stage 3 they are at least those of two layers, and half as many
            parameters are gathered ahead.

    ``engine``: torch, deepspeed or fsdp2 under Transformers' Trainer, whose memory and traffic are read from their
    sources (``fine_tune_memory``, ``fine_tune_step``); "" for the others. ``overlaps``: whether DeepSpeed sends
    beside the backward pass (``overlap_comm``); None: its default, stage 3 alone. ``bucket`` is its
    ``reduce_bucket_size``.
    ``can``: what it runs: tp, cp, pp, ep, etp, zero1, zero2, zero3, zero2 or zero3 in a pipeline, hsdp, chunks,
    offload (of activations), states on the host, all-to-all (context parallelism by heads), recomputed modules (by
    name), lora (Megatron-core through Megatron-Bridge, torchtitan since its PR 3264, LLM-Foundry by PEFT).
    ``about``: what the constants were fitted to. ``release``: the one that is planned with, as 26.04 (the year's and
    the month's last two digits); ``fitted``: the newest one whose runs the constants are fitted to; "" where a
    program's runs do not tell releases apart.
    """

    name: str
    products: float = 1.0
    small: float = 200.0
    fp8: float = 0.865
    fp4: float = 0.6
    casts: float = 0.0
    graphs: bool = False
    routed: float = 4.0
    routed_fused: float = 4.0
    dispatch: str = "alltoall"
    expert_launch_s: float = 0.0
    hides_experts: float = 0.0
    hides_routed: float = 0.0
    beside: bool = False
    biased: float = 0.0
    filtered: float = 12.0
    adapters: float = 1.0
    ends_as_layers: bool = False
    attention: float = 1.0
    scores: float = 7.0
    whole: float = 10.0
    cut: float = 12.0
    layer_s: float | None = None
    launch_s: float = 3e-3
    launch_rank_s: float = 0.0
    crossing_rank_s: float = 0.0
    gradient_s: float = 0.0
    start: float = 1.0
    crossing_s: float = 0.0
    send_s: float = 1e-4
    hides_tensor: float = 0.0
    hidden: float = 0.0
    hides_shards: bool = False
    reduce_s: float = 0.0
    reduce_share: float = 1.0
    reduce_most: float = 300e9
    bucket: float = math.inf
    bucket_host_s: float = 0.0
    regathers: bool = False
    selective_products: float = 0.0
    selective_attention: bool = True
    even_context: bool = True
    gathers_context: bool = False
    balanced: bool = False
    weight: int = 2
    gradient: int = 2
    state: int = 12
    gradient_copy: int = 0
    gathered: float = 0.0
    keeps_whole: float = 0.0
    keeps_split: float = 10.0
    keeps_heads: float = 8 / 3
    keeps_middle: float = 4.0
    selective_keeps: float = 1.0
    keeps_low: bool = False
    logits: float = 10.0
    program: float = 1e9
    queued: float = 0.0
    engine: str = ""
    overlaps: bool | None = None
    about: str = ""
    can: frozenset[str] = frozenset()
    release: str = ""
    fitted: str = ""

    @property
    def months_ahead(self) -> int:
        """Months from the newest release that the constants are fitted to, to the one that is planned with."""
        return max(0, _month(self.release) - _month(self.fitted)) if self.release else 0

    def runs(self, layout: "Layout") -> bool:
        """Whether the program has what a layout needs."""
        return not self.lacks(layout)

    def check_lora(self) -> None:
        """Refuses LoRA where the program has none.

        Raises:
            ValueError: it has none; those that have it are named.
        """
        if "lora" not in self.can:
            others = ", ".join(name for name, program in STACKS.items() if "lora" in program.can)
            raise ValueError(f"{self.name} has no LoRA; these have: {others}")

    def lacks(self, layout: "Layout") -> list[str]:
        """What a layout needs and the program does not have."""
        sharding = layout.sharding
        needed = {name: getattr(layout, name) > 1 for name in ("tp", "cp", "pp", "ep", "etp", "chunks")} | {
            sharding: sharding != "none", "offload": layout.offload, "hsdp": layout.shard_group,
            f"{sharding} in a pipeline": layout.pp > 1 and sharding in ("zero2", "zero3"),
            "states on the host": layout.on_host != "none", "recomputed modules": layout.modules,
            "all-to-all": layout.cp > 1 and layout.context == "all-to-all",
        }  # fmt: skip
        return sorted(name for name, needs in needed.items() if needs and name not in self.can)

    def but(self, **changes: Any) -> "Stack":
        """This one with some constants changed."""
        return replace(self, **changes)


_TABLES = tomllib.loads(Path(__file__).with_name("stacks.toml").read_text(encoding="utf-8"))


def _read(tables: dict[str, dict[str, Any]]) -> dict[str, list[Stack]]:
    """The programs of a table by name, each in its releases, the newest last.

    ``like`` names the program whose constants stand where one has none; ``releases`` are the later ones.
    """
    programs: dict[str, list[Stack]] = {}
    for name, constants in tables.items():
        later = constants.pop("releases", {})
        base = programs[constants.pop("like")][-1] if "like" in constants else Stack(name)
        programs[name] = [_with(base.but(name=name), constants)]
        for release in sorted(later, key=_month):
            programs[name].append(_with(programs[name][-1], later[release] | {"release": release}))
    return programs


def _with(base: Stack, constants: dict[str, Any]) -> Stack:
    """A program with the constants of a table."""
    newest = constants.get("release", base.release)
    return base.but(**constants | {"can": frozenset(constants.get("can", base.can)), "fitted": newest})


def _month(release: str) -> int:
    """Months from the year 2000 to a release's: of 26.04 and 26.04.01 alike.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(r"(\d\d)\.(0[1-9]|1[0-2])(\.\d+)*", release)
    if not found:
        raise ValueError(f"no release {release!r}; right would be a year and a month, as 26.04")
    return 12 * int(found[1]) + int(found[2])


_PROGRAMS = _read(_TABLES["programs"])
#: By name, in the newest release: the programs that ``--program`` takes; and constants of fine-tunes and of published
#: runs alone.
STACKS = {name: releases[-1] for name, releases in _PROGRAMS.items()}
OTHERS = {name: releases[-1] for name, releases in _read(_TABLES["others"]).items()}
NANOTRON, MEGATRON_2022, MEGATRON = (STACKS[name] for name in ("nanotron", "megatron-2022", "megatron-core"))
FOUNDRY, TORCHTITAN = STACKS["llm-foundry"], STACKS["torchtitan"]


def stack(name: str) -> Stack:
    """The training program ``NAME`` with its newest constants, or ``NAME@RELEASE`` with those of that release.

    They are those of the first fitted release that is not older, or of the newest where all are; how many months that
    is then behind says ``months_ahead``.

    Raises:
        ValueError: there is no such program (the nearest are offered), or its constants have no releases.
    """
    name, at, release = name.partition("@")
    if name not in STACKS:
        near = difflib.get_close_matches(name, STACKS, 1)
        raise ValueError(
            f"no training program {name!r}; "
            + (f"did you mean {near[0]}?" if near else f"there are {', '.join(STACKS)}")
        )
    if not at:
        return STACKS[name]
    if not (newest := STACKS[name]).release:
        raise ValueError(f"{name}'s published runs do not tell releases apart; take --program {name}")
    month = _month(release)
    return next((one for one in _PROGRAMS[name] if month <= _month(one.fitted)), newest).but(release=release)


def fitted_releases(name: str) -> list[Stack]:
    """A program in all releases that constants were fitted to, the newest last."""
    return list(_PROGRAMS[name])
