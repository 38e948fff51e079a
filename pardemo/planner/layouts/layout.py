"""Describes a job's layout over GPUs: its degrees of parallelism, and what is sharded, recomputed and offloaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pardemo import argument_checks
from pardemo.planner.divisors import divisors
from pardemo.planner.estimate import HOST_STATES
from pardemo.planner.layouts.recomputed import MODULES, missing
from pardemo.planner.layouts.shape import Shape

SHARDING = ("none", "zero1", "zero2", "zero3")
RECOMPUTE = ("none", "selective", "full")
CONTEXTS = ("ring", "all-to-all")
#: By field, the words that it may be.
WORDS = {
    "sharding": SHARDING, "recompute": RECOMPUTE, "schedule": ("1f1b", "zb-h1"), "context": CONTEXTS,
    "host_states": HOST_STATES,
}  # fmt: skip
#: Fields that have other names on the command line, in files of runs and in JSON.
WRITTEN = {"offloaded_layers": "offload", "recomputed_modules": "modules", "host_states": "on_host"}
COUNTS = ("tp", "cp", "dp", "pp", "ep", "etp", "micro_batch", "accumulation", "chunks")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, in the order in which ranks follow one another: tensor, context, data, pipeline.

    Groups of experts are formed anew over all ranks of a stage (TP × CP × DP), as Megatron-core's ``parallel_state``
    does.
    """

    tp: int = 1  # ranks that share each matrix multiplication
    cp: int = 1  # ranks that share a sequence
    dp: int = 1  # ranks that have other samples
    pp: int = 1  # stages of the pipeline
    ep: int = 1  # ranks that share a layer's experts, each some of them
    etp: int = 1  # ranks that share each expert's matrix multiplications
    sharding: str = "none"  # of optimizer states (zero1), gradients as well (zero2), parameters as well (zero3, FSDP)
    shard_group: int = 0  # ranks over which states are sharded, if fewer than all data-parallel ones (HSDP); 0: all
    sequence_parallel: bool = False  # whether what tensor parallelism does not cut is cut along the sequence
    micro_batch: int = 1  # samples of one, on each rank of ``dp``
    accumulation: int = 1  # micro-batches of a step
    chunks: int = 1  # pieces of the model on each stage (interleaved schedule)
    recompute: str = "none"  # or selective, full
    schedule: str = "1f1b"  # interleaved where there are chunks; or zb-h1 (zero bubble)
    context: str = "ring"  # keys and values go round it; or all-to-all: each rank gets some heads (Ulysses)
    offloaded_layers: int = 0  # layers of a rank whose activations wait in the host's memory for the backward pass
    recomputed_modules: tuple[str, ...] = ()  # selectively, by Megatron-core's names; (): the program's own choice
    host_states: str = "none"  # states in the host's memory, as DeepSpeed offloads them; of HOST_STATES

    def __post_init__(self):
        counts = [getattr(self, name) for name in COUNTS]
        if set(map(type, counts)) != {int} or min(counts) < 1:  # a search makes a hundred thousand layouts
            for name, value in zip(COUNTS, counts, strict=True):
                argument_checks.whole_number(value, name)
        argument_checks.whole_number(self.offloaded_layers, WRITTEN["offloaded_layers"], 0)
        for name, allowed in WORDS.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{WRITTEN.get(name, name)} must be one of {', '.join(allowed)}, not {value!r}")
        if unknown := [name for name in self.recomputed_modules if name not in MODULES]:
            raise ValueError(f"no module {unknown[0]!r} is recomputed; there are {', '.join(MODULES)}")
        if self.recomputed_modules:
            if self.recompute != "selective":
                raise ValueError(f"modules are recomputed by selective recomputation, not by {self.recompute}")
            in_order = tuple(name for name in MODULES if name in self.recomputed_modules)
            object.__setattr__(self, "recomputed_modules", in_order)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.dp * self.micro_batch * self.accumulation

    @property
    def replicas(self) -> int:
        """Ranks that have the same parameters: other samples or other parts of a sequence."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks among which the experts of a layer lie once."""
        return self.ep * self.etp

    def expert_copies(self, ranks: int | None = None) -> int:
        """Counts the ranks that have the same experts, among ``ranks`` with the same dense parameters (default: all)
        and their tensor-parallel ones."""
        return max(1, (self.replicas if ranks is None else ranks) * self.tp // self.expert_ranks)

    @property
    def zero_stage(self) -> int:
        """The stage of ZeRO whose states are sharded, 0 where none are; FSDP is stage 3."""
        return SHARDING.index(self.sharding)

    @property
    def shards(self) -> int:
        """Ranks over which the states that are shared are shared."""
        return 1 if self.sharding == "none" else self.shard_group or self.replicas

    def but(self, **changes: Any) -> "Layout":
        return Layout(**{**self.__dict__, **changes})  # a quarter of a search's time was dataclasses.replace

    def as_words(self) -> dict[str, Any]:
        """Returns all fields by their names on the command line and in JSON."""
        return {WRITTEN.get(name, name): value for name, value in self.__dict__.items()}

    def __str__(self) -> str:
        degrees = ((n, getattr(self, n)) for n in ("tp", "cp", "pp", "dp", "ep", "etp"))
        group = f"/{self.shard_group}" if self.shard_group else ""
        words = (
            *(f"{name.upper()}{value}" for name, value in degrees if value > 1 or name == "dp"),
            self.sharding != "none" and f"{self.sharding}{group}",
            f"{self.micro_batch}×{self.accumulation}",
            self.chunks > 1 and f"v{self.chunks}",
            self.recompute != "none" and f"recompute {'+'.join(self.recomputed_modules) or self.recompute}",
            self.offloaded_layers and f"offload {self.offloaded_layers}",
            self.host_states != "none" and f"{self.host_states} on the host",
            self.context != "ring" and self.cp > 1 and f"context {self.context}",
            self.schedule != "1f1b" and self.pp > 1 and f"schedule {self.schedule}",
        )
        return " ".join(str(word) for word in words if word)


def recomputation(word: str) -> dict[str, Any]:
    """``none``, ``selective``, ``full``, or modules as ``moe_act+layernorm``: the fields of a :class:`Layout`."""
    if word in RECOMPUTE:
        return {"recompute": word}
    names = tuple(word.split("+"))
    if not set(names) & set(MODULES):
        raise ValueError(
            f"recompute must be one of {', '.join(RECOMPUTE)}, or modules as moe_act+layernorm, not {word!r}"
        )
    return {"recompute": "selective", "recomputed_modules": names}


def exchanges_heads(layout: Layout, shape: Shape) -> bool:
    """Tells whether all-to-alls can give each context-parallel rank whole heads, of the queries and of keys and values.

    TransformerEngine asks for both (``AttnFuncWithCPAndQKVOA2A``), and for keys that are as wide as values.
    """
    ranks = layout.tp * layout.cp
    return shape.heads % ranks == 0 and shape.kv_heads % ranks == 0 and shape.head_dim == shape.value_dim


def check_layout(
    layout: Layout, shape: Shape, gpus: int, sequence: int, embedding_and_loss_as_layers: bool = False
) -> None:
    """Raises ValueError, one line, where the layout cannot be run: what is wrong, and what would be right.

    ``embedding_and_loss_as_layers``: whether the program may give the embedding and the loss a piece of the model each.
    """
    for wrong in _wrongs(layout, shape, gpus, sequence, embedding_and_loss_as_layers):
        raise ValueError(wrong)


def _wrongs(
    layout: Layout, shape: Shape, gpus: int, sequence: int, embedding_and_loss_as_layers: bool
) -> Iterator[str]:
    """Yields what is wrong with a layout, the most telling first."""
    tp, cp, pp, ep, etp, chunks = layout.tp, layout.cp, layout.pp, layout.ep, layout.etp, layout.chunks
    experts, name = shape.experts, shape.name or "this one"
    if shape.heads % tp:
        fits = ", ".join(map(str, divisors(shape.heads, gpus)))
        yield f"{shape.heads} attention heads do not divide by TP {tp}; {fits} would do"
    if cp > 1 and layout.context == "all-to-all" and not exchanges_heads(layout, shape):
        if shape.head_dim != shape.value_dim:
            widths = f"keys of {shape.head_dim} and values of {shape.value_dim}"
            yield f"{widths} go through no all-to-alls; they go round a ring"
        heads = f"{shape.heads} attention" if shape.heads % (tp * cp) else f"{shape.kv_heads} key-value"
        yield f"{heads} heads do not divide by TP {tp} × CP {cp}, as all-to-alls need; a ring does not"
    most = shape.layers + (2 if chunks > 1 and embedding_and_loss_as_layers else 0)
    if pp * chunks > most:
        yield f"{shape.layers} layers cannot be cut into PP {pp} × {chunks} chunks; at most {most}"
    if ep > 1 and experts is None:
        yield f"EP {ep} needs a model with experts; {name} has none"
    for module in layout.recomputed_modules:
        if needed := missing(module, shape):
            yield f"to recompute {module} a model needs {needed}; {name} has none"
    if layout.gpus != gpus:
        yield f"TP {tp} × CP {cp} × PP {pp} × DP {layout.dp} are {layout.gpus} GPUs, not {gpus}"
    if chunks > 1 and layout.schedule != "1f1b":
        yield f"{chunks} chunks are 1F1B's, interleaved; {layout.schedule} has one on each stage"
    if chunks > 1 and pp == 1:
        yield f"{chunks} chunks need a pipeline; PP is 1"
    if chunks > 1 and layout.accumulation % pp:
        yield f"an interleaved pipeline takes micro-batches in multiples of PP {pp}, not {layout.accumulation}"
    if experts and experts.count % ep:
        fits = ", ".join(map(str, divisors(experts.count, experts.count)))
        yield f"{experts.count} experts do not divide by EP {ep}; {fits} would do"
    if experts and experts.ffn_hidden % etp:
        yield f"experts of width {experts.ffn_hidden} do not divide by ETP {etp}"
    if etp > 1 and experts is None:
        yield f"ETP {etp} needs a model with experts; {name} has none"
    if (ranks := tp * layout.replicas) % layout.expert_ranks:
        degrees = f"EP {ep}" + (f" × ETP {etp}" if etp > 1 else "")
        yield f"{degrees} does not divide the {ranks} ranks of TP × CP × DP"
    if layout.shard_group and (layout.sharding == "none" or layout.replicas % layout.shard_group):
        yield f"groups of {layout.shard_group} that share states do not divide {layout.replicas} ranks"
    if sequence % (2 * cp if cp > 1 else 1):
        yield f"a sequence of {sequence} does not divide into 2 × CP {cp} pieces"
    if layout.sequence_parallel and sequence % tp:
        yield f"a sequence of {sequence} does not divide by TP {tp} (sequence parallel)"
