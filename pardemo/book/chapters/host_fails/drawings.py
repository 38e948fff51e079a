"""When a host fails: what a failure costs over time, shards for another number of ranks, copies at a neighbour."""

from pardemo.draw.canvas import Canvas, drawing
from pardemo.draw.palette import COMPUTED, DONE, OTHER, RECEIVED, VERDICTS, WHOLE, rank_colour
from pardemo.draw.parts import legend
from pardemo.formulas import failures, memory

LOST = VERDICTS["fails"]
SAVE = DONE["communication"]  # bytes travel to where they are kept
BACK = RECEIVED


@drawing(302)
def saved_and_lost(canvas: Canvas) -> str:
    """A job over time: stretches of training, each with its save, a failure, the restart, and what is done again."""
    legend(canvas, 12, 20, {"training": COMPUTED, "a save": SAVE, "restart": DONE["idle"], "work to repeat": LOST})
    interval, save, restart, lost = 12, 2, 7, 7
    first, second, third, fourth = ([(interval, COMPUTED, word), (save, SAVE, "")] for word in "1234")
    failure = [(lost, LOST, "3"), (restart, DONE["idle"], "")]
    rows = {
        "no failure: four stretches": [*first, *second, *third, *fourth],
        "one failure: three in the same time": [*first, *second, *failure, *third],
    }
    unit = 11  # of a second
    for row, (title, boxes) in enumerate(rows.items()):
        y, x = 66 + 104 * row, 12.0
        canvas.text(12, y, title, "start", size=19, bold=True)
        for seconds, colour, word in boxes:
            canvas.box(x, y + 16, unit * seconds, 40, colour, word, thick=1)
            x += unit * seconds
            if colour == LOST:
                canvas.text(x, y + 72, "✗", size=22, bold=True)
    canvas.arrow([(12, 264), (12 + unit * 4 * (interval + save), 264)])
    canvas.text(12 + unit * 4 * (interval + save), 288, "time", "end")
    canvas.text(12, 288, "It costs a restart, and the work since the last save.", "start")
    return (
        f"A job trains {interval} seconds, saves for {save}, and so on. Without a failure, four stretches are done "
        f"after {4 * (interval + save)} seconds. With a failure {lost} seconds into the third stretch, these have to "
        f"be repeated, a restart takes {restart}, and the third stretch begins anew: in the same time three are done."
    )


@drawing(252)
def shards_of_fewer(canvas: Canvas, rows: int = 12, before: int = 4, now: int = 3) -> str:
    """A tensor of ``rows`` rows in the shards that ``before`` ranks saved, and which of them ``now`` ranks read."""
    each, left = 616 / rows, 12
    canvas.text(left, 18, f"saved by {before} ranks", "start", bold=True, size=20)
    canvas.text(left, 234, f"read by {now} ranks", "start", bold=True, size=20)
    for shard in range(before):
        begin, end = memory.shard_of(rows, before, shard)
        if begin < end:
            x, width = left + each * begin, each * (end - begin)
            canvas.box(x, 36, width, 46, rank_colour(shard), f"rank {shard}")
    reads = [failures.resharded(rows, before, now, rank) for rank in range(now)]
    for rank in range(now):
        for read in reads[rank]:
            x, width = left + each * read.begin, each * (read.end - read.begin)
            canvas.arrow([(x + width / 2, 84), (x + width / 2, 142)], DONE["communication"], 3)
            canvas.box(x, 146, width, 34, rank_colour(read.shard), thick=1)
        begin, end = memory.shard_of(rows, now, rank)
        if begin < end:
            x, width = left + each * begin, each * (end - begin)
            canvas.box(x, 146, width, 34, thick=4)
            canvas.text(x + width / 2, 200, f"rank {rank}")
    summary = "; ".join(
        f"rank {rank} from " + " and ".join(f"shard {r.shard} rows {r.begin} to {r.end - 1}" for r in of_rank)
        for rank, of_rank in enumerate(reads)
    )
    return f"{rows} rows, saved in {before} shards, are read by {now} ranks: {summary}."


@drawing()
def copies_at_neighbours(canvas: Canvas, *dead: int) -> str:
    """Four hosts in a row that closes to a ring: each has its own state, and a copy of the state of the one before it.

    Of a host that has died, a new one gets the state from the next host, where that one lives.
    """
    hosts = 4
    words = [
        f"State {host} is lost with host {host} and its copy."
        if (keeper := (host + 1) % hosts) in dead
        else f"A new host {host} gets state {host} from host {keeper}."
        for host in dead
    ]
    canvas.height = 264 + 24 * len(words)
    edge, gap = 22, 24
    wide = (640 - 2 * edge + gap) / hosts - gap
    lefts = [edge + (wide + gap) * host for host in range(hosts)]
    legend(canvas, 12, 20, {"a copy is sent": SAVE, "it comes back": BACK, "host that has died": OTHER})
    for host, x in enumerate(lefts):
        gone, before = host in dead, (host - 1) % hosts
        canvas.text(x + wide / 2, 58, f"host {host}", bold=True, size=20)
        canvas.box(x, 76, wide, 126, WHOLE if not gone else "none", dashed=gone)
        for y, owner, word in ((84, host, f"state {host}"), (146, before, f"copy of {before}")):
            fill = OTHER if gone else rank_colour(owner)
            canvas.box(x + 8, y, wide - 16, 46, fill, "" if gone else word)
    for host in range(hosts):
        after = (host + 1) % hosts
        begin, end = (lefts[host] + wide + 1, 107.0), (lefts[after] - 1, 169.0)
        around = [] if after else [(630.0, 107.0), (630.0, 240.0), (10.0, 240.0), (10.0, 169.0)]
        before_it_died = host in dead or after in dead
        canvas.arrow([begin, *around, end], OTHER if before_it_died else SAVE, 3, dashed=before_it_died)
        if host in dead and after not in dead:
            middles = lefts[after] + wide / 2, lefts[host] + wide / 2
            canvas.arrow([(middles[0], 193), (middles[0], 221), (middles[1], 221), (middles[1], 204)], BACK, 4)
    canvas.lines(12, 268, words, "start")
    return (
        f"{hosts} hosts, each with its own state and a copy of the one before it; that of host {hosts - 1} is at host "
        f"0. {' '.join(words)}"
    )
