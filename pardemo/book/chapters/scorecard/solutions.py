"""One way to solve each exercise of this chapter."""


def my_verdict(predicted, measured, rel, evidence, instead):
    def near(value):
        return abs(measured - value) <= rel * abs(value)

    if near(predicted):
        return "holds"
    if instead is not None and near(instead):
        return "differs"
    # Seconds depend on the machine; bytes and results do not.
    return "off" if evidence in ("time", "paced") else "fails"


def my_step_bytes(batch, sequence, hidden, tp, dp):
    activation = 4 * batch * sequence * hidden  # fp32
    weights = 4 * 2 * hidden * (4 * hidden) / tp  # h → 4h and 4h → h: a rank has 1/tp of both
    # On a ring an all-reduce among N sends 2(N−1)/N of what is summed.
    forward = backward = 2 * (tp - 1) / tp * activation
    gradients = 2 * (dp - 1) / dp * weights
    return forward + backward + gradients
