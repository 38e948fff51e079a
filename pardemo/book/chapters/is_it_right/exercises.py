"""The exercises of this chapter, and what checks an answer to each: scripts with one bug, mended and proven."""

import ast
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from pardemo import prove
from pardemo.book.chapters.is_it_right.measurements import suspect
from pardemo.book.page.exercises import Mistake, call, exercise
from pardemo.script.compare.results import finding_why

STEPS = 6
TIMEOUT_S = 120


def _mended(name: str, praise: str, layout: str = "ranks=2 batch=8") -> Callable[[Callable[[str], str]], str]:
    """The check of ``function(script)``, which mends a script: it is proven in a layout, against one process."""

    def check(function: Callable[[str], str]) -> str:
        _prove(name, function, layout)
        return f"Right. {praise}"

    return check


check_first = _mended(
    "first", "no_sync, or its flag, has to end before the last micro-batch's forward pass, and not later."
)
check_second = _mended("second", "Clipping is not linear, so that its place matters: after everything has been summed.")
check_third = _mended("third", "A wrapper knows the model as it was when it was made.")
check_fourth = _mended(
    "fourth",
    "What ranks have in whole must not go into a sum over them: add it behind the sum.",
    layout="ranks=2 tp=2 batch=16",
)
check_fifth = _mended("fifth", "Ranks that each shuffle for themselves must do it from the same seed, in each epoch.")


def _prove(name: str, function: Callable[[str], str], layout: str) -> None:
    """Proves the mended script on ranks against the script as it was in one process, with the same global batch.

    Raises:
        Mistake: it is no script, the same one, one that cannot be run, or one that trains otherwise.
    """
    script = suspect(name)
    mended = call(function, script)
    if not isinstance(mended, str):
        raise Mistake(f"It returned {type(mended).__name__}; it should return the text of the mended script.")
    if mended == script:
        raise Mistake("It returned the script as it was: is the text that you replace in it, letter by letter?")
    try:
        ast.parse(mended)
    except SyntaxError as error:
        raise Mistake(f"What it returned is no Python: {error.msg}, in line {error.lineno}.") from None
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):  # what the scripts print
        as_it_was, on_ranks = Path(folder, f"{name}.py"), Path(folder, "mended.py")
        as_it_was.write_text(script, encoding="utf-8")
        on_ranks.write_text(mended, encoding="utf-8")
        layouts = [f"ranks=1 batch=16 file={as_it_was}", f"{layout} file={on_ranks}"]
        line = ["{file}", "--batch", "{batch}"]
        made = prove.script(line, layouts, double=True, steps=STEPS, timeout_s=TIMEOUT_S)
    if made.failed:
        raise Mistake(f"Your script on 2 ranks: {next(iter(made.failed.values()))}")
    if made.findings:
        first = made.findings[0]
        kind = {"forward": "outputs", "data": "samples"}.get(first.what, first.what)
        raise Mistake(
            f"It does not train as one process does. In step {first.step} the {kind} differ: {finding_why(first)}."
        )


@exercise("first")
def my_first(script):
    """Which of the two micro-batches makes DDP sum the gradients, and what is in them then? In one process there is
    nothing to sum."""
    # the sum belongs to the last micro-batch: what later ones add is in no all-reduce
    return script.replace("number == 0", "number == accumulate - 1")


@exercise("second")
def my_second(script):
    """Compare two ranks' gradients of norm 3 and norm 0.1, clipped and then averaged, with what one process clips."""
    # a norm of the mean is not the mean of norms: sum first, then clip
    clip = "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    without = script.replace(clip, "")
    return without.replace("    optimizer.step()\n", clip + "    optimizer.step()\n")


@exercise("third")
def my_third(script):
    """The first two steps are right. DDP registers once what it has to sum: when, and of which parameters?"""
    # DDP sums what required a gradient when it was made: make it anew
    thaw = "        below.requires_grad_(True)\n"
    return script.replace(thaw, thaw + "        model = DistributedDataParallel(model.module)\n")


@exercise("fourth")
def my_fourth(script):
    """The two ranks' outputs are added up. What do both of them hold in whole, and how often is it in the sum?"""
    # a bias that each rank adds is in the sum as often as there are ranks
    part = "linear(self.first(x).tanh(), self.second.weight, self.second.bias)"
    added = script.replace(part, "linear(self.first(x).tanh(), self.second.weight)")
    return added.replace("SumParts.apply(part)", "SumParts.apply(part) + self.second.bias")


@exercise("fifth")
def my_fifth(script):
    """The first epoch is right. Each rank shuffles all samples for itself and takes every other one: do two ranks
    shuffle alike?"""
    # each rank shuffles for itself, and deals out what it shuffled
    return script.replace("    if rank == 0:\n        sampler", "    sampler")
