"""One way to solve each exercise of this chapter."""


def my_checkpoints(batch, sequence, hidden, layers, ranks, partitioned):
    whole = 2 * batch * sequence * hidden * layers  # 16 bits are 2 bytes
    return whole / ranks if partitioned else whole


def my_order(arena):
    place = arena.take(12 * 3)  # all checkpoints' place, before any temporary
    for _ in range(12):
        temporary = arena.take(40)  # finds the same hole each time
        arena.give_back(temporary)
    return [place + 3 * i for i in range(12)]
