"""Defines training programs by constants with a physical meaning, which are fitted to their published runs.

``python tests/calibration/fit.py`` fits those of each program to ``data/published_runs`` again and prints them beside
those of ``programs.toml``, which are its results rounded. Of Megatron-core it fits eleven; its matmul_efficiency,
tile_loss, uncut_passes, cut_passes, exchange_latency, tp_overlap, ep_overlap, dp_overlap and launch_s, and how much of
its rate a Blackwell sustains, were set by hand before that, and which terms the model has was decided with all rows in
view.

A program becomes faster from release to release, so a program may have constants by release: those of ``release`` in
``programs.toml``, and for each later one that was fitted the constants that differ from the one before.
``find_program("NAME")`` has the newest, ``find_program("NAME@26.04")`` those that stand for that release.
"""

import math
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pardemo import argument_checks

if TYPE_CHECKING:
    from pardemo.planner.layouts.layout import Layout


@dataclass(frozen=True, kw_only=True)
class ProgramTime:
    """Constants of a training program's step time: shares of what the hardware reaches, passes through memory, seconds.

    An activation of the hidden width that is read or written once makes one pass.
    """

    matmul_efficiency: float = 1.0  # of the rate of large matrix multiplications, what they reach in a step
    tile_loss: float = 200.0  # rows, columns or depth that a matrix multiplication loses to tiles that are not full
    fp8_efficiency: float = 0.865  # of the data sheet's ratio of 8 bits to bf16, what is reached
    fp4_efficiency: float = 0.6  # the same of 4 bits
    cast_bytes: float = 0.0  # through memory, of each number that is converted to 8 or 4 bits
    cuda_graphs: bool = False  # whether they start the kernels of models with experts
    attention_efficiency: float = 1.0  # of FlashAttention-2's rate
    score_passes: float = 7.0  # of attention's scores where it is not fused
    uncut_passes: float = 10.0  # in a layer's forward pass, by operations that tensor parallelism does not cut
    cut_passes: float = 12.0  # the same by operations that it cuts
    #: Seconds of both passes of a micro-batch through a layer on one rank, without traffic, as measured: in place of
    #: matrix multiplications, attention, memory and launches. They hold for the micro-batch, sequence and tensor
    #: parallelism that they were measured with; full recomputation adds a third.
    layer_s: float | None = None
    launch_s: float = 3e-3  # of the host, for a layer's kernels in both passes
    launch_rank_s: float = 0.0  # more of it for each further tensor-parallel rank
    launch_across_hosts_s: float = 0.0  # more of it for each tensor-parallel rank where a pipeline spans hosts
    gradient_hook_s: float = 0.0  # of the host, for a trained tensor's gradient under DeepSpeed's stages
    exchange_latency: float = 1.0  # of the machine's latency, what a tensor-parallel exchange waits
    exchange_across_hosts_s: float = 0.0  # more of it where its ranks are on several hosts
    dispatch: str = "alltoall"  # how tokens usually get to their experts: sorted for NCCL, or "fused" in a kernel
    routed_passes: float = 4.0  # of a token on its way to an expert and back, in a pass, where it is sorted
    fused_routed_passes: float = 4.0  # the same with a fused kernel
    expert_launch_s: float = 0.0  # of the host, for a layer's experts in both passes, unless fused and by CUDA graphs
    ep_overlap: float = 0.0  # of an overlapped exchange of tokens, what is hidden
    routed_overlap: float = 0.0  # the same of the tokens' passes through memory
    batch_overlap: bool = False  # whether another micro-batch usually computes beside the exchange, so that it overlaps
    expert_bias_passes: float = 0.0  # more of the outputs of experts that have biases
    mixer_passes: float = 12.0  # of a Mamba mixer's inner width, with its scan
    adapter_passes: float = 1.0  # of LoRA's adapters, over those of 16-bit adapters without dropout
    embedding_and_loss_as_layers: bool = False  # whether they may take a layer's place in a pipeline
    balanced_stages: bool = False  # whether stages get layers by their parameters, the head's included (nanotron)
    send_s: float = 1e-4  # of the host, for a message between stages
    tp_overlap: float = 0.0  # of tensor-parallel traffic, what is hidden (asynchronous tensor parallelism)
    dp_overlap: float = 0.0  # of the computation beside which data-parallel traffic runs, what hides it
    sharded_dp_overlap: bool = False  # whether that holds for ZeRO-1 and 2, too
    reduce_s: float = 0.0  # of an exchange of gradients, for each doubling of ranks
    reduce_efficiency: float = 1.0  # of the links' rate, what it reaches
    ring_bytes_per_s: float = 300e9  # of one ring between hosts, at most
    bucket_elements: float = math.inf  # gradients of one exchange
    bucket_host_s: float = 0.0  # of each exchange, for each host that its ring goes on to
    regathers_parameters: bool = False  # whether stage 2 gathers them with each micro-batch (FSDP's SHARD_GRAD_OP)
    selective_matmul_share: float = 0.0  # of a layer's matrix multiplications, what selective recomputation repeats
    selective_attention: bool = True  # whether it repeats attention
    balanced_context: bool = True  # whether ranks that share a causal sequence have the same work
    gathers_context: bool = False  # whether they all-gather keys and values, and do not pass them round a ring


