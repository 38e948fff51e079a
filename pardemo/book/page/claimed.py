"""The ledger of a chapter's page: what the chapter declares, booked under its notebook's name."""

from importlib import resources
from pathlib import Path

from pardemo.book.chapters import notebook_of
from pardemo.claims import Ledger
from pardemo.cluster.tiers import Tier


def declared_in(chapter: str) -> Path:
    """The file with the claims of a chapter."""
    return Path(str(resources.files(f"pardemo.book.chapters.{chapter}"))) / "claims.toml"


def ledger(chapter: str, links: Tier | None = None) -> Ledger:
    """The ledger of a chapter: its page books each claim as it goes, and closes it in its last cell.

    From here on the notebook's own process multiplies bf16 matrices as its ranks do (:mod:`pardemo.world.bf16`).

    Args:
        links: as for :class:`pardemo.Ledger`.

    Raises:
        ValueError: no chapter of that name, or a file of claims that cannot be read.
    """
    from pardemo.world import bf16  # loads torch, which who reads claims does not need

    bf16.through_fp32_where_slow()
    return Ledger(notebook_of(chapter), links=links, declared=declared_in(chapter))
