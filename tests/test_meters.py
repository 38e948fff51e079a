"""The meters against independent truths: known transfers, the allocator's own events, known waits."""

import copy
import ctypes
import gc
import io
import os
import pickle
import socket
import struct
import threading
import time
from functools import partial

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from pardemo import MemoryMeter, Timeline, WireMeter
from pardemo.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from pardemo.meters import CallMeter
from pardemo.meters.timeline import Span, covered_s, overlap_s
from pardemo.meters.wire import kernel_counts
from pardemo.small_models import gpt

# ---------------------------------------------------------------- wire


def test_plain_sockets_are_counted_to_the_byte():
    assert kernel_counts()
    received = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        there, _ = server.accept()
        with there, WireMeter() as wire:
            sender = threading.Thread(target=out.sendall, args=(b"x" * 3_000_001,))
            sender.start()
            while len(received) < 3_000_001:
                received += there.recv(1 << 20)
            sender.join()
    assert wire.evidence == "wire"
    ends = [c for c in wire.connections if c.sent_bytes or c.received_bytes]
    assert sum(c.sent_bytes for c in ends) == 3_000_001, "this process holds both ends: it sent"
    assert sum(c.received_bytes for c in ends) == 3_000_001, "and received"


def test_what_still_waits_in_the_kernel_counts_as_sent():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        there, _ = server.accept()
        handed_over = 0
        out.setblocking(False)
        with there, WireMeter() as wire:
            try:
                while True:  # until the buffers are full; nobody reads
                    handed_over += out.send(b"x" * (1 << 20))
            except BlockingIOError:
                pass
    assert wire.sent_bytes == handed_over
    assert wire.received_bytes < handed_over


class Filter(ctypes.Structure):
    """An instruction of the kernel's packet filter (struct sock_filter, include/uapi/linux/filter.h)."""

    _fields_ = [("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32)]


def retransmitted_bytes(end):
    return struct.unpack_from("Q", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), 208)[0]


def test_what_the_kernel_sends_again_counts_once():
    """Packets that are really lost: for a while the receiver's socket drops whatever arrives."""
    SO_ATTACH_FILTER, SO_DETACH_FILTER, RETURN = 26, 27, 0x06
    drop_all = Filter(RETURN, 0, 0, 0)  # keep 0 bytes of a packet
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))  # struct sock_fprog
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        there, _ = server.accept()
        with there, WireMeter() as wire:
            try:
                there.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
            except PermissionError:
                pytest.skip("this kernel lets no ordinary user drop packets of his own socket")
            out.sendall(b"x" * 50_000)
            until = time.monotonic() + 60
            while not retransmitted_bytes(out) and time.monotonic() < until:  # the first after 0.2 s
                time.sleep(0.01)
            there.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            received = 0
            while received < 50_000:
                received += len(there.recv(1 << 20))
            again = retransmitted_bytes(out)
    assert again > 0
    assert (wire.sent_bytes, wire.received_bytes) == (50_000, 50_000)


def test_a_meter_does_not_touch_the_sockets_it_reads():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        for _ in range(3):
            with WireMeter():
                pass
        there, _ = server.accept()
        out.sendall(b"still here")
        assert there.recv(100) == b"still here"
        there.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["all_reduce", "ring", "all_gather", "all_gather list", "send"])
def test_counting_collectives_agrees_with_the_kernel(rank, world_size, name):
    x, part = torch.ones(world_size << 18), torch.ones(1 << 18)
    run = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather_single(x, part),
        "ring": lambda: ring_all_reduce(x),
        "all_gather list": lambda: dist.all_gather([torch.empty_like(part) for _ in range(world_size)], part),
        "send": lambda: dist.send(x, 1) if rank == 0 else rank == 1 and dist.recv(x, 0),
    }[name]
    run()
    with WireMeter(evidence="wire") as wire:
        run()
    with WireMeter(evidence="count") as count:
        run()
    assert (wire.evidence, count.evidence) == ("wire", "count")
    assert count.sent_bytes == pytest.approx(wire.sent_bytes, rel=0.005, abs=1000)
    assert count.received_bytes == pytest.approx(wire.received_bytes, rel=0.005, abs=1000)


