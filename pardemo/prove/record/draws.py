"""Random numbers of a script: dropout's masks, noted and not applied; generators that nobody has seeded."""

import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from pardemo import compat
from pardemo.measure import stand_ins
from pardemo.measure.libraries import is_script
from pardemo.measure.places import Places
from pardemo.prove.record import sketch
from pardemo.prove.record.facts import Mask

#: Dropout in its forms: torch.nn's modules call these.
_DROPOUT = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@contextlib.contextmanager
def dropout_noted(places: Places, note: Callable[[Mask], None], notes: list[str]) -> Iterator[None]:
    """Within the block dropout draws its mask, has it noted, and leaves its input as it is.

    So layouts that cannot draw the same masks can be compared all the same, and their masks by themselves.
    """
    functional: Any = torch.nn.functional
    inside = [False]  # a function mode has torch's own function call itself by its name, which is ours

    def noted(function: Callable) -> Callable:
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if not training or p <= 0 or inside[0]:
                return function(input, p, training, inplace)
            inside[0] = True
            with torch.no_grad(), _told_once(notes, "dropout → its masks are drawn and compared, and not applied"):
                plain = compat.local_tensor(input) if hasattr(input, "placements") else input
                try:
                    dropped = function(torch.ones_like(plain), p, True) == 0
                finally:
                    inside[0] = False
            place = places.here()
            note(
                Mask(
                    place.module, place.line, p, sketch.digest(plain), sketch.digest(dropped), plain.numel(),
                    place.repeated,
                )
            )  # fmt: skip
            return input

        return dropout

    attend = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        given = list(args)
        dropped = given[1] if len(given) > 1 else options.get("dropout_p", 0.0)
        if dropped:
            with _told_once(
                notes, "dropout within scaled_dot_product_attention → left out: its mask is not to be seen"
            ):
                if len(given) > 1:
                    given[1] = 0.0
                else:
                    options["dropout_p"] = 0.0
        return attend(query, key, value, *given, **options)

    changed = [(getattr(functional, name), noted(getattr(functional, name))) for name in _DROPOUT]
    with stand_ins.replaced_everywhere([*changed, (attend, attention)]):
        yield


@contextlib.contextmanager
def _told_once(notes: list[str], line: str) -> Iterator[None]:
    if line not in notes:
        notes.append(line)
    yield


def as_in_a_new_process() -> None:
    """Generators as a script finds them: torch's with the seed that it always has, Python's and NumPy's without one."""
    torch.default_generator.manual_seed(torch.Generator().initial_seed())
    random.seed()
    np.random.seed()


@contextlib.contextmanager
def unseeded_noted(places: Places, lines: list[str]) -> Iterator[None]:
    """Within the block the script's lines are noted that draw from a generator which nobody has seeded.

    Of Python's ``random`` and NumPy's functions, of ``numpy.random.default_rng()`` without a seed, and of
    ``torch.seed()``. torch's own generators begin from the same seed in every process.
    """
    seeded = {"random": False, "numpy": False}

    def note(what: str) -> None:
        if is_script(sys._getframe(2).f_code.co_filename):
            line = f"{places.here().line} ({what})"
            if line not in lines:
                lines.append(line)

    def seeds(which: str, function: Callable) -> Callable:
        def seed(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if given is None:
                note(f"{which}.seed() without a seed")
            else:
                seeded[which] = True
            return function(*args, **kwargs)

        return seed

    def draws(which: str, function: Callable) -> Callable:
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not seeded[which]:
                note(f"{which}.{function.__name__}")
            return function(*args, **kwargs)

        return draw

    def default_rng(seed: Any = None) -> Any:
        if seed is None:
            note("numpy.random.default_rng() without a seed")
        return make(seed)

    def torch_seed() -> int:
        note("torch.seed()")
        return reseed()

    make, reseed = np.random.default_rng, torch.seed
    pythons = ("random", "randint", "randrange", "choice", "choices", "shuffle", "sample", "uniform", "gauss")
    numpys = ("rand", "randn", "randint", "random", "choice", "shuffle", "permutation", "uniform", "normal")
    replaced = [(random, name, draws("random", getattr(random, name))) for name in pythons]
    replaced += [(np.random, name, draws("numpy", getattr(np.random, name))) for name in numpys]
    replaced += [(random, "seed", seeds("random", random.seed)), (np.random, "seed", seeds("numpy", np.random.seed))]
    replaced += [(np.random, "default_rng", default_rng), (torch, "seed", torch_seed)]
    with contextlib.ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(compat.replaced(owner, name, value))
        yield
