"""Imports what ranks under Accelerate need sooner or later: with ``--preload`` it is loaded before they are forked."""

from pardemo import extras

with extras.needed_by(__name__):
    import datasets  # noqa: F401, Accelerate asks for it when a checkpoint is read
    import transformers.integrations.deepspeed  # noqa: F401, and for this under DeepSpeed

import pardemo.peers.accelerate.script
import pardemo.peers.accelerate.scripts.train_accelerate  # noqa: F401
