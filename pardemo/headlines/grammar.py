"""The generated news: sentences and headlines from the grammar in ``events.toml``, the same from a seed everywhere.

A headline keeps of the sentence with the news who did what, and how much, in the words of the sentence, and drops
dates, sources, causes, durations and adverbs: one house style for all kinds of event. So a model that has learned it
on some can apply it to others. Around that sentence stand scenes, details and background, with names and figures of
their own.

There are two such house styles. ``plain`` is what the tiny model's pretraining has: who did what, then the figure.
``section`` is what the fine-tune teaches: the section of the paper, then the figure, then who did what. The section
has to be told from what happened, and the other order unlearned; neither is in any page of the pretraining.
"""

import functools
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

KINDS = ("seen", "unseen")
INSTRUCTIONS = {"plain": "请给下面的新闻拟一个简短的标题：\n", "section": "请写出下面新闻的栏目、数字和标题。\n"}
STYLES = tuple(INSTRUCTIONS)
PRETRAINED = 0  # the seed of the rows that the tiny model has read as plain text
BODY_LENGTH = (60, 140)
HEADLINE_LENGTH = (10, 22)  # in plain style; the section's name adds four
SENTENCES = 4  # at most
SCENE_FIRST = 0.35  # of the bodies: so that the first sentence is not always the one with the news

DATED = "{dated}。"  # the frame that lets the sentence place its date itself
UNDATED = "{when}，{core}。"  # for a sentence that has no place for one

_CHOICE = re.compile(r"\(([^()]*)\)")
_SLOT = re.compile(r"\{(\w+?)(\d*)\}")
_RANGE = re.compile(r"(\d+)-(\d+)(?:/(\d+))?")
_DECIMALS = re.compile(r"(\d+)\.(\d)-(\d+)\.(\d)")


@dataclass(frozen=True)
class NewsEvent:
    """A kind of event: its slots beside the common ones, and its sentences."""

    name: str
    kind: str
    section: str
    office: str
    slots: Mapping[str, str]
    news: Sequence[str]
    details: Sequence[str]
    scenes: Sequence[str]


@dataclass(frozen=True)
class Grammar:
    events: Sequence[NewsEvent]
    slots: Mapping[str, str]  # that all events share
    frames: Mapping[str, Sequence[str]]  # how the news is introduced: by kind
    scenes: Sequence[str]
    background: Sequence[str]


@functools.cache
def load_grammar() -> Grammar:
    """The grammar in ``events.toml``."""
    content: dict[str, Any] = tomllib.loads((Path(__file__).parent / "events.toml").read_text(encoding="utf-8"))
    slots, frames, common = (content.pop(name) for name in ("slots", "frames", "common"))
    events = [NewsEvent(name=name, **fields) for name, fields in content.items()]
    return Grammar(events, slots, frames, **common)


