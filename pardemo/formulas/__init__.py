"""The articles' and papers' arithmetic, and nothing else: no torch, no processes, no measurements."""


def check_ranks(ranks: int) -> None:
    """Raises ValueError where there is no rank."""
    if ranks < 1:
        raise ValueError(f"the number of ranks must be at least 1, not {ranks}")


def check_seconds(*seconds: float) -> None:
    """Raises ValueError where a time is negative or no number."""
    if any(not time >= 0 for time in seconds):
        raise ValueError(f"a time is 0 s or more, not {min(seconds)}")