@dataclass(frozen=True, kw_only=True)
class ProgramMemory:
    """Constants of what a training program keeps on a GPU, in bytes."""

    weight_bytes: int = 2  # of a parameter
    gradient_bytes: int = 2  # of a parameter's gradient, kept and sent
    state_bytes: int = 12  # of a parameter's optimizer states with their master copy
    gradient_copy_bytes: int = 0  # of a gradient in 16 bits that stays beside its sum in fp32
    gathered_input_bytes: float = 0.0  # of a token and hidden unit: buffers that all layers gather their inputs into
    kept_uncut_bytes: float = 0.0  # for backward, of a token, layer and hidden unit, on every tensor-parallel rank
    kept_cut_bytes: float = 10.0  # the same, cut along the sequence
    kept_head_bytes: float = 8 / 3  # for backward, of a token, layer and number of all heads' queries, keys and values
    kept_ffn_bytes: float = 4.0  # for backward, of a token, layer and unit of an MLP without a gate
    selective_kept_share: float = 1.0  # of what is kept, what selective recomputation leaves
    keeps_low_precision: bool = False  # whether inputs in 8 or 4 bits are kept so (TransformerEngine), or in bf16
    logit_bytes: float = 10.0  # of a token and word
    program_bytes: float = 1e9  # of the program itself
    #: Gradients, by number, that wait in buckets under stages 2 and 3. Under stage 3 they are at least those of two
    #: layers, and half as many parameters are gathered ahead.
    bucketed_gradients: float = 0.0


@dataclass(frozen=True)
class Program(ProgramTime, ProgramMemory):
    """A training program: its name, its constants, and what it supports."""

    name: str
    #: Under Transformers' Trainer: torch, deepspeed or fsdp2, whose memory and traffic are read from their sources
    #: (``fine_tune_memory``, ``fine_tune_step``); "" for other programs. DeepSpeed's ``reduce_bucket_size`` is
    #: ``bucket_elements``.
    engine: str = ""
    overlap_comm: bool | None = None  # DeepSpeed's setting; None: its default, stage 3 alone
    #: Of tp, cp, pp, ep, etp, zero1, zero2, zero3, zero2 or zero3 in a pipeline, hsdp, chunks, offload (of
    #: activations), states on the host, all-to-all (context parallelism by heads), recomputed modules (by name), lora
    #: (Megatron-core through Megatron-Bridge, torchtitan since its PR 3264, LLM-Foundry by PEFT).
    supports: frozenset[str] = frozenset()
    fitted_to: str = ""  # the runs
    release: str = ""  # that is planned with, as 26.04 (year and month); "" where runs do not tell releases apart
    fitted_release: str = ""  # the newest one whose runs the constants are fitted to

    @property
    def months_ahead(self) -> int:
        """Months from the newest release that the constants are fitted to, to the one that is planned with."""
        return max(0, _month(self.release) - _month(self.fitted_release)) if self.release else 0

    @property
    def deepspeed(self) -> bool:
        """Whether DeepSpeed is the engine under Transformers' Trainer."""
        return self.engine == "deepspeed"

    def can_run(self, layout: "Layout") -> bool:
        """Returns whether the program has what a layout needs."""
        return not self.missing_features(layout)

    def check_lora(self) -> None:
        """Refuses LoRA where the program has none.

        Raises:
            ValueError: it has none; those that have it are named.
        """
        if "lora" not in self.supports:
            others = ", ".join(name for name, program in PROGRAMS.items() if "lora" in program.supports)
            raise ValueError(f"{self.name} has no LoRA; these have: {others}")

    def missing_features(self, layout: "Layout") -> list[str]:
        """Lists what a layout needs and the program does not have."""
        sharding = layout.sharding
        needed = {name: getattr(layout, name) > 1 for name in ("tp", "cp", "pp", "ep", "etp", "chunks")} | {
            sharding: sharding != "none", "offload": layout.offloaded_layers, "hsdp": layout.shard_group,
            f"{sharding} in a pipeline": layout.pp > 1 and sharding in ("zero2", "zero3"),
            "states on the host": layout.host_states != "none", "recomputed modules": layout.recomputed_modules,
            "all-to-all": layout.cp > 1 and layout.context == "all-to-all",
        }  # fmt: skip
        return sorted(name for name, needs in needed.items() if needs and name not in self.supports)

    def but(self, **changes: Any) -> "Program":
        """Returns this program with some constants changed."""
        return replace(self, **changes)


