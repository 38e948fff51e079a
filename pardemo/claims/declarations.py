"""Reads the claims that a chapter declares: the ``claims.toml`` of its folder, a table for each claim, named by its id.

A claim says once what holds for all its cases::

    ["s30.rows_first"]
    says = "rows first: what a rank sends forward"
    unit = "φ"
    cases = "N"                 # the case 4 is then shown as N = 4
    within = 0.01               # equal within 1 %; or at_most, at_least with a bound; nothing: exactly equal
    because = "the meter's barrier and gloo's headers are bytes, too"
    source = "1909.08053 3"
    evidence = "wire"
    instead = "why it may differ, where the notebook names what holds instead"
    off = "why seconds may miss their prediction on this machine"

Tolerances that several claims share stand in a table ``[tolerance.name]``; the claims say ``tolerance = "name"``.
"""

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pardemo import argument_checks
from pardemo.claims.verdicts import EVIDENCE, SECONDS

#: Evidence of seconds over links with limits: the machine decides which way there is (:mod:`pardemo.cluster.tiers`).
LINKS = "links"
#: What says how close a measurement has to be.
TOLERANCE = ("within", "at_most", "at_least", "because")


@dataclass(frozen=True)
class Claim:
    """A claim as a chapter declares it, or a caller of :meth:`Ledger.check`; the module says what each field means."""

    id: str
    says: str
    unit: str = ""
    cases: str | tuple[str, ...] = ""
    within: float = 0.0
    at_most: float | None = None
    at_least: float | None = None
    because: str = ""
    source: str = ""
    evidence: str = "numeric"
    instead: str = ""
    off: str = ""
    bounded: str = ""  # "most" or "least": the notebook computes the bound

    def __post_init__(self):
        is_set = {"within": self.within > 0, "at_most": self.at_most is not None, "at_least": self.at_least is not None,
                 "bounded": bool(self.bounded)}  # fmt: skip
        bounds = [name for name, present in is_set.items() if present]
        if len(bounds) > 1:
            raise ValueError(f"{self.id}: {' and '.join(bounds)}: a claim has one of them")
        if bounds and not self.because:
            raise ValueError(f'{self.id}: {bounds[0]} needs a reason: because = "…"')
        if self.bounded not in ("", "most", "least"):
            raise ValueError(f"{self.id}: bounded is most or least, not {self.bounded!r}")
        if self.evidence not in (*EVIDENCE, LINKS):
            choices = ", ".join((*EVIDENCE, LINKS))
            raise ValueError(f"{self.id}: evidence must be one of {choices}, not {self.evidence!r}")
        if self.evidence in (*SECONDS, LINKS) and not self.off:
            raise ValueError(f'{self.id}: seconds may be off on another machine: tell the reader why: off = "…"')

    @property
    def relation(self) -> str:
        if self.at_most is not None or self.bounded == "most":
            return "at most"
        return "at least" if self.at_least is not None or self.bounded == "least" else "equal"

    @property
    def bound(self) -> float | None:
        return self.at_most if self.at_most is not None else self.at_least

    def case(self, key: Any) -> str:
        """A case as a line shows it: ``4`` as ``N = 4``, ``(2, "sent")`` as ``N = 2, sent``."""
        names = (self.cases,) if isinstance(self.cases, str) else self.cases
        parts = key if isinstance(key, tuple) else (key,)
        names = (*names, *[""] * (len(parts) - len(names)))
        part_texts = (f"{name} = {part}" if name else str(part) for name, part in zip(names, parts, strict=False))
        return " ".join(", ".join(part_texts).split())  # a picture's label may be broken into lines


def read_declarations(path: Path) -> dict[str, Claim]:
    """The claims of one file, by id; an id without a dot is the chapter's own.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a file that cannot be read, a field that does not exist, a claim without its reason.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        shared = tables.pop("tolerance", {})
        return {id: _declaration(id, dict(table), shared) for id, table in tables.items()}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, ValueError, TypeError) as error:
        raise ValueError(f"{path.name}: {error}") from None


def _declaration(id: str, table: dict[str, Any], shared: dict[str, dict[str, Any]]) -> Claim:
    if "tolerance" in table:
        name = table.pop("tolerance")
        if name not in shared:
            raise ValueError(f"{id}: no [tolerance.{name}]; there are: {', '.join(shared) or 'none'}")
        table = {**{key: shared[name][key] for key in TOLERANCE if key in shared[name]}, **table}
    names = [field.name for field in fields(Claim)][1:]
    for name in table:
        if name not in names:
            raise ValueError(f"{id}: no field {name!r}{argument_checks.nearest(name, names, '')}")
    if isinstance(table.get("cases"), list):
        table["cases"] = tuple(table["cases"])
    if not table.get("says"):
        raise ValueError(f'{id}: a claim says something: says = "…"')
    return Claim(id, **table)
