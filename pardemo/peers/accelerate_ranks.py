"""What ranks under Accelerate import sooner or later: named in ``--preload``, it is there before they are forked."""

import datasets  # noqa: F401, Accelerate asks for it when a checkpoint is read
import transformers.integrations.deepspeed  # noqa: F401, and for this under DeepSpeed

import pardemo.peers.accelerate_script
import pardemo.peers.deepspeed
import pardemo.peers.megatron
import pardemo.peers.scripts.train_accelerate  # noqa: F401
