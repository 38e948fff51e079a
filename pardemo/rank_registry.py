"""Lists what parts of the package add to the ranks of a World: modules to load before the fork, and frames to hide.

The names stand here as texts, so that :mod:`pardemo.world` imports nothing of the parts above it.
"""

#: Modules that every rank has loaded when it is forked.
PRELOAD = ("pardemo.collectives", "pardemo.meters")
#: Parts of the paths whose frames lie between a rank's start and the user's code.
HIDDEN_FRAMES = ("pardemo/world/rank.py", "pardemo/cells/", "pardemo/script/runtime/job.py", "<frozen runpy>")


def is_hidden(frame: str) -> bool:
    """Whether a line of a stack, or a file's path, is of such a frame."""
    return any(path in frame for path in HIDDEN_FRAMES)
