"""On a rank: the variables by which a launcher tells a process of its job, in the World's place."""

import os
import sys

from pardemo.measure.launch_lines import Launch


def set_for(launch: Launch, rank: int, size: int, port: int) -> None:
    """Sets what the launcher sets for a process of a job on one host, or on a cluster's, and removes the World's own.

    ``port``: where the ranks meet, whatever the line or the script's surroundings say.
    """
    local, beside = os.environ["LOCAL_RANK"], int(os.environ.get("LOCAL_WORLD_SIZE", size))
    os.environ.update(launch.environment)
    for entry in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if entry and entry not in sys.path:  # this process began before the launcher said it
            sys.path.insert(0, entry)
    place = {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": local, "LOCAL_SIZE": str(beside),
        "MASTER_ADDR": os.environ["MASTER_ADDR"], "MASTER_PORT": str(port),
    }  # fmt: skip
    torchruns = {
        "GROUP_RANK": str(rank // beside), "GROUP_WORLD_SIZE": str(-(-size // beside)),
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size), "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "pardemo-measure", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "False",
    }  # fmt: skip
    for name in place | torchruns:
        os.environ.pop(name, None)
    os.environ.update({"torchrun": place | torchruns, "deepspeed": place, "": {}}[launch.sets])
    os.environ["LOCAL_WORLD_SIZE"] = str(beside)  # of every launcher: as many GPUs a script is told of
