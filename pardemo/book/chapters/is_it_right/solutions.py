"""One way to solve each exercise of this chapter."""


def my_first(script):
    # the sum belongs to the last micro-batch: what later ones add is in no all-reduce
    return script.replace("number == 0", "number == accumulate - 1")


def my_second(script):
    # a norm of the mean is not the mean of norms: sum first, then clip
    clip = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    without = script.replace(clip, "")
    return without.replace("    optimizer.step()\n", clip + "    optimizer.step()\n")


def my_third(script):
    # DDP sums what required a gradient when it was made: make it anew
    thaw = "        below.requires_grad_(True)\n"
    return script.replace(thaw, thaw + "        model = DistributedDataParallel(model.module)\n")


def my_fourth(script):
    # a bias that each rank adds is in the sum as often as there are ranks
    part = "linear(self.first(x).tanh(), self.second.weight, self.second.bias)"
    added = script.replace(part, "linear(self.first(x).tanh(), self.second.weight)")
    return added.replace("SumParts.apply(part)", "SumParts.apply(part) + self.second.bias")


def my_fifth(script):
    # each rank shuffles for itself, and deals out what it shuffled
    return script.replace("    if rank == 0:\n        sampler", "    sampler")
