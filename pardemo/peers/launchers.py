"""The same experiment function as ranks of torchrun: one agent per host, here several agents on this one."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pardemo.errors import RankError


def under_agents(
    function: str, arguments: Sequence[str] = (), agents: int = 2, ranks_each: int = 1, timeout_s: float = 120.0
) -> Any:
    """Runs ``MODULE:FUNCTION`` under ``agents`` torchrun agents that meet over loopback; rank 0's result.

    Each agent believes itself a host of its own, as ``torchrun --nnodes`` does on real hosts.

    Raises:
        RankError: an agent failed or did not end in time; its last lines are in the message.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(agents), "--node-rank", str(index),
                "--nproc-per-node", str(ranks_each), "--master-addr", "127.0.0.1", "--master-port", str(port),
                "-m", "pardemo.world", function, *arguments,
            ],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
        )
        for index in range(agents)
    ]  # fmt: skip
    try:
        printed = [agent.communicate(timeout=timeout_s) for agent in started]
    except subprocess.TimeoutExpired:
        raise RankError(f"the {agents} torchrun agents did not end within {timeout_s:g} s") from None
    finally:
        for agent in started:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.wait()
    for index, agent in enumerate(started):
        if agent.returncode:
            tail = "\n".join(printed[index][1].strip().splitlines()[-60:])
            raise RankError(f"torchrun agent {index} ended with status {agent.returncode}:\n{tail}")
    return json.loads(printed[0][0].strip().splitlines()[-1])
