"""The same experiment functions as ranks of torchrun: two agents on loopback, and on two emulated hosts."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from pardemo.peers import launchers
from pardemo.small_models import classifier as small
from pardemo.world import launched
from pardemo.world.errors import RankError

FUNCTION = "pardemo.small_models.classifier:train_bucketed"


def test_two_agents_give_the_bits_of_one_world(world_of):
    there = launchers.under_agents(FUNCTION, agents=2, ranks_each=2)
    here = world_of(4).run(small.train_bucketed)[0]
    assert there == here
    assert there["ranks"] == 4


def test_an_agent_that_fails_is_told():
    with pytest.raises(RankError, match=r"ended with status \d(.|\n)*no function 'nothing'"):
        launchers.under_agents("pardemo.small_models.classifier:nothing", agents=1)


def test_when_one_host_fails_the_others_and_their_sessions_end_at_once():
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"status.*3"):
        launchers.together({"other": "setsid sleep 4243 & wait", "one": "sleep 0.3; echo sorry >&2; exit 3"}, 240)
    assert time.monotonic() - begin < 120
    assert subprocess.run(["pgrep", "-f", "^sleep 4243$"], capture_output=True, check=False).returncode == 1


def test_what_others_wait_for_is_not_held_up_by_its_own_output():
    lines = f"{sys.executable} -c \"print('x' * 300000)\"; touch done"
    wait = "until [ -e done ]; do sleep 0.05; done; echo seen"
    with tempfile.TemporaryDirectory() as folder:
        told = launchers.together({"waits": wait, "talks": lines}, 120, Path(folder))
    assert [len(text) for text in told] == [5, 300001]


NAMESPACES = """
set -eu
mount -t tmpfs none /run  # named namespaces live there; this mount is this script's alone
ip netns add a; ip netns add b
ip link add va netns a type veth peer name vb netns b
for host in a b; do ip -n $host link set lo up; done
ip -n a addr add 10.77.0.1/24 dev va; ip -n a link set va up
ip -n b addr add 10.77.0.2/24 dev vb; ip -n b link set vb up
agent() {{ ip netns exec $1 {python} -m torch.distributed.run --nnodes 2 --node-rank $2 --nproc-per-node 1 \
    --master-addr 10.77.0.1 --master-port 29511 --local-addr 10.77.0.$(($2 + 1)) -m pardemo.world {function}; }}
agent b 1 & agent a 0; wait $!
"""


@pytest.mark.nightly
def test_two_hosts_joined_by_a_cable(world_of):
    """Two network namespaces and a veth pair: no loopback, no shared address, a real link between the ranks."""
    script = NAMESPACES.format(python=sys.executable, function=FUNCTION)
    allowed = subprocess.run(
        ["unshare", "-rnm", "sh", "-ec", "mount -t tmpfs none /run; ip netns add x"], capture_output=True, check=False
    )
    if allowed.returncode:
        pytest.skip("this machine allows no network namespaces")
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "-rnm", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    here = world_of(2).run(small.train_bucketed)[0]
    assert here["digest"] in done.stdout


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [
        ([FUNCTION], {}, "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start it by torchrun"),
        (["no_colon"], "alone", "'no_colon' is not of the form MODULE:FUNCTION"),
        (["no_such_module:f"], "alone", "cannot import module 'no_such_module'"),
        (["pardemo.small_models.classifier:CLASSES"], "alone", "is not a function"),
    ],
)
def test_bad_input_is_one_line(arguments, environment, told, monkeypatch, capfd):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in alone.items() if environment == "alone" else ():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "path", sys.path[:])
    assert launched.main(arguments) == 2
    error = capfd.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1


def test_arguments_are_literals_or_text():
    from pardemo.world.launched import value_of

    assert [value_of(t) for t in ("4", "[1, 2]", "ring", "None")] == [4, [1, 2], "ring", None]


def says(text):
    return launched.first_to_say(text), launched.first_to_say(f"{text} of rank {dist.get_rank()}")


def test_what_all_ranks_find_wrong_is_told_once(world_of, monkeypatch):
    told = world_of(4).run(says, "the data are missing")
    assert sorted(first for first, _ in told) == [False, False, False, True]
    assert all(own for _, own in told), "what one rank alone finds it tells"
    for rank, expected in (("0", True), ("1", False)):  # before they have met
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert launched.first_to_say("no such recipe") is expected