@dataclass
class Story:
    """One event as it happened: every slot drawn once, and then the same in all sentences and in the headline."""

    event: NewsEvent
    random: Random
    values: dict[str, str] = field(default_factory=dict)

    def fill(self, template: str) -> str:
        template = _CHOICE.sub(lambda match: pick(self.random, match[1].split("|")), template)
        return _SLOT.sub(lambda match: self.value(match[1], match[2]), template)

    def value(self, name: str, number: str) -> str:
        key = name + number
        if key not in self.values:
            spec = self.event.office if name == "office" else self.event.slots.get(name) or load_grammar().slots[name]
            for _ in range(20):  # a second place, company or figure is another one, where the range allows it
                drawn = "".join(self._part(part) for part in spec.split(" + "))
                if drawn not in self.values.values():
                    break
            self.values[key] = drawn
        return self.values[key]

    def _part(self, spec: str) -> str:
        if match := _RANGE.fullmatch(spec):
            low, high, step = int(match[1]), int(match[2]), int(match[3] or 1)
            return str(low + step * below(self.random, (high - low) // step + 1))
        if match := _DECIMALS.fullmatch(spec):
            low, high = int(match[1] + match[2]), int(match[3] + match[4])
            units, tenths = divmod(low + below(self.random, high - low + 1), 10)
            return f"{units}.{tenths}" if tenths else str(units)
        return self.fill(pick(self.random, spec.split("|")))

    def frame(self, template: str, marked: str) -> str:
        """The sentence with the news: its marks taken away, its date where the frame has it."""
        bare = re.sub("[「」『』]", "", marked)
        if template == DATED:
            if "@" in bare:
                return bare.replace("@", self.value("when", "")) + "。"
            template = UNDATED
        # What the sentence holds is text already: it is put in after the frame's own slots.
        return self.fill(template.replace("{core}", "@")).replace("@", bare.replace("@", ""))


def generate(count: int, seed: int, kinds: Sequence[str] = KINDS, style: str = "section") -> Iterator[dict[str, str]]:
    """Yields ``count`` rows, no two with the same body or headline, of the kinds in turn.

    A row has instruction, input (the body, 60–140 characters), output (the headline, 10–22, with a section 14–26) and
    source, which is ``generated/seen`` or ``generated/unseen``: unseen rows are of events and sentence patterns that
    no seen row has; their sections are among those of seen rows.

    Args:
        style: of the headlines and of the instruction, one of :data:`STYLES`.

    Raises:
        ValueError: a kind or style that does not exist, or a count or seed below 0.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds are some of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
    _check(style, count, seed)
    return _distinct(count, seed, kinds, style, set(), set())


def corpus(
    train: int = 20000, test: int = 1000, seed: int = PRETRAINED + 1, style: str = "section"
) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training rows, all seen, and test rows, half seen and half unseen; no body or headline is in both.

    The test rows do not depend on ``train``, and fewer training rows are the first of more. With the seed
    :data:`PRETRAINED` they are the news that the tiny model has read already. Raises what :func:`generate` raises.
    """
    _check(style, train, test, seed)
    bodies: set[str] = set()
    headlines: set[str] = set()
    test_rows = list(_distinct(test, 2 * seed + 1, KINDS, style, bodies, headlines))
    return list(_distinct(train, 2 * seed, ("seen",), style, bodies, headlines)), test_rows


def _check(style: str, *numbers: int) -> None:
    if style not in STYLES:
        raise ValueError(f"styles are {' and '.join(STYLES)}, not {style}")
    if min(numbers) < 0:  # Python's Random takes −1 for 1
        raise ValueError(f"numbers of rows and the seed must be 0 or more, not {' and '.join(map(str, numbers))}")


def _distinct(
    count: int, seed: int, kinds: Sequence[str], style: str, bodies: set[str], headlines: set[str]
) -> Iterator[dict[str, str]]:
    random, rows = Random(seed), 0
    while rows < count:
        kind = kinds[rows % len(kinds)]
        event, body, marked = _write(random, kind)
        plain = headline_of(marked)
        if body in bodies or plain in headlines or not _fits(body, plain):
            continue
        bodies.add(body)
        headlines.add(plain)
        rows += 1
        headline = headline_of(marked, event.section) if style == "section" else plain
        yield {"instruction": INSTRUCTIONS[style], "input": body, "output": headline, "source": f"generated/{kind}"}


def _write(random: Random, kind: str) -> tuple[NewsEvent, str, str]:
    """An event, a body, and the sentence with the news in it, marked; whatever they turn out to be."""
    grammar = load_grammar()
    event = pick(random, [event for event in grammar.events if event.kind == kind])
    story = Story(event, random)
    marked = story.fill(pick(random, event.news))
    sentences = [story.frame(pick(random, grammar.frames[kind]), marked)]
    if random.random() < SCENE_FIRST:
        scenes = event.scenes if random.random() < 0.7 else grammar.scenes
        sentences.insert(0, story.fill(pick(random, scenes)))
    following = [pick(random, event.details)]
    if random.random() < 0.5:
        following.append(pick(random, grammar.background))
    elif len(sentences) == 1:
        following.append(pick(random, [detail for detail in event.details if detail not in following]))
    if random.random() < 0.3:
        following.reverse()
    sentences.extend(story.fill(sentence) for sentence in following)
    return event, "".join(sentences), marked


def headline_of(marked: str, section: str | None = None) -> str:
    """The marked parts of a sentence: who, what, how much (「」), and the further figure (『』) where there is one.

    In plain style the figure stands last; in the style of a ``section`` behind its name, before who did what.
    """
    main, further = ("".join(re.findall(pattern, marked)) for pattern in ("「(.*?)」", "『(.*?)』"))
    if section is None:
        return f"{main}，{further}" if further else main
    return f"《{section}》{further}，{main}" if further else f"《{section}》{main}"


def _fits(body: str, headline: str) -> bool:
    """Whether both have their lengths, and the headline is not the first sentence as it stands."""
    return (
        body.count("。") <= SENTENCES
        and BODY_LENGTH[0] <= len(body) <= BODY_LENGTH[1]
        and HEADLINE_LENGTH[0] <= len(headline) <= HEADLINE_LENGTH[1]
        and body.split("。")[0] != headline
    )


def below(random: Random, count: int) -> int:
    """A number from 0 to ``count`` − 1, by ``random()`` alone: the one method that Python promises never to change."""
    return int(random.random() * count)


def pick(random: Random, items: Sequence[Any]) -> Any:
    return items[below(random, len(items))]
