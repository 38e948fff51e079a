"""Optimizers whose states and work are shared by the ranks.

- :class:`ShardedMuon`: Muon on FSDP2's shards; each matrix is put together once, on one rank.
"""

from pardemo.optimizers.muon import ShardedMuon, orthogonalised

__all__ = ["ShardedMuon", "orthogonalised"]