_TABLES = tomllib.loads(Path(__file__).with_name("programs.toml").read_text(encoding="utf-8"))


def _read(tables: dict[str, dict[str, Any]]) -> dict[str, list[Program]]:
    """Returns the programs of a table by name, each in its releases, the newest last.

    ``like`` names the program whose constants stand where one has none; ``releases`` are the later ones.
    """
    programs: dict[str, list[Program]] = {}
    for name, constants in tables.items():
        later = constants.pop("releases", {})
        base = programs[constants.pop("like")][-1] if "like" in constants else Program(name)
        programs[name] = [_with(base.but(name=name), constants)]
        for release in sorted(later, key=_month):
            programs[name].append(_with(programs[name][-1], later[release] | {"release": release}))
    return programs


def _with(base: Program, constants: dict[str, Any]) -> Program:
    """Returns a program with the constants of a table."""
    supports = frozenset(constants.get("supports", base.supports))
    return base.but(**constants | {"supports": supports, "fitted_release": constants.get("release", base.release)})


def _month(release: str) -> int:
    """Counts the months from the year 2000 to a release's: of 26.04 and 26.04.01 alike.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(r"(\d\d)\.(0[1-9]|1[0-2])(\.\d+)*", release)
    if not match:
        raise ValueError(f"no release {release!r}; right would be a year and a month, as 26.04")
    return 12 * int(match[1]) + int(match[2])


_RELEASES = _read(_TABLES["programs"])
#: By name, in the newest release: the programs that ``--program`` takes; and constants of fine-tunes and of published
#: runs alone.
PROGRAMS = {name: releases[-1] for name, releases in _RELEASES.items()}
OTHER_PROGRAMS = {name: releases[-1] for name, releases in _read(_TABLES["others"]).items()}
NANOTRON, MEGATRON_2022, MEGATRON = (PROGRAMS[name] for name in ("nanotron", "megatron-2022", "megatron-core"))
FOUNDRY, TORCHTITAN = PROGRAMS["llm-foundry"], PROGRAMS["torchtitan"]


def find_program(name: str) -> Program:
    """Returns the training program ``NAME`` with its newest constants, or ``NAME@RELEASE`` with those of that release.

    They are those of the first fitted release that is not older, or of the newest where all are; how many months that
    is then behind says ``months_ahead``.

    Raises:
        ValueError: there is no such program (the nearest are offered), or its constants have no releases.
    """
    name, at, release = name.partition("@")
    if name not in PROGRAMS:
        raise ValueError(f"no training program {name!r}{argument_checks.nearest(name, PROGRAMS)}")
    if not at:
        return PROGRAMS[name]
    if not (newest := PROGRAMS[name]).release:
        raise ValueError(f"{name}'s published runs do not tell releases apart; take --program {name}")
    month = _month(release)
    fitted = (program for program in _RELEASES[name] if month <= _month(program.fitted_release))
    return next(fitted, newest).but(release=release)


def fitted_releases(name: str) -> list[Program]:
    """Returns a program in all releases that constants were fitted to, the newest last."""
    return list(_RELEASES[name])
