"""The speed table: every figure a ratio, ours against a peer, measured side by side in one run.

``pardemo bench`` runs it, from a checkout. The table that is committed is made of several such tables, of different
days: :mod:`bench.runs`.
"""

#: name -> the function that measures its rows, as module:function of this package
BENCHES = {
    "import": "processes:importing",
    "launch": "processes:launch",
    "ring": "collectives:ring",
    "cluster": "collectives:clusters",
    "data-parallel": "engines:data_parallel",
    "pipeline": "engines:pipeline",
    "tensor-parallel": "engines:tensor_parallel",
    "context-parallel": "engines:context_parallel",
    "expert-parallel": "engines:expert_parallel",
    "muon": "engines:muon",
    "low-precision": "collectives:low_precision",
    "zero": "engines:zero",
    "finetune": "finetune:finetune",
    "predict": "finetune:predicting",
    "loss-head": "finetune:loss_head",
    "plan": "processes:plan",
    "pytest": "processes:pytest_plugin",
    "measure": "measure:rows",
    "growth": "growth:rows",
}
