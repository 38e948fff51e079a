"""Every private name of other libraries that is used here: what for, and the versions that it was tried with.

No other module names one. A name is resolved when it is first asked for: an import of this module loads nothing.

>>> from pardemo import compat
>>> compat.graph_task()                                                     # doctest: +SKIP
-1

Where a library no longer has a name, :class:`PrivateNameGone` says which, and what it was for; ``tests/test_compat.py``
asks for all of them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from operator import attrgetter, methodcaller
from typing import Any

from pardemo.private_names import NAMES as NAMES
from pardemo.private_names import Private as Private

#: What all of these names were tried with; requirements.txt pins them.
TRIED = {
    "torch": "2.13.0",
    "deepspeed": "0.19.8",
    "accelerate": "1.15.0",
    "nbconvert": "7.17.2",
    "transformers": "5.23.0",
    "pytest": "9.2.0",
}


class PrivateNameGone(ImportError):
    """A library has no longer a private name that this package uses."""


def resolve(private: Private) -> Any:
    """Finds a private name in its library.

    Raises:
        ModuleNotFoundError: the library is not installed.
        PrivateNameGone: it is, and has no such name.
    """
    library, *parts = private.path.split(".")
    value: Any = import_module(library)
    path = library
    for part in parts:
        path += f".{part}"
        try:
            value = getattr(value, part) if hasattr(value, part) else import_module(path)
        except ImportError:
            raise PrivateNameGone(f"{_version(library)} has no {private.path}, for: {private.why}") from None
    return value


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = resolve(NAMES[name])  # the next time nobody asks here
    return value


def _named(name: str) -> Any:
    return globals()[name] if name in globals() else __getattr__(name)


def _version(library: str) -> str:
    tried = f", tried with {TRIED[library]}," if library in TRIED else ""
    try:
        return f"{library} {metadata.version(library)}{tried}"
    except metadata.PackageNotFoundError:
        return f"{library}{tried}"


# --- of objects: what an instance has -------------------------------------------------------------------------------


#: Whether a DistributedDataParallel is within its ``join()``, where ranks may have different numbers of batches.
is_joining = attrgetter("_join_config.enable")
#: What torch's DDP logs of itself: its buckets' bytes, and the numbers of their parameters.
ddp_logged = methodcaller("_get_ddp_logging_data")
#: How often a tensor, or what it shares memory with, was changed in place.
version = attrgetter("_version")
#: What tells a storage from others, also where it has no memory of its own.
storage_address = attrgetter("_cdata")
#: A DTensor's part on this rank, without a graph.
local_tensor = attrgetter("_local_tensor")
#: An operator's own name: ``mm`` of ``aten.mm.default``.
op_name = attrgetter("_opname")
#: An operator's name, arguments, and which of them it changes.
op_schema = attrgetter("_schema")
#: The operator with all its overloads.
op_packet = attrgetter("_overloadpacket")
#: The number that a node of autograd's graph got in the forward pass.
node_number = methodcaller("_sequence_nr")
#: Takes a ``torch.library.Library`` and its kernels away.
end_library = methodcaller("_destroy")
#: Which attention Transformers chose for a model's configuration: ``eager``, ``sdpa`` …
attention_of = attrgetter("_attn_implementation")
#: What nbconvert's exporter keeps of each notebook for its filters.
exporter_metadata = attrgetter("_nb_metadata")


def local_part(tensor: Any) -> Any:
    """Returns a DTensor's part on this rank, without a graph; any other tensor itself."""
    return local_tensor(tensor) if hasattr(tensor, "placements") else tensor


def dtype_name(dtype: Any) -> str:
    """Returns a dtype's name, as ``float32``."""
    return str(dtype).removeprefix("torch.")


def in_backward() -> bool:
    """Whether a backward pass runs on this thread."""
    return _named("graph_task")() != -1


def after_backward(call: Callable[[], object]) -> None:
    """Has ``call`` called when the backward pass that runs has ended, as torch's DDP and FSDP2 do."""
    resolve(NAMES["execution_engine"]).queue_callback(call)  # not remembered: others replace it for a while


