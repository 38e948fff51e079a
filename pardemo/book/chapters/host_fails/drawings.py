"""When a host fails: what a failure costs over time, shards for another number of ranks, copies at a neighbour."""

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import COMPUTED, DONE, OTHER, RANKS, VERDICTS, WHOLE
from pardemo.draw.parts import legend
from pardemo.formulas import failures

LOST = VERDICTS["fails"]
SAVE = DONE["communication"]  # bytes travel to where they are kept
UNIT = 11.0  # of a drawing for a second


def saved_and_lost() -> Drawing:
    """A job over time: stretches of training, each with its save, a failure, the restart, and what is done again."""
    canvas = Canvas(640, 300)
    legend(canvas, 12, 20, {"training": COMPUTED, "a save": SAVE, "restart": DONE["idle"], "lost": LOST})
    interval, save, restart, lost = 12, 2, 5, 7
    for row, (title, stretches, fails) in enumerate(
        (("no failure", 4, False), ("one failure, in the third stretch", 3, True))
    ):
        y, x = 66 + 112 * row, 12.0
        canvas.text(12, y, title, size=19, anchor="start", bold=True)
        for number in range(stretches):
            if fails and number == 2:
                x = _box(canvas, x, y, lost, LOST, "3")
                canvas.text(x, y + 72, "✗", size=22, bold=True)
                x = _box(canvas, x, y, restart, DONE["idle"])
                x = _box(canvas, x, y, interval, COMPUTED, "3")
            else:
                x = _box(canvas, x, y, interval, COMPUTED, str(number + 1))
            x = _box(canvas, x, y, save, SAVE)
    canvas.text(12, 278, "Lost: a restart, and the work since the last save.", size=18, anchor="start")
    return Drawing(
        canvas,
        f"A job trains {interval} seconds, saves for {save}, and so on. Without a failure, four stretches are done "
        f"after {4 * (interval + save)} seconds. With a failure {lost} seconds into the third stretch, these are "
        f"lost, a restart takes {restart}, and the third stretch begins anew.",
    )


def _box(canvas: Canvas, x: float, y: float, seconds: float, colour: str, word: str = "") -> float:
    """A box over time; where the next one begins."""
    canvas.box(x, y + 16, UNIT * seconds, 40, colour, word, size=18, thick=1)
    return x + UNIT * seconds


def shards_of_fewer(rows: int = 12, before: int = 4, now: int = 3) -> Drawing:
    """A tensor of ``rows`` rows in the shards that ``before`` ranks saved, and which of them ``now`` ranks read."""
    canvas = Canvas(640, 252)
    each, left = 616 / rows, 12
    canvas.text(left, 18, f"saved by {before} ranks", anchor="start", bold=True)
    canvas.text(left, 234, f"read by {now} ranks", anchor="start", bold=True)
    for shard in range(before):
        begin, end = failures.shard_of(rows, before, shard)
        if begin < end:
            x, width = left + each * begin, each * (end - begin)
            canvas.box(x, 36, width, 46, RANKS[shard % len(RANKS)], f"rank {shard}", size=18)
    for rank in range(now):
        for read in failures.resharded(rows, before, now, rank):
            x, width = left + each * read.begin, each * (read.end - read.begin)
            canvas.arrow([(x + width / 2, 84), (x + width / 2, 142)], DONE["communication"], 3)
            canvas.box(x, 146, width, 34, RANKS[read.shard % len(RANKS)], thick=1)
        begin, end = failures.shard_of(rows, now, rank)
        if begin < end:
            x, width = left + each * begin, each * (end - begin)
            canvas.box(x, 146, width, 34, thick=4)
            canvas.text(x + width / 2, 200, f"rank {rank}", size=18)
    reads = [failures.resharded(rows, before, now, rank) for rank in range(now)]
    told = "; ".join(
        f"rank {rank} from " + " and ".join(f"shard {r.shard} rows {r.begin} to {r.end - 1}" for r in of_rank)
        for rank, of_rank in enumerate(reads)
    )
    return Drawing(canvas, f"{rows} rows, saved in {before} shards, are read by {now} ranks: {told}.")


def copies_at_neighbours(hosts: int = 4, dead: tuple[int, ...] = (2,)) -> Drawing:
    """Hosts in a row that closes to a ring: each has its own state, and a copy of the state of the one before it."""
    canvas = Canvas(640, 262)
    wide, gap = 616 / hosts, 20
    legend(canvas, 12, 20, {"arrow: a copy travels": DONE["communication"], "a host that has died": OTHER})
    for host in range(hosts):
        x, gone, before = 12 + wide * host, host in dead, (host - 1) % hosts
        canvas.text(x + (wide - gap) / 2, 58, f"host {host}", bold=True)
        canvas.box(x, 76, wide - gap, 126, WHOLE if not gone else "none", dashed=gone)
        for y, owner, word in ((84, host, f"state {host}"), (146, before, f"copy of {before}")):
            fill = OTHER if gone else RANKS[owner % len(RANKS)]
            canvas.box(x + 8, y, wide - gap - 16, 46, fill, "" if gone else word, size=18)
        if host < hosts - 1:
            canvas.arrow([(x + wide - gap + 1, 107), (x + wide - 1, 169)], DONE["communication"], 3)
    lost = [host for host in dead if (host + 1) % hosts in dead]
    words = f"State {lost[0]} is lost: host {lost[0]} and its copy are gone." if lost else (
        f"State {dead[0]} is there still, at host {(dead[0] + 1) % hosts}." if dead else "Each state is there twice."
    )  # fmt: skip
    canvas.text(12, 228, words, size=18, anchor="start")
    canvas.text(12, 250, f"The copy of state {hosts - 1} goes to host 0.", size=18, anchor="start")
    return Drawing(canvas, f"{hosts} hosts, each with its own state and a copy of the one before it. {words}")
