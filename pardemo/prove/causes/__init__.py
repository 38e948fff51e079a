"""Why two layouts part: each cause a small class that looks at what was recorded, and says so or says nothing."""

from pardemo.prove.causes.across import Open, across, left_open
from pardemo.prove.causes.begins import begin, overwritten
from pardemo.prove.causes.judge import findings, of_updates, printed, wrong_gradients

__all__ = [
    "Open",
    "across",
    "begin",
    "findings",
    "left_open",
    "of_updates",
    "overwritten",
    "printed",
    "wrong_gradients",
]
