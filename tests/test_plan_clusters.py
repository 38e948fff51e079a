"""Several hosts: what goes through their adapters, what all their GPUs cost. By hand, from names and datasheets."""

import pytest
from test_plan import two_layers

from pardemo.planner import hardware
from pardemo.planner.dry_run import measured_peak
from pardemo.planner.fine_tune import plan_table
from pardemo.planner.job import RankJob
from pardemo.planner.layouts.machines import Machine

H, MIDDLE, V, LAYERS = 256, 704, 4096, 2
PSI = 2 * V * H + LAYERS * (3 * H**2 + 3 * H * MIDDLE + 2 * H) + H  # keys and values are half as wide
SLOW = 1e9 / 8  # 1 Gbit/s a host


def planned(hosts):
    """Full fine-tuning under stage 2 on four A800s, one micro-batch a step, ten steps."""
    job = RankJob(two_layers(), sequence=128, zero=measured_peak.BUCKETS)
    machine = Machine(hardware.gpu("A800-80GB"), 4, 4 // hosts, SLOW)
    asked = plan_table.Request(
        job, machine, 8, 10, engines=("zero-2",), checkpointing=(True,), host_states=("none",), batches=(2,), price=3.0
    )
    (one,) = plan_table.plan(asked).rows
    return one


@pytest.mark.parametrize(("hosts", "bytes_per_s", "start"), [(1, 200e9, 50e-6), (2, SLOW, 250e-6), (4, SLOW, 250e-6)])
def test_gradients_of_several_hosts_go_through_their_adapters(hosts, bytes_per_s, start):
    one = planned(hosts)
    # all-reduced in bf16, and gathered: 3Ψ·(N − 1)/N, by four ranks wherever they are
    sent = 3 * 3 / 4 * 2 * PSI
    assert one.step.sent_bytes == pytest.approx(sent, rel=0.02)
    waited = 2 * 2 * start  # two collectives, for each doubling of ranks
    assert one.step.parts["data-parallel traffic"] == pytest.approx(sent / (0.8 * bytes_per_s) + waited, rel=0.02)


@pytest.mark.parametrize("hosts", [1, 2])
def test_every_gpu_of_every_host_is_paid(hosts):
    one = planned(hosts)
    assert one.money == pytest.approx(4 * 3.0 * 10 * one.step.seconds / 3600)


@pytest.mark.parametrize(
    ("name", "gigabits"),
    [
        ("ethernet-25g", 25),
        ("infiniband-400g", 400),
        ("infiniband-8x400g", 3200),
        ("50", 50),
        ("0.2", 0.2),
    ],
)
def test_a_link_has_the_gigabits_of_its_name(name, gigabits):
    assert 8 * hardware.link(name) == pytest.approx(gigabits * 1e9)


def test_a_link_without_a_rate_is_refused():
    for told in ("0", "-1", "nan", "inf"):
        with pytest.raises(ValueError, match=r"0.*Gbit/s"):
            hardware.link(told)
