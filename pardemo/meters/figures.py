"""Formats and pickles what a meter counted."""

from collections.abc import Mapping
from typing import Any, ClassVar


class Figures:
    """A meter that shows what it counted, and that comes home from a rank with these figures alone."""

    shown: ClassVar[tuple[str, ...]]
    kept: ClassVar[tuple[str, ...]] = ()  # what comes home, where that is not what is shown

    def figures(self) -> dict[str, Any]:
        """Returns a meter's counts as plain numbers."""
        return {name: getattr(self, name) for name in self.shown}

    def __repr__(self) -> str:
        """``WireMeter(sent_bytes=1,024, evidence='wire')``, in the order in which the meter names them."""
        figures = ", ".join(f"{name}={_figure_text(value)}" for name, value in self.figures().items())
        return f"{self._kind().__name__}({figures})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._kind(), {name: getattr(self, name) for name in self.kept or self.shown})

    def _kind(self) -> type:
        """The meter that a subclass, whose arguments are its own, comes home as."""
        return next(kind for kind in type(self).__mro__ if "shown" in vars(kind))


def _restored(kind: type, values: Mapping[str, Any]) -> Any:
    """A meter with the figures of another process's, which has nothing else of it."""
    meter = kind()
    vars(meter).update(values)
    return meter


def _figure_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_figure_text(inner)}" for key, inner in value.items()) + "}"
    return repr(value)
