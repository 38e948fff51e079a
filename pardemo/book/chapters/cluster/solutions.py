"""One way to solve each exercise of this chapter."""


def my_order(node_of):
    # ranks of a node stand next to each other: each node is entered once and left once
    return sorted(range(len(node_of)), key=lambda rank: node_of[rank])


def my_crossing(steps_each, steps_every, period, step_s, nbytes, ranks):
    sent = 2 * (ranks - 1) / ranks * nbytes
    # steps_each · (step_s + sent / B) = steps_every · (step_s + sent / (period · B)), solved for B
    return sent * (steps_each - steps_every / period) / (step_s * (steps_every - steps_each))
