"""The parts of every page of the book: guesses, presets, exercises that check themselves, claims, problems."""

from collections.abc import Callable
from importlib import resources
from pathlib import Path

from pardemo.book.contents import CHAPTERS, notebook_of
from pardemo.book.page import exercises, problems
from pardemo.book.page.guesses import guess
from pardemo.book.page.presets import choose, need_ranks
from pardemo.claims.ledger import Ledger
from pardemo.cluster.tiers import Tier


def declared_in(chapter: str) -> Path:
    """The file with the claims of a chapter."""
    return Path(str(resources.files(f"pardemo.book.chapters.{chapter}"))) / "claims.toml"


class Page:
    """A chapter's page: ``page = Page("data_parallel")``, in the first cell of its notebook.

    Raises:
        ValueError: no chapter of that name.
    """

    choose = staticmethod(choose)
    need_ranks = staticmethod(need_ranks)
    guess = staticmethod(guess)

    def __init__(self, chapter: str):
        if chapter not in CHAPTERS:
            raise ValueError(f"no chapter {chapter!r}; there are: {', '.join(CHAPTERS)}")
        self.chapter = chapter

    def ledger(self, links: Tier | None = None) -> Ledger:
        """Opens the ledger in which the notebook books each claim as it goes; the last cell closes it.

        From here on the notebook's own process multiplies bf16 matrices as its ranks do (:mod:`pardemo.world.bf16`).

        Args:
            links: as for :class:`pardemo.Ledger`.

        Raises:
            ValueError: a file of claims that cannot be read.
        """
        from pardemo.world import bf16  # loads torch, which who reads claims does not need

        bf16.through_fp32_where_slow()
        return Ledger(notebook_of(self.chapter), links=links, declared=declared_in(self.chapter))

    def check(self, name: str, function: Callable) -> None:
        """Runs a reader's answer to an exercise, and shows the verdict; see :func:`.exercises.check`."""
        exercises.check(self.chapter, name, function)

    def problems(self) -> problems.ProblemSet:
        """The chapter's problems, each with the way to its answer folded below."""
        return problems.problems(self.chapter)
