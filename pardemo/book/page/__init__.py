"""What every page of the book has: guesses, presets, exercises that check themselves, a ledger of claims, problems."""

from collections.abc import Callable

from pardemo.book.chapters import CHAPTERS
from pardemo.book.page import claimed, exercises, problems
from pardemo.book.page.guesses import guess
from pardemo.book.page.presets import choose, need_ranks
from pardemo.claims.ledger import Ledger
from pardemo.cluster.tiers import Tier


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
        """Where the notebook books its claims; see :func:`.claimed.ledger`."""
        return claimed.ledger(self.chapter, links)

    def check(self, name: str, function: Callable) -> None:
        """Runs a reader's answer to an exercise, and shows the verdict; see :func:`.exercises.check`."""
        exercises.check(self.chapter, name, function)

    def problems(self) -> problems.ProblemSet:
        """The chapter's problems, each with the way to its answer folded below."""
        return problems.problems(self.chapter)