def test_unknown_evidence_is_refused():
    with pytest.raises(ValueError, match=r"'wire'.*'count'.*'guess'"):
        WireMeter(evidence="guess")


# ---------------------------------------------------------------- memory


def model(checkpointing):
    net = gpt.GPT(500, hidden=128, layers=4, heads=8, sequence=64)
    for block in net.blocks if checkpointing else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return net


def make(checkpointing, optimizer):
    net = model(checkpointing)
    kinds = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}
    return net, kinds[optimizer](net.parameters(), lr=0.01)


def two_steps(net, optimizer, tokens):
    for _ in range(2):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()


def allocator_peak(action):
    """The peak of the running sum of the CPU allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        action()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak


@pytest.mark.parametrize(
    ("checkpointing", "optimizer", "fake"),
    [(False, "AdamW", False), (True, "AdamW", True), (True, "SGD", False), (False, "SGD", True)],
)
def test_the_peak_is_the_allocators(checkpointing, optimizer, fake):
    tokens = torch.randint(0, 500, (4, 64))
    net, opt = make(checkpointing, optimizer)
    truth = allocator_peak(lambda: two_steps(net, opt, tokens))
    del net, opt
    gc.collect()
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else torch.enable_grad():
        net, opt = make(checkpointing, optimizer)
        tokens = torch.randint(0, 500, (4, 64))
        with MemoryMeter(net, opt) as memory:
            two_steps(net, opt, tokens)
    assert memory.peak_bytes - memory.baseline_bytes == pytest.approx(truth, rel=0.01)


def test_kinds_are_what_they_say():
    net, opt = make(False, "AdamW")
    params = sum(p.numel() for p in net.parameters()) * 4
    steps = len(list(net.parameters())) * 4  # AdamW keeps one fp32 step count per parameter
    with MemoryMeter(net, opt) as memory:
        two_steps(net, opt, torch.randint(0, 500, (4, 64)))
        assert memory.live["parameters"] == params
        assert memory.live["gradients"] == params
        assert memory.live["optimizer states"] == 2 * params + steps
        opt.zero_grad()
        assert memory.live["gradients"] == 0
    assert memory.live["activations"] == 0, "nothing of a step outlives it"
    assert memory.baseline_bytes == params


def test_a_state_that_makes_the_peak_is_a_state_there():
    """The momentum is the last that a first step makes: only afterwards is it known to be the optimizer's."""
    net = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    with MemoryMeter(net, optimizer) as memory:
        net(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    assert memory.peak == dict.fromkeys(memory.peak, 0) | dict.fromkeys(
        ("parameters", "gradients", "optimizer states"), 1 << 20
    )


def test_views_count_once_and_frees_are_seen():
    with MemoryMeter() as memory:
        x = torch.zeros(1 << 18)
        views = [x[:10], x.view(2, -1), x.view(512, 512).T]
        assert memory.live_bytes == 1 << 20
        y = x + 1
        assert memory.live_bytes == 2 << 20
        del y
        assert memory.live_bytes == 1 << 20
        del x
        assert memory.live_bytes == 1 << 20, "a view keeps it alive"
        del views
        assert memory.live_bytes == 0
    assert memory.peak_bytes == 2 << 20


def test_what_was_there_before_is_not_counted_unless_it_is_the_modules():
    before = torch.zeros(1 << 18)
    with MemoryMeter() as memory:
        after = before * 2
        before[:5].add_(1)
    assert memory.live_bytes == after.nbytes
    made_from_a_list = [0.0] * 1000
    with MemoryMeter() as memory:
        kept = torch.tensor(made_from_a_list)
    assert memory.live_bytes == kept.nbytes


def test_the_peak_can_be_started_anew():
    with MemoryMeter() as memory:
        x = torch.zeros(1 << 20)
        del x
        memory.reset_peak()
        y = torch.zeros(1 << 10)
    assert memory.peak_bytes == y.nbytes


def saved(x, folder):
    """The same tensor in the forms that it is read from."""
    file = io.BytesIO()
    torch.save(x, file)
    safetensors.torch.save_file({"x": x}, folder / "x.safetensors")
    return file.getvalue(), pickle.dumps(x), (folder / "x.safetensors").read_bytes()


def test_what_nothing_dispatches_is_counted_where_it_can_be(tmp_path):
    x = torch.ones(1 << 16)
    array, buffer = x.numpy().copy(), bytearray(x.nbytes)
    checkpoint_file, pickled, safe = saved(x, tmp_path)
    for name, make in {
        "numpy": lambda: torch.from_numpy(array),
        "a buffer": lambda: torch.frombuffer(buffer, dtype=torch.float32),
        "torch.load": lambda: torch.load(io.BytesIO(checkpoint_file)),
        "pickle": lambda: pickle.loads(pickled),
        "safetensors, a file": lambda: safetensors.torch.load_file(tmp_path / "x.safetensors"),
        "safetensors, bytes": lambda: safetensors.torch.load(safe),
        "a deep copy": lambda: copy.deepcopy(x),
        "a storage's copy": lambda: torch.empty(0).set_(x.untyped_storage().clone()),
    }.items():
        with MemoryMeter() as memory:
            made = make()
            assert memory.live["activations"] == pytest.approx(x.nbytes, abs=256), name  # a file has a header
            del made
            assert memory.live_bytes == 0, name


def test_a_sparse_gradient_counts_with_its_indices():
    net = nn.Embedding(1000, 8, sparse=True)
    with MemoryMeter(net) as memory:
        net(torch.tensor([1, 2, 3])).sum().backward()
        assert memory.live["gradients"] == 3 * 8 + 3 * 8 * 4, "three rows' numbers in int64, and three rows in fp32"
        assert memory.live["activations"] == 0


def test_random_states_are_a_kind_of_their_own():
    """One with each checkpoint: the allocator has them, and the activations are still the activations."""
    net, tokens = model(checkpointing=True), torch.randint(0, 500, (1, 8))
    before = torch.get_rng_state, torch.random.get_rng_state, torch.frombuffer
    with MemoryMeter(net) as memory:
        loss = net(tokens).sum()
        assert memory.live["random states"] == len(net.blocks) * before[0]().nbytes
        kept = torch.get_rng_state()
        assert memory.live["random states"] == (len(net.blocks) + 1) * kept.nbytes
        loss.backward()
    assert memory.live["random states"] == kept.nbytes
    assert (torch.get_rng_state, torch.random.get_rng_state, torch.frombuffer) == before


# ---------------------------------------------------------------- timeline


def test_spans_of_ranks_share_a_clock(world_of):
    def two_spans():
        timeline = Timeline()
        dist.barrier()
        with timeline.span("compute", "wait"):
            time.sleep(0.05)
        with timeline.span("communication"):
            dist.barrier()
        return timeline.spans

    begin = time.monotonic()
    results = world_of(2).run(two_spans)
    end = time.monotonic()
    for rank, spans in enumerate(results):
        assert [(s.rank, s.kind, s.name) for s in spans] == [(rank, "compute", "wait"), (rank, "communication", "")]
        assert spans[0].end_s - spans[0].begin_s >= 0.05
        assert begin <= spans[0].begin_s <= spans[0].end_s <= spans[1].begin_s <= spans[1].end_s <= end


def test_cover_and_overlap():
    spans = [Span(0, "a", "", 0, 2), Span(0, "a", "", 1, 3), Span(0, "a", "", 5, 6), Span(0, "b", "", 2, 5.5)]
    assert covered_s([s for s in spans if s.kind == "a"]) == 4
    assert covered_s(spans) == 6
    assert overlap_s(spans, "a", "b") == 1.5
    assert covered_s([]) == 0


def test_a_span_is_noted_even_when_its_work_fails():
    timeline = Timeline()
    with pytest.raises(KeyError), timeline.span("compute"):
        raise KeyError
    assert [s.kind for s in timeline.spans] == ["compute"]


@pytest.mark.ranks(2)
def test_meters_begin_anew_each_time():
    wire, memory, x = WireMeter(), MemoryMeter(), torch.ones(1 << 18)
    dist.all_reduce(x)
    for _ in range(3):
        with wire:
            dist.all_reduce(x)
        with memory:
            torch.zeros(1 << 18)
        assert wire.sent_bytes == pytest.approx(1 << 20, rel=0.005)
        assert (memory.baseline_bytes, memory.live_bytes, memory.peak_bytes) == (0, 0, 1 << 20)


def test_what_looks_at_a_connection_leaves_its_flags_to_its_owner(monkeypatch):
    """gloo makes each connection non-blocking just after it is open: while a meter or the pacer has it in hand."""
    from pardemo.cluster.sockets import borrowed

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        made = socket.socket

        def and_its_owner(*args, **kwargs):
            found = made(*args, **kwargs)
            os.set_blocking(out.fileno(), False)
            return found

        for timeout in (None, 30):
            os.set_blocking(out.fileno(), True)
            monkeypatch.setattr(socket, "socket", and_its_owner)
            socket.setdefaulttimeout(timeout)
            try:
                with borrowed(out.fileno()):
                    pass
                assert socket.getdefaulttimeout() == timeout
            finally:
                socket.setdefaulttimeout(None)
                monkeypatch.undo()
            assert not os.get_blocking(out.fileno())


def test_a_copied_descriptor_counts_once_and_a_default_timeout_does_no_harm():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        there, _ = server.accept()
        copy = os.dup(out.fileno())
        socket.setdefaulttimeout(30)
        try:
            with there, WireMeter() as wire:
                out.sendall(b"x" * 1000)
                assert len(there.recv(2000)) == 1000
            assert os.get_blocking(out.fileno())
        finally:
            socket.setdefaulttimeout(None)
            os.close(copy)
    assert wire.sent_bytes == 1000


def test_connections_that_close_in_the_block_are_told():
    with socket.create_server(("127.0.0.1", 0)) as server:
        out = socket.create_connection(server.getsockname())
        there, _ = server.accept()
        with pytest.warns(UserWarning, match="connections closed while"), there, WireMeter():
            out.close()


@pytest.mark.ranks(2)
def test_a_collective_whose_bytes_nobody_knows_is_refused():
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"bytes.*allgather_coalesced"), WireMeter(evidence="count"):
        dist.all_gather_coalesced([[x.clone(), x.clone()]], [x])


