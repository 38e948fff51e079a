"""A script beside another: which lines are new, which are gone, in colour; lines that only moved to the right count as
the same."""

import difflib
import html
import textwrap

from pardemo.draw import palette

_PAPER = {"+": palette.RANKS[2], "-": palette.RANKS[4], " ": "transparent"}


class ChangedLines:
    """Lines of a script with what changed in them, for a notebook to show.

    Attributes: ``new`` and ``gone``: the lines that one script has and the other has not, without their indents.
    """

    def __init__(self, before: str, after: str):
        olds, news = before.splitlines(), after.splitlines()
        matcher = difflib.SequenceMatcher(None, [o.strip() for o in olds], [n.strip() for n in news], autojunk=False)
        self._lines: list[tuple[str, str]] = []
        for kind, a, b, c, d in matcher.get_opcodes():
            if kind == "equal":
                self._lines += [(" ", line) for line in news[c:d]]
            else:
                self._lines += [("-", line) for line in olds[a:b]] + [("+", line) for line in news[c:d]]
        self.new = [line.strip() for sign, line in self._lines if sign == "+" and line.strip()]
        self.gone = [line.strip() for sign, line in self._lines if sign == "-" and line.strip()]

    def part(self, begin: str, end: str) -> "ChangedLines":
        """From the first line that starts with ``begin`` to before the next that starts with ``end``.

        Raises:
            ValueError: there are no such lines.
        """
        starts = [number for number, (_, line) in enumerate(self._lines) if line.startswith(begin)]
        stops = [number for number, (_, line) in enumerate(self._lines) if line.startswith(end)]
        if not starts or not [stop for stop in stops if stop > starts[0]]:
            raise ValueError(f"no lines from {begin!r} to {end!r}")
        part = object.__new__(ChangedLines)
        part._lines = self._lines[starts[0] : next(stop for stop in stops if stop > starts[0])]
        while part._lines and not part._lines[-1][1].strip():
            part._lines.pop()
        part.new, part.gone = self.new, self.gone
        return part

    def __repr__(self) -> str:
        return "\n".join(f"{sign} {line}".rstrip() for sign, line in self._lines)

    def _repr_html_(self) -> str:
        rows = "".join(_row(sign, line) for sign, line in self._lines)
        # as wide as the longest line, so that colours reach its end where the page scrolls
        wide = f'<div style="display:inline-block;min-width:100%">{rows}</div>'
        return f'<pre style="overflow-x:auto;line-height:1.35">{wide}</pre>'


def changed_lines(before: str, after: str) -> ChangedLines:
    """The lines of two scripts, given as texts."""
    return ChangedLines(textwrap.dedent(before), textwrap.dedent(after))


def _row(sign: str, line: str) -> str:
    ink = "" if sign == " " else f";color:{palette.INK}"
    return f'<div style="background:{_PAPER[sign]}{ink}">{html.escape(f"{sign} {line}".rstrip()) or " "}</div>'
