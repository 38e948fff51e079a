"""World: N real ranks, driven from a notebook or a script.

Each rank is a process of its own with ``torch.distributed`` ready in it, forked from a process that has
torch loaded (:mod:`pardemo.world.fork_server`), so that starting four of them takes tens of milliseconds. The same
experiment functions also run as the ranks of a job that another launcher started, on one host or many::

    torchrun --nnodes 2 --nproc-per-node 4 ... -m pardemo.world MODULE:FUNCTION [ARGS]
"""

from pardemo.world.world import World

__all__ = ["World"]
