"""A script for CUDA on a CPU rank: every row of the table, the numbers, what libraries see, and that all is undone."""

import contextlib
import importlib
import io
import sys
import threading
import types

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as again
from torch.utils.data import DataLoader, TensorDataset

from pardemo import compat
from pardemo.script.record import numbers
from pardemo.script.runtime import libraries, stand_ins
from pardemo.script.runtime.libraries import NeedsGpu
from pardemo.script.runtime.without_gpu import TABLE, without_gpu
from pardemo.world import bf16

CUDA_HERE = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(CUDA_HERE, reason="with a GPU the manager does nothing")


@contextlib.contextmanager
def alone(backend="gloo", **options):
    """A group of this process alone."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def device():
    x = torch.zeros(2, device="cuda:0") + torch.ones(2).cuda() + torch.ones(2).to(torch.device("cuda", 0), torch.float)
    assert x.tolist() == [2.0, 2.0]
    assert torch.ones(2).to(0, non_blocking=True).to(device="cuda").cuda(0, non_blocking=True).sum() == 2
    layer = nn.Linear(1, 1).to("cuda").cuda().to(0).to(device=torch.device("cuda"))
    assert layer(torch.ones(1, 1, device=0)).shape == (1, 1)
    with torch.device("cuda"):
        assert nn.Linear(1, 1).weight.shape == (1, 1)
    torch.set_default_device("cuda")
    assert torch.rand(1).shape == (1,)
    torch.set_default_device(None)
    generator = torch.Generator(device="cuda").manual_seed(1)
    assert torch.rand(1, generator=generator, device="cuda") == torch.rand(
        1, generator=torch.Generator().manual_seed(1)
    )
    assert isinstance(generator, torch.Generator)
    file = io.BytesIO()
    torch.save({"x": x}, file)
    for where in ("cuda:0", {"cuda:0": "cuda:1"}, torch.device("cuda"), lambda storage, _: storage.cuda(0)):
        file.seek(0)
        assert torch.load(file, map_location=where)["x"].tolist() == [2.0, 2.0]


def nccl():
    for backend in ("nccl", "cpu:gloo,cuda:nccl", None):
        with alone(backend, device_id=torch.device("cuda", 0)):
            assert dist.get_backend() == dist.get_backend(dist.new_group([0], backend="nccl")) == "gloo"
            dist.barrier(device_ids=[0])
    assert dist.get_default_backend_for_device("cuda") == "nccl"
    assert dist.is_nccl_available()


def wrappers():
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    with alone():
        x = torch.ones(2, 4, device="cuda")
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda(), device_ids=[0], output_device=0)
        fsdp1 = FullyShardedDataParallel(
            nn.Linear(4, 4), device_id=torch.cuda.current_device(), sync_module_states=True
        )
        mesh = dist.init_device_mesh("cuda", (1, 1), mesh_dim_names=("replicate", "shard"))
        assert dist.DeviceMesh("cuda", [0]).device_type == mesh.device_type == "cpu"
        for model in (ddp, fsdp1, fully_shard(nn.Linear(4, 4).cuda(), mesh=mesh)):
            model(x).sum().backward()
            assert next(model.parameters()).grad is not None


def asked():
    assert torch.cuda.is_available()
    assert torch.accelerator.is_available()
    assert torch.cuda.device_count() == torch.accelerator.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.get_device_module("cuda") is torch.get_device_module() is torch.cuda
    x = torch.ones(1).cuda()
    assert x.is_cuda
    assert x.device == torch.device("cuda", torch.cuda.current_device())
    assert (x.get_device(), x.type()) == (0, "torch.cuda.FloatTensor")


def properties():
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1] > 2**20
    assert torch.cuda.get_device_name(0)
    assert torch.cuda.is_bf16_supported()


def current():
    torch.cuda.set_device("cuda:3")
    assert torch.cuda.current_device() == torch.accelerator.current_device_index() == 3
    with torch.cuda.device(1):
        assert torch.cuda.current_device() == 1
    torch.cuda.set_device(torch.device("cuda", 2))
    assert torch.cuda.current_device() == 2


def nothing():
    torch.cuda.synchronize()
    torch.accelerator.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.nvtx.range("step"):
        torch.cuda.profiler.start()


def streams():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.Event("cuda")
    start.record()
    with torch.cuda.stream(stream):
        x = torch.ones(10, device="cuda").sum()
    stream.wait_stream(torch.cuda.current_stream())
    x.record_stream(stream)
    stream.record_event(end)
    end.synchronize()
    assert 0 < start.elapsed_time(end) < 60_000
    assert isinstance(stream, torch.cuda.Stream)


def memory():
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


def seeds():
    torch.cuda.manual_seed_all(12345)
    state = torch.cuda.get_rng_state()
    first = torch.rand(1, device="cuda")
    torch.cuda.set_rng_state(state)
    torch.cuda.set_rng_state_all([])  # as Lightning does, where it has saved none
    assert torch.rand(1, device="cuda") == first == torch.rand(1, generator=torch.Generator().manual_seed(12345))
    torch.cuda.default_generators[0].set_state(state)
    assert torch.rand(1) == first


def random():
    from torch.distributed.tensor import Shard, distribute_tensor

    with alone():
        mesh = dist.init_device_mesh("cuda", (1,))
        assert nn.init.normal_(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)])).shape == (2, 2)


def pin_memory():
    assert torch.ones(2).pin_memory().tolist() == torch.ones(2, pin_memory=True).tolist()
    loader = DataLoader(TensorDataset(torch.arange(2.0)), pin_memory=True, pin_memory_device="cuda")
    assert not loader.pin_memory


def autocast():
    layer, x = nn.Linear(2, 2).cuda(), torch.ones(2, 2, device="cuda")
    for context, dtype in (
        (torch.autocast("cuda"), torch.float16),  # the CPU's own default is bfloat16
        (torch.amp.autocast(device_type="cuda", dtype=torch.bfloat16), torch.bfloat16),
        (torch.autocast("cuda", enabled=False), torch.float32),
    ):
        with context:
            assert layer(x).dtype == dtype
            assert torch.is_autocast_enabled() == torch.is_autocast_enabled("cuda") == (dtype != torch.float32)
            assert dtype == torch.float32 or torch.get_autocast_dtype("cuda") == torch.get_autocast_gpu_dtype() == dtype


def grad_scaler():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for scaler in (torch.amp.GradScaler("cuda"), torch.amp.GradScaler()):
        assert scaler.get_scale() == 65536
        before = weight.detach().clone()
        scaler.scale(weight.sum()).backward()
        scaler.unscale_(optimizer)
        assert weight.grad.tolist() == [1.0, 1.0]
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before - 1)
        scaler.scale((weight * float("inf")).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(weight, before - 1)
        assert scaler.get_scale() == 32768
        optimizer.zero_grad()


def foreach():
    (group,) = torch.optim.AdamW([nn.Parameter(torch.ones(2))]).param_groups
    assert group["foreach"]


def fused():
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, fused=True).step()
    assert torch.allclose(weight, torch.tensor(0.9))


def capturable():
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, capturable=True).step()
    assert torch.allclose(weight, torch.tensor(0.9))


def tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    assert torch.cuda.is_tf32_supported()


def in_bf16():
    """As on a rank whose processor is slow at it."""
    here = bf16.slow()
    bf16.through_fp32()
    try:
        x = torch.ones(2, 2, dtype=torch.bfloat16, device="cuda")
        assert (x @ x).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    finally:
        if not here:
            compat.end_library(bf16._kernels.pop())


def compiled():
    function = torch.compile(lambda x: x + torch.ones(2, device="cuda"))
    assert function(torch.ones(2)).tolist() == [2.0, 2.0]
    assert torch.compile(nn.Linear(2, 2).cuda())(torch.ones(1, 2, device="cuda")).shape == (1, 2)


def graphs():
    with pytest.raises(NeedsGpu, match="CUDA graphs"):
        torch.cuda.graph(None)


def kernels():
    with pytest.raises(ModuleNotFoundError, match="scaled_dot_product_attention"):
        import flash_attn  # noqa: F401


def data_parallel():
    with pytest.raises(NeedsGpu, match="DistributedDataParallel"):
        nn.DataParallel(nn.Linear(1, 1))


def threads():
    made = []
    thread = threading.Thread(target=lambda: made.append(torch.ones(1, device="cuda")))
    thread.start()
    thread.join()
    assert made[0] == 1


CASES = {
    case.__name__: case
    for case in (
        device, nccl, wrappers, asked, properties, current, nothing, streams, memory, seeds, random, pin_memory,
        autocast, foreach, fused, capturable, tf32, graphs, kernels, threads,
    )
} | {"GradScaler": grad_scaler, "DataParallel": data_parallel, "bf16": in_bf16, "compile": compiled}  # fmt: skip


def test_every_row_of_the_table_has_a_case():
    assert set(CASES) == set(TABLE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", TABLE)
def test_each_row_holds_within_the_block_and_not_without(key, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with unraised(), pytest.raises(BaseException):  # noqa: B017, PT011 (whatever torch says of it)
        CASES[key]()
    as_before()
    notes = []
    with without_gpu(notes):
        CASES[key]()
    assert any(line.startswith(TABLE[key].written) for line in notes) == TABLE[key].noted
    assert len(notes) == len(set(notes))
    as_before()
    with unraised(), pytest.raises(BaseException):  # noqa: B017, PT011
        CASES[key]()
    as_before()


def as_before():
    """What a case leaves behind where it fails."""
    torch.set_default_device(None)
    torch.backends.cuda.matmul.allow_tf32 = False


@contextlib.contextmanager
def unraised():
    """A thread of the case may raise here: that is what the case is for."""
    before, threading.excepthook = threading.excepthook, lambda _: None
    try:
        yield
    finally:
        threading.excepthook = before


def train(where):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(32, 8), torch.randint(4, (32,))), batch_size=8, num_workers=1)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(where, non_blocking=True)), y.to(where))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_loop_trains_equal_numbers_with_and_without():
    losses, parameters = train("cpu")
    with without_gpu([]):
        theirs, trained = train("cuda")
    assert theirs == losses
    for a, b in zip(parameters, trained, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # foreach rounds in another order


def test_what_runs_in_a_backward_pass_is_on_the_cpu_too():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.full((), 2.0, device="cuda")

    with without_gpu([]):
        x = torch.ones(2, requires_grad=True, device="cuda")
        (Twice.apply(x) + again(lambda y: y * y.new_ones(2, device="cuda"), x, use_reentrant=False)).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0]


def test_a_data_loader_s_worker_has_the_cpu_too():
    class Made(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.full((1,), float(index), device="cuda")

    with without_gpu([]):
        assert [x.item() for x in DataLoader(Made(), num_workers=1)] == [0.0, 1.0]


def everything():
    """What can be replaced: names of modules, and of classes; what an import finds modules by."""
    owners = [
        torch, torch.cuda, torch.cuda.nvtx, torch.cuda.amp, torch.accelerator, torch.distributed, dist.device_mesh,
        dist.distributed_c10d, torch.amp.autocast_mode.autocast, torch.amp.GradScaler, nn.Module, nn.DataParallel,
        nn.parallel.DistributedDataParallel, dist.DeviceMesh, DataLoader, torch.optim.Optimizer, torch.Tensor,
        torch.UntypedStorage, threading.Thread, torch.serialization,
    ]  # fmt: skip
    return [dict(vars(owner)) for owner in owners], list(sys.meta_path), torch.get_default_device()


def test_all_is_undone_also_in_modules_that_were_imported_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "meanwhile.py").write_text(
        "from torch.cuda import is_available, synchronize, Stream\nfrom torch.distributed import init_process_group\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with without_gpu([]):  # it imports what it patches
        pass
    before = everything()
    with contextlib.suppress(ZeroDivisionError), without_gpu([]):
        module = importlib.import_module("meanwhile")
        assert module.synchronize() is None
        torch.set_default_device("cuda")
        raise ZeroDivisionError
    assert everything() == before
    assert module.synchronize is torch.cuda.synchronize
    assert module.is_available is torch.cuda.is_available
    assert module.Stream is torch.cuda.Stream
    assert module.init_process_group is dist.init_process_group
    assert not module.is_available()


@pytest.mark.parametrize("inside", [contextlib.nullcontext(), numbers.in_double([])], ids=["", "in fp64"])
def test_libraries_are_told_the_truth(inside):
    """As if a file of torch asked: none of its own code is to take the way of a GPU."""
    asks = "import torch\nfound = torch.cuda.is_available(), torch.cuda.device_count(), torch.device('cuda').type"
    asks += "\nassert torch.ones(1).is_cuda == (found[2] == 'cuda')"
    with without_gpu([]), inside:
        library, follower, script = {}, {"__name__": "lightning.fabric.accelerators.cuda"}, {}
        exec(compile(asks, torch.__file__, "exec"), library)
        exec(compile(asks, torch.__file__, "exec"), follower)
        exec(compile(asks, __file__, "exec"), script)
    assert library["found"] == (False, 0, "cpu")
    assert script["found"] == (True, 1, "cuda")
    assert follower["found"] == (True, 1, "cuda"), "Lightning chooses the device for a script"


def test_with_a_gpu_it_does_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = everything()
    with without_gpu([]):
        assert everything() == before


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ImportError("FlashAttention2 has been toggled on, but it cannot be used"), 'attn_implementation="sdpa"'),
        (RuntimeError("No available kernel. Aborting execution."), "SDPBackend.MATH"),
        (RuntimeError("0 active drivers ([]). There should only be one."), "operations of torch"),
        (ValueError("Type fp16 is not supported on your device."), "choose bf16"),
        (AssertionError("Torch not compiled with CUDA enabled"), "exists on GPUs only"),
        (ModuleNotFoundError("No module named 'apex'", name="apex"), "torch.optim.AdamW"),
    ],
)
def test_what_needs_a_gpu_is_told_in_one_line_with_its_place(error, line):
    with pytest.raises(NeedsGpu) as told, without_gpu([]):
        raise error
    assert line in str(told.value)
    assert f"({__name__.rpartition('.')[2]}.py:" in str(told.value)
    assert "\n" not in str(told.value)


def test_an_error_of_another_kind_and_an_end_pass():
    class Enough(BaseException):
        pass

    for error in (Enough(), SystemExit(3), ValueError("shapes do not fit")):
        with pytest.raises(type(error)), without_gpu([]):
            raise error


def test_a_module_that_is_asked_for_is_not_there():
    """Who looks before an import finds nothing; who catches the error goes on, and the run is told."""
    notes = []
    with without_gpu(notes):
        assert importlib.util.find_spec("transformer_engine") is None
        assert not any("transformer_engine" in note for note in notes)
        with contextlib.suppress(ImportError):
            import transformer_engine  # noqa: F401
    told = [note for note in notes if "transformer_engine" in note]
    assert told == [f"transformer_engine runs on GPUs only: choose {libraries.GPU_ONLY['transformer_engine']}"]


def test_deepspeed_gets_torch_s_adam():
    deepspeed = types.SimpleNamespace(ops=types.SimpleNamespace(adam=types.SimpleNamespace(FusedAdam=None)))
    deepspeed.initialize = lambda **config: config
    notes = []
    with contextlib.ExitStack() as changes:
        deepspeed.ops.__compatible_ops__ = {"shm": True}
        libraries.ADJUSTED["deepspeed"](deepspeed, changes, notes)
        weight = [nn.Parameter(torch.ones(2))]
        assert type(deepspeed.ops.adam.FusedAdam(weight, lr=0.1, betas=(0.9, 0.95))) is torch.optim.AdamW
        assert type(deepspeed.ops.adam.FusedAdam(weight, lr=0.1, adam_w_mode=False)) is torch.optim.Adam
        assert deepspeed.ops.__compatible_ops__ == {}
        assert not any("DeepSpeed on GPUs" in line for line in notes), "it is imported, and nothing runs with it"
        assert deepspeed.initialize(model=1) == {"model": 1}
    assert deepspeed.ops.adam.FusedAdam is None
    assert [line.partition(" → ")[0] for line in notes] == ["DeepSpeed's FusedAdam", "DeepSpeed on GPUs"]


def on_two_ranks():
    """The gradients of a script's model under DDP and FSDP2, on this rank's half of a batch; and what it is told."""
    from torch.distributed.fsdp import fully_shard

    rank, notes, gradients = dist.get_rank(), [], []
    with without_gpu(notes):
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
        for kind in ("DDP", "FSDP2", "FSDP2 with a factor of its own"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).cuda()
            x = torch.arange(16.0, device="cuda").view(4, 4).sin().chunk(2)[rank]
            if kind == "DDP":
                run = nn.parallel.DistributedDataParallel(model, device_ids=[rank], process_group=group)
            else:
                run = fully_shard(model, mesh=dist.init_device_mesh("cuda", (2,)))
                if kind != "FSDP2":  # another than the number of ranks: gloo cannot divide by it within a reduction
                    run.set_gradient_divide_factor(0.5)
            run(x).square().mean().backward()
            found = [p.grad if kind == "DDP" else p.grad.full_tensor() for p in model.parameters()]
            times = 4 if kind.endswith("of its own") else 1
            gradients.append([gradient / times for gradient in found])
    return gradients, notes


def test_on_two_ranks_the_gradients_are_one_process_s(world_of):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model(torch.arange(16.0).view(4, 4).sin()).square().mean().backward()
    for gradients, notes in world_of(2).run(on_two_ranks):
        assert any("the backend gloo" in line for line in notes)
        for kind in gradients:
            for ours, parameter in zip(kind, model.parameters(), strict=True):
                torch.testing.assert_close(ours, parameter.grad)


def attend_in_a_ring():
    """Causal attention, each rank with a part of the sequence: the gradients of the whole, put together again."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    with without_gpu([]):
        mesh = dist.init_device_mesh("cuda", (2,))
        whole = torch.arange(2 * 2 * 16 * 8.0, device="cuda").view(2, 2, 16, 8).sin()
        q = whole.clone()
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2], no_restore_buffers={q}):
            part = q.clone().requires_grad_()
            F.scaled_dot_product_attention(part, part * 2, part + 1, is_causal=True).square().sum().backward()
        return context_parallel_unshard(mesh, [part.grad.detach()], [2])[0].clone()


def test_attention_in_a_ring_has_one_process_s_gradients(world_of):
    q = torch.arange(2 * 2 * 16 * 8.0).view(2, 2, 16, 8).sin().requires_grad_()
    F.scaled_dot_product_attention(q, q * 2, q + 1, is_causal=True).square().sum().backward()
    for gradient in world_of(2).run(attend_in_a_ring):
        torch.testing.assert_close(gradient, q.grad, rtol=1e-5, atol=1e-5)  # sums in another order


def test_a_function_is_replaced_under_each_name_and_in_modules_that_come_or_grow_within_the_block(monkeypatch):
    def real():
        return "real"

    def module(name, **names):
        made = types.ModuleType(name)
        vars(made).update(names)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    there, other = module("there", f=real, alias=real), module("other", f=len)
    stand_ins.read_modules()
    with stand_ins.replaced_everywhere([(real, lambda: "ours")]):
        assert (there.f(), there.alias(), other.f([1])) == ("ours", "ours", 1)
        new = module("new", g=there.f)
        there.later = there.f
        other.f, other.g = max, there.f
    assert {there.f, there.alias, there.later, new.g, other.g} == {real}
    assert other.f is max
