"""One way to solve each exercise of this chapter."""

import math


def my_positions(rank, ranks, tokens):
    each = tokens // (2 * ranks)  # tokens of a piece
    front, back = rank, 2 * ranks - 1 - rank
    return [piece * each + place for piece in (front, back) for place in range(each)]


def my_merge(first, second):
    largest = max(first[0], second[0])
    # Each sum was taken relative to its own block's largest score: bring both to the common one.
    sums = [math.exp(block[0] - largest) * block[1] for block in (first, second)]
    total = sum(sums)
    out = (sums[0] * first[2] + sums[1] * second[2]) / total
    return largest, total, out


def my_bytes(way, ranks, batch, tokens, hidden, heads, kv_heads):
    mine = 2 * batch * tokens // ranks * hidden  # bytes of one activation of this rank's tokens
    if way == "ring":
        laps = 3  # keys and values forward, again backward, and their gradients
        return laps * (ranks - 1) * 2 * mine * kv_heads / heads
    passes = 2  # forward and backward
    return passes * (ranks - 1) / ranks * mine * (2 + 2 * kv_heads / heads)
