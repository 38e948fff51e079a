"""One way to solve each exercise of this chapter."""


def my_groups(axis, tp, dp, pp):
    # How many ranks a group has, and how far apart two neighbours are: tp runs
    # fastest, then dp, then pp.
    size, apart = {"tp": (tp, 1), "dp": (dp, tp), "pp": (pp, tp * dp)}[axis]
    first = [rank for rank in range(tp * dp * pp) if rank // apart % size == 0]
    return [[rank + apart * i for i in range(size)] for rank in first]


def my_order():
    # tp talks in every layer, dp once a step, and pipeline stages exchange the least.
    return "tp-dp-pp"


def my_mfu(params, layers, hidden, sequence, tokens_per_s, gpus, peak):
    # What the model needs for a token: 6 for each parameter, and the attention's
    # multiplications, which have none. That a layer is recomputed is not for the model.
    flops = 6 * params + 12 * layers * hidden * sequence
    return flops * tokens_per_s / (gpus * peak)
