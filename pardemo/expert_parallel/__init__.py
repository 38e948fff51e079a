"""Expert parallelism: each rank has some of a layer's experts, and tokens travel to those that their router chose.

To read first: :mod:`pardemo.expert_parallel.plain`, a router and two all-to-alls by hand.

- :class:`Router`: which experts, with what weights; :func:`auxiliary_loss`, :func:`z_loss` and ``update_bias`` keep
  their shares even, ``topk_groups`` keeps a token's experts on few nodes.
- :func:`plan`, :func:`dispatch`, :func:`combine`: rows sorted by expert, by an uneven all-to-all there and back.
- :class:`ExpertParallel`: all of it around any experts, with a shared one, with or without dropping.

A rank with T tokens of h numbers, each of which goes to k experts, sends (N−1)/N·T·k·h numbers there and as many back,
forward and once more backward, if all experts get the same. They do not, and the rank that gets most is the one that
all wait for: :func:`imbalance`.

Sources: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Fedus et al. 2021, "Switch Transformers" (arXiv 2101.03961);
DeepSeek-V3 (arXiv 2412.19437, 2.1.2).
"""

from pardemo.expert_parallel.dispatch import RoutingPlan, combine, dispatch, plan
from pardemo.expert_parallel.layer import ExpertParallel
from pardemo.expert_parallel.router import Router, Routing, auxiliary_loss, imbalance, load_of_all, z_loss

__all__ = [
    "ExpertParallel",
    "Router",
    "Routing",
    "RoutingPlan",
    "auxiliary_loss",
    "combine",
    "dispatch",
    "imbalance",
    "load_of_all",
    "plan",
    "z_loss",
]
