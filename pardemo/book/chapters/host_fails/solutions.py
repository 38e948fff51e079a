"""One way to solve each exercise of this chapter."""

import os

import torch


def my_reads(rows, before, now, rank):
    old, new = -(-rows // before), -(-rows // now)  # rows of a shard, rounded up
    first, last = min(rank * new, rows), min((rank + 1) * new, rows)
    pieces = []
    for shard in range(before):
        begin, end = max(first, shard * old), min(last, (shard + 1) * old)
        if begin < end:
            pieces.append((shard, begin, end))
    return pieces


def my_save(state, path):
    beside = path.with_suffix(".new")  # in the same folder: a rename goes nowhere else
    with open(beside, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def my_steps(step_s, save_s, gpu_s, gpus):
    between_s = gpu_s / gpus  # any of them stops the job
    interval = (2 * save_s * between_s) ** 0.5
    return max(1, round(interval / step_s))
