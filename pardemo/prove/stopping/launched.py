"""A launcher to be killed: runs a script on ranks, in a program of its own, as a JSON file says."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from pardemo.prove import runner
from pardemo.prove.layouts import Layout
from pardemo.prove.runner import Options
from pardemo.prove.stopping.stops import Stop
from pardemo.prove.stopping.trials import follower


def main(request: str) -> None:
    """Runs until it is killed."""
    asked = json.loads(Path(request).read_text("utf-8"))
    said = asked["stop"]
    stop = Stop(**{**said, "ranks": tuple(said["ranks"]), "saves_s": tuple(said["saves_s"])})
    options = Options(asked["steps"], asked["double"], asked["where"], asked["timeout_s"])
    options = replace(options, follow=follower(asked["saves"], stop, asked["marker"]))
    layout = Layout(asked["ranks"], asked["values"], tuple(asked["line"]))
    runner.ran(layout, options, Path(asked["place"]))


if __name__ == "__main__":
    main(sys.argv[1])
