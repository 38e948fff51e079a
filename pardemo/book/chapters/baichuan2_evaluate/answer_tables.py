"""Tables of *Baichuan2: before and after*: what was wanted and what was written, each beside its English."""

from collections.abc import Mapping, Sequence

from pardemo.book.chapters.baichuan2_finetune.english import english_of
from pardemo.tables import show


def beside_english(texts: Mapping[str, str]):
    """Texts by name, one below the other, each beside its English."""
    return show([{"": name, "text": text, "in English": english_of(text)} for name, text in texts.items()])


def rows_beside_english(answers: Mapping[str, Sequence[str]], rows: Sequence[int]):
    """Several rows of the test: what each answer says there, beside its English.

    Args:
        answers: name -> a text for each row of the test. rows: which rows are shown.
    """
    return show(
        [
            {"": name, "text": texts[row], "in English": english_of(texts[row])}
            for row in rows
            for name, texts in answers.items()
        ]
    )