@pytest.mark.ranks(2)
def test_calls_are_counted_of_torch_and_of_rings(world_size):
    n, tensor = world_size, torch.ones(world_size)
    with CallMeter() as calls:
        ring_all_reduce(tensor)
        ring_all_reduce(tensor, op="max")
        ring_reduce_scatter(tensor)
        ring_all_gather(tensor)
        dist.all_reduce(tensor)
        dist.all_gather_single(torch.empty(n * n), tensor)
        dist.reduce_scatter_single(torch.empty(1), tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        torch.ones(3) + 1
    with CallMeter() as none:
        torch.ones(3)
    assert calls.counts == {"all_reduce": 3, "reduce_scatter": 2, "all_gather": 2, "broadcast": 1}
    assert none.counts == {}


def test_a_storage_that_is_resized_counts_with_the_size_it_has():
    before = torch.ones(1000)
    inside_before = torch.UntypedStorage.resize_
    with MemoryMeter() as meter:
        made = torch.ones(1000)
        made.untyped_storage().resize_(0)
        assert meter.live_bytes == 0
        made.untyped_storage().resize_(8000)
        assert meter.live_bytes == 8000
        before.untyped_storage().resize_(0)  # was there before: not ours
        assert meter.live_bytes == 8000
        before.untyped_storage().resize_(400)  # filled from nothing: ours
        assert meter.live_bytes == 8400
        del made
        assert meter.live_bytes == 400
    assert meter.peak_bytes == 8400
    assert torch.UntypedStorage.resize_ is inside_before
