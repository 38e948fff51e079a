"""The weight of one sample in the mean over ranks that have different numbers of samples."""

from collections.abc import Sequence
from fractions import Fraction

from pardemo.draw.canvas import Canvas, Drawing
from pardemo.draw.palette import rank_colour

_LEFT, _HIGH, _ROW, _WIDEST = 84, 26, 34, 440


def unequal_shards(samples: Sequence[int]) -> Drawing:
    """A box for each sample, as wide as its weight: in the plain mean of the ranks' means, and in the weighted mean.

    Args:
        samples: of each rank, 2 to 4 ranks.

    Raises:
        ValueError: another number of ranks, or a rank without samples: it would not be readable.
    """
    ranks, whole = len(samples), sum(samples)
    if not 2 <= ranks <= 4 or min(samples) < 1:
        raise ValueError(f"the samples of 2 to 4 ranks can be drawn, at least one on each, not {list(samples)}")
    plain = [Fraction(1, ranks * count) for count in samples]
    panels = (
        ("plain mean: each rank counts the same", plain),
        ("weighted: each sample counts the same", [Fraction(1, whole)] * ranks),
    )
    scale = _WIDEST / (max(*samples, whole / ranks) / whole)  # units for what counts 1, the same in both panels
    canvas = Canvas(640, 2 * (36 + _ROW * ranks) + 28)
    for panel, (title, counts) in enumerate(panels):
        top = panel * (56 + _ROW * ranks) + 6
        canvas.text(_LEFT, top + 10, title, size=20, anchor="start", bold=True)
        for rank, (number, each) in enumerate(zip(samples, counts, strict=True)):
            y, wide = top + 30 + _ROW * rank, float(each) * scale
            canvas.text(_LEFT - 12, y + _HIGH / 2, f"rank {rank}", size=18, anchor="end")
            canvas.boxes([(_LEFT + wide * k, y, wide, _HIGH) for k in range(number)], rank_colour(rank), thick=0.8)
            label = f"{number} {'× ' if rank or panel else 'samples × '}{each}"
            canvas.text(_LEFT + wide * number + 10, y + _HIGH / 2, label, size=18, anchor="start")
    return Drawing(
        canvas,
        f"Ranks with {', '.join(map(str, samples))} samples. In the plain mean of their means a sample counts "
        f"{', '.join(map(str, plain))}; with weighted losses it counts {Fraction(1, whole)} everywhere.",
    )
