"""The data of the fine-tune: bodies of news and their headlines.

Rows are objects with instruction, input, output and source, as in the article. They come from the real sources
(:mod:`~pardemo.headlines.sources`), chosen by a seed (:mod:`~pardemo.headlines.build`), or from a grammar of the
project's own (:mod:`~pardemo.headlines.grammar`).

>>> from pardemo import headlines
>>> train, test = headlines.corpus(train=100, test=10)
>>> {row["source"] for row in test} == {"generated/seen", "generated/unseen"}
True
"""

from pardemo.headlines.build import build
from pardemo.headlines.grammar import corpus, generate
from pardemo.headlines.rows import Problem, Report, check, read

__all__ = ["Problem", "Report", "build", "check", "corpus", "generate", "read"]
