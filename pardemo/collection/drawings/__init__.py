"""Drawings of what is cut and what travels, one function each; :mod:`..figures` draws what was measured.

>>> from pardemo.collection import drawings
>>> drawings.ring_all_reduce(4)
player of 7 steps: ring all-reduce of 4 ranks
"""

from pardemo.collection.drawings.attention import attention_heads, fused_qkv
from pardemo.collection.drawings.checkpoints import checkpoints_in_parts
from pardemo.collection.drawings.data_parallel import ddp_buckets, parameter_server_and_ring
from pardemo.collection.drawings.finetune import finetune_flow, lora
from pardemo.collection.drawings.hosts import cube
from pardemo.collection.drawings.matrices import column_cut, mlp_cut, row_cut
from pardemo.collection.drawings.pipeline import pipeline_schedule
from pardemo.collection.drawings.player import Player
from pardemo.collection.drawings.ring import ring_all_reduce
from pardemo.collection.drawings.sequence import sequence_parallel
from pardemo.collection.drawings.svg import Canvas, Drawing
from pardemo.collection.drawings.vocabulary import vocabulary_loss
from pardemo.collection.drawings.zero import zero_stages
from pardemo.collection.drawings.zero_moments import zero_step

__all__ = [
    "Canvas",
    "Drawing",
    "Player",
    "attention_heads",
    "checkpoints_in_parts",
    "column_cut",
    "cube",
    "ddp_buckets",
    "finetune_flow",
    "fused_qkv",
    "lora",
    "mlp_cut",
    "parameter_server_and_ring",
    "pipeline_schedule",
    "ring_all_reduce",
    "row_cut",
    "sequence_parallel",
    "vocabulary_loss",
    "zero_stages",
    "zero_step",
]
