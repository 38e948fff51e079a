"""The ledger of a chapter: claims recorded as they are measured, and what has to be true when it is closed."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pardemo import argument_checks, project
from pardemo.claims import declarations
from pardemo.claims.declarations import LINKS, Claim
from pardemo.claims.lines import Closing, Line
from pardemo.claims.verdicts import AS_PREDICTED, COLUMNS, EVIDENCE, ClaimRow, agree, may_be_off, plain, short
from pardemo.cluster.tiers import Tier

_EMPTY = dict.fromkeys(COLUMNS, "") | {"predicted": None, "measured": None, "rel": 0.0, "relation": "equal"}
_ID = re.compile(r"[a-z0-9_]+\.[a-z0-9_.]+")

Figure = float | bool | str


class ClaimFailed(AssertionError):
    """At least one claim of a notebook does not hold."""


class Ledger:
    """The claims of one notebook, written to ``<output folder>/claims/<notebook>.json`` after each measurement.

    What a chapter claims is declared as data (:mod:`pardemo.claims.declarations`); the notebook then says what was
    predicted and what was measured, and the claim shows as one line:

    >>> claim = Ledger("my_topic", folder="example", declared="claims.toml")     # doctest: +SKIP
    >>> claim("s30.rows_first", 8, {2: 8.003, 4: 8.002})                              # doctest: +SKIP
    ✓ rows first: what a rank sends forward: predicted 8 ± 1 % φ, measured 8.003 φ (N = 2), 8.002 φ (N = 4)

    An id without a dot is the chapter's own: ``02_my_topic`` records ``held`` as ``my_topic.held``.

    Args:
        declared: the file of the chapter's declarations (:mod:`pardemo.claims.declarations`); without one it has none.
        links: how links can be limited here (:func:`pardemo.cluster.tiers.best_tier`): the evidence of claims that
            declare ``links``. Where nothing can limit them, those claims are *not measured*, whatever cells found.
    """

    def __init__(
        self,
        notebook: str,
        folder: str | Path | None = None,
        links: Tier | None = None,
        declared: str | Path | None = None,
    ):
        self.notebook, self._links = notebook, links
        self._file = Path(declared) if declared else None
        self._path = Path(folder or project.output_dir()) / "claims" / f"{notebook}.json"
        claims = declarations.read_declarations(self._file) if self._file else {}
        self._declared = {self._full(id): replace(claim, id=self._full(id)) for id, claim in claims.items()}
        self._rows: dict[str, ClaimRow] = {}
        self._texts: dict[str, str] = {}  # each row as it stands in the file
        self._shown: dict[str, int] = {}  # claim -> the notebook's count of executions when its line was shown
        self._write()

    @property
    def rows(self) -> list[ClaimRow]:
        return list(self._rows.values())

    def __call__(
        self,
        id: str,
        predicted: Figure | Mapping[Any, Figure] | None = None,
        measured: Figure | Mapping[Any, Figure] | None = None,
        *,
        case: Any = None,
        within: float | Mapping[Any, float] | None = None,
        instead: Figure | Mapping[Any, Figure] | None = None,
        evidence: str = "",
    ) -> None:
        """Books a declared claim, and shows it as a line of the notebook.

        Args:
            predicted, measured: in the claim's unit: a figure, or one for each case, as ``{2: …, 4: …}``. One
                prediction may stand for all cases; none is given where the declaration has the bound.
            case: of a single figure, where cases come one by one; their line is then shown once and grows.
            within: the relative tolerance, where it is computed. instead: what holds where the prediction does not, for
                the reason that the declaration gives: the verdict is then *differs*.
            evidence: what the meter says that it is, where it is another than the declaration's.

        Raises:
            ValueError: a claim that the chapter does not declare, a case without its figure.
        """
        id = self._full(id)
        claim = self._declared.get(id)
        if claim is None:
            raise ValueError(self._undeclared(id))
        if predicted is None:
            predicted = claim.bound
        if predicted is None or measured is None:
            raise ValueError(f"{id}: a claim needs what was {'predicted' if predicted is None else 'measured'}")
        evidence = evidence or claim.evidence
        if evidence == LINKS:
            if self._links is None:
                raise ValueError(f"{id} is about links: Ledger({self.notebook!r}, links=tiers.best_tier()) says which")
            if not self._links.evidence:
                self.skip(id, reason=self._links.missing)
                return
            evidence = self._links.evidence
        if instead is not None and not claim.instead:
            raise ValueError(f'{id}: say in its declaration why it may differ: instead = "…"')
        for key in measured if isinstance(measured, Mapping) else [case]:
            self._judge(
                claim, _of(predicted, key, id), _of(measured, key, id), evidence,
                within=claim.within if within is None else _of(within, key, id),
                instead=None if instead is None else _of(instead, key, id),
                case="" if key is None else claim.case(key),
            )  # fmt: skip
        self._show(id)

    def check(self, claim: Claim, predicted: Figure | None, measured: Figure, instead: Figure | None = None) -> str:
        """Books a claim that no file declares, and returns its verdict; nothing is shown.

        A cell that is run again in JupyterLab records its claims again: the same id and statement replace the
        earlier row. With another statement it would be a second claim that hides the first, and is refused; so is any
        second record in a run without a reader (``PARDEMO_HEADLESS``), where no cell runs twice.

        Args:
            predicted, measured: in the claim's unit; None predicts the claim's own bound. Equal means
                |measured − predicted| ≤ ``within``·|predicted|.
            instead: what holds where ``predicted`` does not, for the reason that the claim gives: *differs*. A
                ``published`` figure that a model of ours misses is *off* with the claim's ``off``, as times are.

        Raises:
            ValueError: an id or evidence that does not exist; an id that another claim has; a bound on something that
                has no order.
        """
        claim = replace(claim, id=self._full(claim.id))
        predicted = claim.bound if predicted is None else predicted
        return self._judge(claim, predicted, measured, claim.evidence, within=claim.within, instead=instead)

    def _judge(
        self, claim: Claim, predicted: Any, measured: Any, evidence: str, *, within: float, instead: Any, case: str = ""
    ) -> str:
        """Books a row with its verdict, which it returns."""
        if evidence not in EVIDENCE:
            raise ValueError(f"evidence must be one of {', '.join(EVIDENCE)}, not {evidence!r}")
        predicted, measured, reason = plain(predicted), plain(measured), ""
        compared = (measured, within, claim.relation)
        if agree(predicted, *compared):
            verdict = "holds"
        elif instead is not None and agree(plain(instead), *compared):
            verdict, reason = "differs", f"{AS_PREDICTED} {short(plain(instead))} predicts: {claim.instead}"
        else:
            verdict, reason = "off" if may_be_off(evidence, claim.off) else "fails", claim.off
        self._record(
            claim.id + (f".{_slug(case)}" if case else ""), statement=claim.says, source=claim.source,
            predicted=predicted, measured=measured, unit=claim.unit, rel=within, evidence=evidence,
            relation=claim.relation, verdict=verdict, reason=reason, claim=claim.id, case=case, because=claim.because,
        )  # fmt: skip
        return verdict

    def skip(self, claim: str | Claim, reason: str = "") -> str:
        """Books a claim that could not be measured here, and why; one that a file declares is shown as its line."""
        if not reason:
            raise ValueError("a claim is only skipped with a reason")
        id = self._full(claim if isinstance(claim, str) else claim.id)
        skipped = self._declared.get(id) if isinstance(claim, str) else claim
        if skipped is None:
            raise ValueError(self._undeclared(id))
        self._record(id, statement=skipped.says, source=skipped.source, verdict="not measured", reason=reason, claim=id)
        if id in self._declared:
            self._show(id)
        return "not measured"

    def close(self) -> Closing:
        """The chapter's closing: one line with the counts, what is not as predicted, and all claims folded.

        Raises:
            ClaimFailed: claims fail, each is named; or, in a run without a reader, one was declared and neither
                measured nor skipped.
        """
        failed = [r for r in self.rows if r["verdict"] == "fails"]
        if failed:
            failures = "; ".join(
                f"{r['id']} ({r['statement']}): predicted {r['predicted']}, measured {r['measured']} {r['unit']}"
                for r in failed
            )
            raise ClaimFailed(f"{len(failed)} of {len(self._rows)} claims fail: {failures}")
        forgotten = self._declared.keys() - {row["claim"] for row in self.rows}
        if forgotten and project.is_headless():
            raise ClaimFailed(f"declared, and neither measured nor skipped: {', '.join(sorted(forgotten))}")
        return Closing(self.rows)

    def _undeclared(self, id: str) -> str:
        where = f"{self._file.parent.name}/{self._file.name}" if self._file else f"{self.notebook}: no file"
        return f"{where} declares no claim {id!r}{argument_checks.nearest(id, self._declared, '')}"

    def _full(self, id: str) -> str:
        return id if "." in id else f"{project.chapter_name(self.notebook)}.{id}"

    def _show(self, claim: str) -> None:
        """The claim's line in the notebook; cases that come later in the same cell join it."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if shell is None:
            return
        from IPython.display import display

        line = Line([row for row in self._rows.values() if row["claim"] == claim])
        again = self._shown.get(claim) == shell.execution_count
        display(line, display_id=f"{self.notebook}/{claim}/{shell.execution_count}", update=again)
        self._shown[claim] = shell.execution_count

    def _record(self, id: str, **values: Any) -> None:
        """Adds a row, of :data:`COLUMNS`; what is not said is empty."""
        if not _ID.fullmatch(id):
            raise ValueError(f"a claim's id looks like s09.sent_per_rank or data_parallel.bucket_order, not {id!r}")
        row = cast(ClaimRow, _EMPTY | {"id": id, "notebook": self.notebook} | values)
        before = self._rows.get(id, row)
        twice = id in self._rows and project.is_headless()
        if twice or (before["statement"], before["case"]) != (row["statement"], row["case"]):
            raise ValueError(f"the id {id} is taken, by {before['statement']!r}: {row['statement']!r} needs its own")
        self._rows[id] = row
        self._texts[id] = json.dumps([row], indent=1, ensure_ascii=False).removeprefix("[\n").removesuffix("\n]")
        self._write()

    def _write(self) -> None:
        """The whole file, at each claim: what is written once are the other rows, or a thousand claims took seconds."""
        lines = ",\n".join(self._texts[id] for id in self._rows)
        text = f"[\n{lines}\n]\n" if lines else "[]\n"
        project.write_text(self._path, text)


