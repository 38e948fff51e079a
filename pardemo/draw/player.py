"""A drawing in steps: buttons, arrow keys, a swipe. The same in JupyterLab and in a page without a server."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from html import escape

from pardemo.draw.canvas import STYLE, Canvas

_STYLE = """
<style>
.player { max-width: 640px; margin: .6rem 0; touch-action: pan-y; }
.player:focus-visible { outline: 2px solid currentColor; outline-offset: 4px; }
.player .bar { display: flex; gap: .6rem; align-items: center; margin-top: .4rem; }
.player button { font: inherit; margin: 0; padding: .3rem .9rem; cursor: pointer; }
.player input { flex: 1; min-width: 4rem; }
.player figcaption { min-height: 3em; margin-top: .4rem; }
</style>
"""
#: All frames are in the page; without scripts they stand one below the other.
_SCRIPT = """
<script>
(function () {
  const all = document.querySelectorAll('[data-player="ID"]');
  const root = all[all.length - 1];
  if (!root) return;
  const frames = [...root.querySelectorAll('.frame')], slider = root.querySelector('input');
  let at = 0, from = null;
  function show(to) {
    at = Math.max(0, Math.min(frames.length - 1, to));
    frames.forEach((frame, k) => { frame.hidden = k !== at; });
    slider.value = at;
    root.querySelector('.count').textContent = (at + FIRST) + ' / ' + (frames.length - 1 + FIRST);
  }
  root.querySelector('.bar').hidden = false;
  root.querySelector('.back').onclick = () => show(at - 1);
  root.querySelector('.next').onclick = () => show(at + 1);
  slider.oninput = () => show(+slider.value);
  root.addEventListener('keydown', event => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step) { show(at + step); event.preventDefault(); event.stopPropagation(); }  // on the slider, too: once
  });
  root.addEventListener('touchstart', event => { from = event.touches[0].clientX; }, { passive: true });
  root.addEventListener('touchend', event => {
    const moved = event.changedTouches[0].clientX - from;
    if (event.target !== slider && Math.abs(moved) > 40) show(at + (moved < 0 ? 1 : -1));
  });
  show(START);
})();
</script>
"""
SHORT = 62  # characters of an element: to point to a shorter one hardly saves any


class Player:
    """Frames with a caption each; shows one at a time.

    Args:
        frames: (drawing, caption) of each step, all of one size. The caption is what a screen reader says, too.
        name: what it shows, for whoever cannot see it.
        start: the frame that is shown first: the one that says most to whoever takes no step, -1 the last.
        first: the number of the first frame: 0 where it shows what is there before the first step.
    """

    def __init__(self, frames: Sequence[tuple[Canvas, str]], name: str, start: int = 0, first: int = 1):
        if not frames:
            raise ValueError("a player needs at least one frame")
        if len({(canvas.width, canvas.height) for canvas, _ in frames}) > 1:
            raise ValueError("a player's frames are all of one size")
        self.name, self.captions = name, [caption for _, caption in frames]
        self.start, self.first = start % len(frames), first
        self._frames = list(frames)

    def __len__(self) -> int:
        return len(self._frames)

    def __repr__(self) -> str:
        return f"player of {len(self)} steps: {self.name}"

    def _repr_html_(self) -> str:
        content = repr([(canvas.parts, caption) for canvas, caption in self._frames])
        number = hashlib.sha256(content.encode()).hexdigest()[:12]
        shared = self._shared(number)
        body = "".join(
            f'<div class="frame">{canvas.svg(caption, [shared.get(part, (part,))[0] for part in canvas.parts])}'
            f"<figcaption>{escape(caption)}</figcaption></div>"
            for canvas, caption in self._frames
        )
        return (
            # JupyterLab's own arrow keys, which move from cell to cell, stay out of it
            f'{_STYLE}<figure class="player" data-player="{number}" tabindex="0" data-lm-suppress-shortcuts="true" '
            f'aria-label="{escape(self.name)}">'
            # not hidden: some browsers draw nothing that lies in what is
            + f'<svg width="0" height="0" aria-hidden="true" style="position:absolute" {STYLE}>'
            + "".join(definition for _, definition in shared.values())
            + "</svg>"
            + body
            + '<div class="bar" hidden><button class="back" aria-label="a step back">‹</button>'
            f'<input type="range" min="0" max="{len(self) - 1}" value="0" aria-label="step">'
            '<button class="next" aria-label="a step on">›</button><span class="count"></span></div></figure>'
            + _SCRIPT.replace("ID", number).replace("START", str(self.start)).replace("FIRST", str(self.first))
        )

    def _shared(self, number: str) -> dict[str, tuple[str, str]]:
        """(what points to it, its definition) of each element that several frames have: it is in the page once."""
        times = Counter(part for canvas, _ in self._frames for part in canvas.parts)
        often = [part for part, n in times.items() if n > 1 and len(part) > SHORT]
        names = {part: f"f{number[:7]}-{index}" for index, part in enumerate(often)}
        return {part: (f'<use href="#{name}"/>', _with_id(part, name)) for part, name in names.items()}


def _with_id(part: str, name: str) -> str:
    kind, attributes = part.split(" ", 1)
    return f'{kind} id="{name}" {attributes}'