def accumulate_hooks(parameter: Any) -> Mapping[int, Callable]:
    """Those of ``parameter.register_post_accumulate_grad_hook``."""
    return parameter._post_accumulate_grad_hooks or {}


def backward_hooks(tensor: Any) -> Mapping[int, Callable]:
    """Those of ``tensor.register_hook``."""
    return tensor._backward_hooks or {}


def sparse_parts(tensor: Any) -> tuple[Any, Any]:
    """Indices and values of a sparse tensor, also of one that is not coalesced."""
    return tensor._indices(), tensor._values()


def fsdp_state(module: Any) -> Any:
    """FSDP2's state of a module that it wraps; None of any other."""
    return module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None


def fsdp_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together."""
    return getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]


def fsdp_gathered(module: Any) -> list[Any]:
    """The whole parameters of all FSDP2 modules in ``module``, as far as they have been gathered once."""
    states = [state for part in module.modules() if (state := fsdp_state(part)) is not None]
    groups = [group for state in states for group in fsdp_groups(state) if group is not None]
    parameters = [gathered(parameter) for group in groups for parameter in group.fsdp_params]
    return [parameter for parameter in parameters if parameter is not None]


def fsdp_backward_failed(module: Any) -> bool:
    """Whether a backward pass of an FSDP2 module has begun and not ended, and none runs."""
    return fsdp_state(module)._state_ctx.post_backward_final_callback_queued and not in_backward()


def fsdp_unit(group: Any) -> str:
    """The name of the module whose parameters FSDP2 gathers together; empty before it knows, and of all else."""
    return getattr(group, "_module_fqn", None) or ""


def expert_group(parameter: Any) -> Any:
    """The group over which DeepSpeed sums an expert's gradients."""
    from deepspeed.utils import groups

    return groups._get_expert_data_parallel_group(parameter.group_name)