def read(folder: str | Path | None = None) -> list[ClaimRow]:
    """All claims of a run's folder, in the order of the notebooks: a row for each case.

    Raises:
        FileNotFoundError: no run has written claims there.
        ValueError: a ledger that is not one.
    """
    folder = Path(folder or project.output_dir())
    files = sorted((folder / "claims").glob("*.json"))
    if not files:
        raise FileNotFoundError(f"no claims in {folder}: run `pardemo run` first, or name a run's folder")
    return [row for file in files for row in read_ledger(file)]


def read_ledger(file: Path) -> list[ClaimRow]:
    """The claims of one notebook; ValueError where the file is not such a ledger."""
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise TypeError("not a list")
        return [cast(ClaimRow, {name: row[name] for name in COLUMNS}) for row in rows]
    except (ValueError, KeyError, TypeError, IsADirectoryError, RecursionError) as error:
        raise ValueError(f"{file} is not a ledger of claims: {error}") from None


def _of(figures: Any, key: Any, id: str) -> Any:
    """The figure of a case; one that is given alone is every case's."""
    if not isinstance(figures, Mapping):
        return figures
    if key not in figures:
        raise ValueError(f"{id}: no figure for the case {key!r}; there are: {', '.join(map(repr, figures))}")
    return figures[key]


def _slug(case: str) -> str:
    """``N = 4, sent`` -> ``n4_sent``: the case's part of a row's id."""
    return re.sub(r"[^a-z0-9]+", "_", case.lower().replace(" = ", "")).strip("_")
