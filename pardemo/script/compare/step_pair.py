"""Pairs a step of the reference with the same step of a layout, for what is compared of the two."""

from typing import NamedTuple

from pardemo.script.compare.differences import Finding
from pardemo.script.compare.reference import Reference
from pardemo.script.compare.runs import Run
from pardemo.script.record.rank_record import Step


class StepPair(NamedTuple):
    """A step of the reference and the same step of a layout's run, by its number from 0 on."""

    reference: Reference
    other: Run
    step: int

    @property
    def reference_record(self) -> Step:
        """The record of the step on the reference's first rank."""
        return self.reference.run.records[0].steps[self.step]

    @property
    def records(self) -> list[Step]:
        """The record of the step on each rank of the layout."""
        return [record.steps[self.step] for record in self.other.records]

    def finding(self, subject: str, cause: str, why: str, factor: float | None = None, module: str = "") -> Finding:
        """Makes a finding about a subject, as ``clipping``, of this step in this layout."""
        return Finding(self.other.layout.name, self.step + 1, subject, cause, why, factor, module=module)
