"""Registers what packages add to the ranks of a World: modules to load before the fork, and frames to hide.

Those above :mod:`pardemo.world` are named in ``pardemo/__init__.py``, so that the world itself names none of them.
"""

#: Modules that every rank has loaded when it is forked.
PRELOAD: list[str] = []
#: Parts of the paths whose frames lie between a rank's start and the user's code.
HIDDEN_FRAMES: list[str] = []


def is_hidden(frame: str) -> bool:
    """Whether a line of a stack, or a file's path, is of such a frame."""
    return any(path in frame for path in HIDDEN_FRAMES)
