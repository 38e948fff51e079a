"""A rank's memory in one step as a snapshot: see :mod:`pardemo.meters.snapshot`."""

from pardemo.meters.snapshot import Block as Block
from pardemo.meters.snapshot import snapshot as snapshot