@contextmanager
def before_fsdp2_reduces(note: Callable[[Any], None]) -> Iterator[None]:
    """Within the block ``note`` gets each gradient of a whole parameter that FSDP2 is about to reduce, or to keep."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    real = FSDPParamGroup.post_backward

    def post_backward(self: Any, *unused: Any) -> None:
        for parameter in self.fsdp_params:
            unsharded = getattr(parameter, "_unsharded_param", None)
            for gradient in (unsharded.grad if unsharded is not None else None, parameter.unsharded_accumulated_grad):
                if gradient is not None:
                    note(gradient)
        real(self, *unused)

    with replaced(FSDPParamGroup, "post_backward", post_backward):
        yield


def fsdp1_unit(module: Any) -> tuple[int, int, Any, Any] | None:
    """Describes what FSDP1 gathers for a module: elements of a shard and of all, dtypes gathered and reduced in."""
    handle = module._handle
    if handle is None:
        return None
    elements = handle.flat_param._unpadded_unsharded_size.numel()
    reduced = handle._reduce_dtype or handle._fwd_bwd_param_dtype
    return handle.flat_param._local_shard.numel(), elements, handle._fwd_bwd_param_dtype, reduced


def fsdp1_ranges(module: Any) -> Iterator[tuple[str, tuple[int, ...], int, Any, Any]]:
    """Yields the parameters of FSDP1's unit of a module that this rank has a part of.

    Each with its name within the module, its whole shape, the number of its first element here, this part's values [n]
    and their gradient, or None.
    """
    handle = module._handle
    if handle is None:
        return
    flat = handle.flat_param
    shard, gradients = flat._local_shard, flat.grad
    for number, (info, shape, part) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        if not part.in_shard:
            continue
        here = slice(part.offset_in_shard, part.offset_in_shard + part.numel_in_shard)
        gradient = gradients[here] if gradients is not None and gradients.numel() == shard.numel() else None
        if handle._use_orig_params and flat._params is not None and flat._params[number].grad is not None:
            gradient = flat._params[number].grad.reshape(-1)
        name = f"{info.module_name}.{info.param_name}" if info.module_name else info.param_name
        yield name, tuple(shape), part.intra_param_start_idx, shard[here].detach(), gradient


def saved_buffers(module: Any) -> list[tuple[str, Any]]:
    """A module's own buffers that its state dict has, by name."""
    return [
        (name, buffer)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def local_offset(shape: Any, mesh: Any, placements: Any) -> tuple[int, ...]:
    """Returns where a DTensor's local part begins in the whole, an index for each axis."""
    return tuple(_named("local_offset_of")(shape, mesh, placements)[1])


def context_parallel_options() -> tuple[bool, bool]:
    """Whether torch's context parallelism gathers keys and values, or passes them on; whether it sums in float32."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    return options.rotate_method.name == "ALL_GATHER", options.convert_to_f32


def gathered(parameter: Any) -> Any | None:
    """The whole of an FSDP2 parameter while it is gathered; None before it was, for the first time."""
    return getattr(parameter, "_unsharded_param", None)


def default_options(parser: Any, title: str) -> set[str]:
    """The names of a command line's options below a heading."""
    groups = [group for group in parser._action_groups if group.title == title]
    return {action.dest for group in groups for action in group._group_actions}


def exporter_resources(exporter: Any, resources: Any) -> Any:
    """Returns the resources that nbconvert's exporter begins a page with."""
    return exporter._init_resources(resources)


def refuse_removed_keys(config: Any, settings: Mapping[str, Any]) -> None:
    """DeepSpeed's own refusal of keys that it has no longer; ``config`` is ``deepspeed.runtime.config``."""
    config._reject_removed_config_keys(settings)


def forget_hpz(groups: Any) -> None:
    """Forgets hpZ's group in ``deepspeed.utils.groups``: a second engine refuses to start beside it."""
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def after_new_group(call: Callable[[], object]) -> None:
    """From here on ``call`` is called whenever torch has made a process group."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_process_group_helper

    def make_and_call(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        call()
        return made

    distributed_c10d._new_process_group_helper = make_and_call


def new_group_by_name(ranks: list[int], name: str) -> Any:
    """A group that its own ranks make, called ``name`` by all of them.

    torch calls it by how many groups a rank has; where ranks are members of different numbers of groups, each waits
    under a name of its own, without end.
    """
    from torch.distributed import distributed_c10d

    with replaced(distributed_c10d, "_process_group_name", lambda *_, **__: name):
        return distributed_c10d.new_group(ranks, use_local_synchronization=True)


@contextmanager
def around_new_group(around: Callable[[Callable[[], Any], list[int] | None, bool], Any]) -> Iterator[None]:
    """Within the block ``around`` makes torch's groups: it gets what makes one, its ranks, and who calls."""
    from torch.distributed import distributed_c10d

    make = distributed_c10d._new_group_with_tag

    def made(ranks: list[int] | None = None, *args: Any, use_local_synchronization: bool = False, **kwargs: Any) -> Any:
        kwargs["use_local_synchronization"] = use_local_synchronization
        return around(lambda: make(ranks, *args, **kwargs), ranks, use_local_synchronization)

    with replaced(distributed_c10d, "_new_group_with_tag", made):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Within the block ``owner.name`` is ``value``; afterwards as before, also where it was not ``owner``'s own."""
    attributes = vars(owner)
    was_there, before = name in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if was_there:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Engine:
    """Autograd's, each of whose backward passes is run by ``around(run, tensors, …)``, however it was begun.

    ``run`` is autograd's own, to be called with all that follows; ``accumulate_grad`` says whether it is to fill
    ``grad``. ``torch.autograd.backward`` and ``grad`` come here, and what calls the engine, as Megatron-core does.
    """

    def __init__(self, real: Any, around: Callable[..., Any]):
        self._real, self._around = real, around

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._real.run_backward, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def engine_replaced(around: Callable[..., Any]) -> tuple[Any, str, Engine]:
    """Returns the arguments of :func:`replaced` that have backward passes run by ``around``: see :class:`Engine`."""
    engine = NAMES["execution_engine"]
    owner, _, name = engine.path.rpartition(".")
    return resolve(Private(owner, engine.why)), name, Engine(resolve(engine), around)  # which may be another's already


def cache_name() -> str:
    """Returns Transformers' name of the cache of keys and values: ``cache`` since 5.24, before ``past_key_values``."""
    newer = hasattr(import_module("transformers.modeling_outputs").BaseModelOutputWithPast, "cache")
    return "cache" if newer else "past_key_values"
