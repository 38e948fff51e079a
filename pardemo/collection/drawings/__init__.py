"""Drawings of what is cut and what travels, one function each; :mod:`..figures` draws what was measured.

>>> from pardemo.collection import drawings
>>> drawings.ring_all_reduce(4)
player of 7 steps: ring all-reduce of 4 ranks
"""

from pardemo.collection.drawings.accelerate import copies_of_shards, launchers, prepare
from pardemo.collection.drawings.algorithms import ring_tree_chain
from pardemo.collection.drawings.attention import attention_heads, fused_qkv
from pardemo.collection.drawings.block import block_cut
from pardemo.collection.drawings.checkpoints import checkpoints_in_parts
from pardemo.collection.drawings.collectives import collectives
from pardemo.collection.drawings.cube_on_hosts import cube_on_hosts
from pardemo.collection.drawings.cube_over_time import cube_step
from pardemo.collection.drawings.data_parallel import (
    data_parallel_step,
    ddp_buckets,
    hybrid_shards,
    parameter_server_and_ring,
)
from pardemo.collection.drawings.finetune import finetune_flow, lora
from pardemo.collection.drawings.grouped import shared_heads
from pardemo.collection.drawings.hops import two_hops
from pardemo.collection.drawings.hosts import cube
from pardemo.collection.drawings.kept import block_activations
from pardemo.collection.drawings.launching import file_to_ranks, tensor_parallel_with_zero
from pardemo.collection.drawings.layout_choice import form_choice, layout_choice, sharding_choice
from pardemo.collection.drawings.machines import two_machines
from pardemo.collection.drawings.matrices import column_cut, mlp_cut, row_cut
from pardemo.collection.drawings.mistakes import seven_mistakes
from pardemo.collection.drawings.numbers import two_cuts_in_numbers
from pardemo.collection.drawings.one_script import one_script
from pardemo.collection.drawings.one_sum import one_sum_or_three
from pardemo.collection.drawings.pipeline import pipeline_schedule
from pardemo.collection.drawings.placements import three_placements
from pardemo.collection.drawings.plan import (
    epoch_of_steps,
    gated_layer,
    memory_by_batch,
    states_and_gpu,
)
from pardemo.collection.drawings.player import Player
from pardemo.collection.drawings.remaining import fragments, kept_over_a_step, waiting_places
from pardemo.collection.drawings.ring import ring_all_reduce
from pardemo.collection.drawings.sent_instead import sent_instead
from pardemo.collection.drawings.sequence import sequence_parallel
from pardemo.collection.drawings.stages import pipeline_stages, two_chunks
from pardemo.collection.drawings.step_parts import step_parts
from pardemo.collection.drawings.svg import Canvas, Drawing
from pardemo.collection.drawings.texts import cut_tails, four_answers, labelled_tokens, rows_seen, shared_words
from pardemo.collection.drawings.three_cuts import sequence_cuts
from pardemo.collection.drawings.tied import tied_weights
from pardemo.collection.drawings.two_hosts import two_hosts
from pardemo.collection.drawings.unequal import unequal_shards
from pardemo.collection.drawings.vocabulary import vocabulary_lookup, vocabulary_loss
from pardemo.collection.drawings.whole import still_whole
from pardemo.collection.drawings.zero import zero_stages
from pardemo.collection.drawings.zero_bytes import sixteen_bytes, states_by_ranks
from pardemo.collection.drawings.zero_moments import zero_step
from pardemo.collection.drawings.zero_or_tensor import zero3_or_tensor_parallel
from pardemo.collection.drawings.zero_traffic import shards_on_hosts, sums_in_8_bits, zero_traffic

__all__ = [
    "Canvas",
    "Drawing",
    "Player",
    "attention_heads",
    "block_activations",
    "block_cut",
    "checkpoints_in_parts",
    "collectives",
    "column_cut",
    "copies_of_shards",
    "cube",
    "cube_on_hosts",
    "cube_step",
    "cut_tails",
    "data_parallel_step",
    "ddp_buckets",
    "epoch_of_steps",
    "file_to_ranks",
    "finetune_flow",
    "form_choice",
    "four_answers",
    "fragments",
    "fused_qkv",
    "gated_layer",
    "hybrid_shards",
    "kept_over_a_step",
    "labelled_tokens",
    "launchers",
    "layout_choice",
    "lora",
    "memory_by_batch",
    "mlp_cut",
    "one_script",
    "one_sum_or_three",
    "parameter_server_and_ring",
    "pipeline_schedule",
    "pipeline_stages",
    "prepare",
    "ring_all_reduce",
    "ring_tree_chain",
    "row_cut",
    "rows_seen",
    "sent_instead",
    "sequence_cuts",
    "sequence_parallel",
    "seven_mistakes",
    "sharding_choice",
    "shards_on_hosts",
    "shared_heads",
    "shared_words",
    "sixteen_bytes",
    "states_and_gpu",
    "states_by_ranks",
    "step_parts",
    "still_whole",
    "sums_in_8_bits",
    "tensor_parallel_with_zero",
    "three_placements",
    "tied_weights",
    "two_chunks",
    "two_cuts_in_numbers",
    "two_hops",
    "two_hosts",
    "two_machines",
    "unequal_shards",
    "vocabulary_lookup",
    "vocabulary_loss",
    "waiting_places",
    "zero3_or_tensor_parallel",
    "zero_stages",
    "zero_step",
    "zero_traffic",
]
