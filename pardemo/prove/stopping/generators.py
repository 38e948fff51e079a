"""Where the generators of random numbers are, and which of them a resumed run has elsewhere."""

import hashlib
import random
import sys

import torch

from pardemo.prove.runner import Run


def places() -> dict[str, str]:
    """Of this process's generators, by name, a hash of the state; numpy's only where something has imported it."""
    states: dict[str, bytes] = {
        "torch's": torch.get_rng_state().numpy().tobytes(),
        "Python's": repr(random.getstate()).encode(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        _, keys, *rest = numpy.random.get_state()
        states["numpy's"] = keys.tobytes() + repr(rest).encode()
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def moved(reference: Run, resumed: Run, step: int, begins: int) -> list[str]:
    """Generators that the undisturbed run draws from around a step, and that are elsewhere in the resumed run.

    Args:
        step: of the undisturbed run, counted from 0. begins: behind how many of its steps the resumed one begins.

    Returns:
        names, as ``torch's``. One from which nothing is drawn may be anywhere.
    """
    found: dict[str, None] = {}
    for theirs, ours in zip(reference.records, resumed.records, strict=True):
        around = [one.generators for one in theirs.steps[max(0, step - 1) : step + 2]]
        for name, place in theirs.steps[step].generators.items():
            drawn = any(other.get(name, place) != place for other in around)
            if drawn and ours.steps[step - begins].generators.get(name, place) != place:
                found.setdefault(name)
    return list(found)


def told(names: list[str]) -> str:
    """``torch's and numpy's generators, which this step draws from, are not where they were without the stop``."""
    some = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    one = len(names) == 1
    return (
        f"{some} generator{'' if one else 's'}, from which the run draws, {'is' if one else 'are'} not where "
        f"{'it was' if one else 'they were'} without the stop: that is not restored"
    )
