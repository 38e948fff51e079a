"""DeepSpeed's import without a linker's words: it tries whether libaio is there by linking to it."""

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def linker() -> Iterator[None]:
    """What is written to file descriptor 2 meanwhile goes nowhere; an import that fails still raises.

    DeepSpeed means to do this itself, but redirects what ``sys.stderr`` says is its descriptor, which in a notebook's
    kernel is another one than the linker writes to.
    """
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
