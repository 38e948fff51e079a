"""What a run does step after step, whatever it trains on: its learning rates, and how many steps it takes."""

from pardemo.prove.runner import Run


def length_said(reference: Run, resumed: Run, begins: int) -> str:
    """What is wrong with where a run ends that goes on behind ``begins`` steps, empty if nothing.

    The undisturbed run may have gone on when enough of it was seen: to be over before what was seen of it is too early
    all the same.
    """
    shortest = min(resumed.records, key=lambda record: len(record.steps))
    own, wanted = len(shortest.steps), len(reference.records[0].steps) - begins
    if shortest.ended == "end" and own < wanted:
        ended = reference.records[0].ended == "end"
        missing = wanted - own if ended else f"at least {wanted - own}"
        return f"the run is over {missing} step{'s' * (wanted - own > 1)} before the undisturbed one"
    if reference.records[0].ended == "end" and own > wanted:
        return "the run takes more steps than the undisturbed one: its count of steps or epochs begins anew"
    return ""


def rates_said(reference: Run, resumed: Run, begins: int) -> tuple[str, int] | None:
    """What is wrong with the learning rates of a run that goes on behind ``begins`` steps, and since when; or None."""
    rates = [step.learning_rates for step in reference.records[0].steps]
    own = [step.learning_rates for step in resumed.records[0].steps]
    wanted = rates[begins:]
    steps = min(len(wanted), len(own))
    first = next((n for n in range(steps) if not _close(own[n], wanted[n])), None)
    if first is None:
        return None
    said = f"the rate is {_rate(own[first])} in place of {_rate(wanted[first])}"
    for place in range(len(rates)):
        pairs = list(zip(own[first:steps], rates[place:], strict=False))
        away = place - begins - first
        if away and len(pairs) >= min(2, steps - first) and all(_close(a, b) for a, b in pairs):
            moved = f"{abs(away)} step{'s' * (abs(away) > 1)} {'ahead' if away > 0 else 'behind'}"
            anew = ": it begins anew" if place == first else ""
            return f"the scheduler is {moved}{anew}; {said}", begins + first
    return said, begins + first


def _close(a: list[float], b: list[float]) -> bool:
    """Also 0 beside what rounding leaves of it at a cosine's end."""
    return len(a) == len(b) and all(
        abs(x - y) <= max(1e-9 * max(abs(x), abs(y)), 1e-15) for x, y in zip(a, b, strict=True)
    )


def _rate(rates: list[float]) -> str:
    return ", ".join(f"{rate:.6g}" for rate in dict.fromkeys(rates))
